"""Accepting: the path of the tree that equals what the target itself chooses.

The target chooses a token at every node: the argmax, or a draw by a uniform that depends only on the request's seed and
the token's position. A draft is accepted iff it equals its parent's choice; the last choice on the path is the bonus.

Why this is lossless: the children of a node are a fixed set, so drawing x from the target and moving to the child
that equals x, or stopping with x, emits exactly x ~ target. It accepts with probability sum over children of
p(child), the same as multi-round rejection with point-mass proposals, and it makes sampled output with a tree equal,
token for token, to sampled output without one.

On a GPU a greedy round chooses and accepts in two launches, a sampled one accepts in one after `kernels.sampling.draw`.
Where a logit is NaN the node is not finite, and the token chosen there has no meaning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sampling.sampling import PartialArgmax, SampledTokens
from treetop.kernels.sort_key import index_of, key_of, value_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import Accepted, DraftTree, copy_into

_PIECE = 4096
"""Logits of one program of the first launch."""


@dataclass(frozen=True, slots=True)
class MaskedDrafts:
    """Drafts that are not accepted, whatever the target chooses.

    rows, draft_rows: [rows] int64, of the batch: the same, but where none of a row's drafts is accepted.
    nodes: [rows, T] bool, drafts of constrained rows behind which it is not known what is allowed; None for none.
    """

    rows: Tensor
    draft_rows: Tensor
    nodes: Tensor | None

    def of_tree(self) -> Tensor:
        """[rows, 1 or T] bool."""
        no_draft = (self.rows != self.draft_rows)[:, None]
        return no_draft if self.nodes is None else no_draft | self.nodes


def accept(
    tree: DraftTree, choice: Tensor, finite: Tensor, commit_width: int, masked_drafts: MaskedDrafts | None = None
) -> Accepted:
    """Follow the target's choices through each tree.

    choice: [rows, T] int64, the target's token after each node. finite: [rows, T] bool, of its logits there. The path
    is the line from the root to the deepest node that, with all its ancestors, equals its parent's choice. A live row's
    siblings differ, so there is one such node; the dummy row's are equal, and of several the first is taken. A line has
    one node a depth, so no path is longer than its tree is deep, whatever the tree. Logits off the path are not looked
    at (but a value that is not finite spoils its whole tree: in attention even a masked one counts 0 times NaN).
    """
    rows, width = tree.tokens.shape
    wanted = tree.tokens == choice.gather(1, tree.parent)
    if masked_drafts is not None:
        wanted &= ~masked_drafts.of_tree()
    wanted[:, 0] = True
    agreed = ~(tree.mask & ~wanted[:, None, :]).any(dim=2)  # [rows, T], itself and its ancestors
    accept_len, last = torch.where(agreed, tree.depth, -1).max(dim=1)  # the first of the deepest
    on_path = tree.mask.gather(1, last[:, None, None].expand(-1, 1, width))[:, 0]  # its line, [rows, T]
    place = torch.where(on_path, tree.depth, commit_width)  # nodes off the path go to a column that is cut
    nodes = torch.arange(width, device=choice.device).expand(rows, -1)
    path = torch.zeros((rows, commit_width + 1), dtype=torch.int64, device=choice.device)
    path = path.scatter_(1, place, nodes)[:, :commit_width]
    tokens = choice.gather(1, path)
    sound = (finite | ~on_path).all(dim=1)
    return Accepted(path, accept_len, tokens, tokens.gather(1, accept_len[:, None])[:, 0], sound, choice)


def force(choice: Tensor, finite: Tensor, lengths: Tensor, commit_width: int) -> Accepted:
    """Paths of the first nodes after the root, right or wrong: for measuring speed only.

    lengths: [rows] int64, how many, less than T and `commit_width`.
    """
    column = torch.arange(commit_width, device=choice.device).expand(choice.shape[0], -1)
    path = torch.where(column <= lengths[:, None], column, 0)
    tokens = choice.gather(1, path)
    bonus = tokens.gather(1, lengths[:, None])[:, 0]
    return Accepted(path, lengths, tokens, bonus, finite.gather(1, path).all(dim=1), choice)


def accept_reference(
    chosen: SampledTokens | PartialArgmax,
    tree: DraftTree,
    out: Accepted,
    forced: Tensor | None,
    masked_drafts: MaskedDrafts | None = None,
) -> None:
    """Follow the choices through each tree and write what is accepted; or `force` paths so long, [rows] int64."""
    assert isinstance(chosen, SampledTokens)
    width = out.path.shape[1]
    if forced is None:
        copy_into(out, accept(tree, chosen.token, chosen.finite, width, masked_drafts))
    else:
        copy_into(out, force(chosen.token, chosen.finite, forced, width))


def best_of_pieces(logits: Tensor, gpu: GpuTraits) -> PartialArgmax:
    """`greedy_reference` but for the merge of the pieces, which `accept_in_one_launch` does.

    logits: [rows, T, vocab], contiguous; float32 or narrower.
    """
    rows, width, vocab = logits.shape
    assert logits.is_contiguous()
    pieces = -(-vocab // _PIECE)
    key = torch.empty((rows, width, pieces), dtype=torch.int64, device=logits.device)
    _pieces_kernel[(rows * width, pieces)](
        key, logits, vocab,
        block=min(_PIECE, lanes(vocab)), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return PartialArgmax(key)


@jit
def _pieces_kernel(key: Arg, logits: Arg, vocab: Arg, block: constexpr, overlap: constexpr) -> None:
    """One piece of one node's logits a program; a key is made of its best alone. Grid (rows * T, pieces)."""
    pdl_wait(overlap, early=True)
    node, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * block + tl.arange(0, block)
    there = token < vocab
    value = tl.load(logits + node * vocab + token, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))  # noqa: PLR0124 (NaN: not finite, and not lost)
    best = tl.max(value, 0)
    first = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    tl.store(key + node * tl.num_programs(1) + part, key_of(best, first))


def accept_in_one_launch(
    chosen: SampledTokens | PartialArgmax,
    tree: DraftTree,
    out: Accepted,
    forced: Tensor | None,
    masked_drafts: MaskedDrafts | None = None,
    *,
    gpu: GpuTraits,
) -> None:
    """`accept_reference`; it merges the pieces if there are any."""
    rows, nodes = tree.tokens.shape
    greedy = isinstance(chosen, PartialArgmax)
    choice = chosen.key if isinstance(chosen, PartialArgmax) else chosen.token
    finite_in = choice if isinstance(chosen, PartialArgmax) else chosen.finite.view(torch.uint8)
    assert choice.is_contiguous()
    assert finite_in.is_contiguous()
    assert tree.tokens.stride() == tree.parent.stride() == tree.depth.stride()
    assert out.path.stride() == out.tokens.stride()
    flags, width = tree.mask.view(torch.uint8), out.path.shape[1]
    pieces = choice.shape[2] if greedy else 1
    rows_in = draft_rows_in = nodes_in = flags
    if masked_drafts is not None:
        rows_in, draft_rows_in = masked_drafts.rows, masked_drafts.draft_rows
        nodes_in = flags if masked_drafts.nodes is None else masked_drafts.nodes.view(torch.uint8)
        assert rows_in.is_contiguous()
        assert draft_rows_in.is_contiguous()
        assert masked_drafts.nodes is None or masked_drafts.nodes.stride(1) == 1
    _accept_kernel[(rows,)](
        choice, finite_in, tree.tokens, tree.parent, tree.depth, flags, out.accept_len if forced is None else forced,
        out.path, out.accept_len, out.tokens, out.bonus, out.finite.view(torch.uint8), out.choice, out.choice.stride(0),
        tree.tokens.stride(0), flags.stride(0), flags.stride(1), out.path.stride(0),
        rows_in, draft_rows_in, nodes_in, nodes_in.stride(0),
        masks_drafts=masked_drafts is not None,
        masks_nodes=masked_drafts is not None and masked_drafts.nodes is not None,
        nodes=nodes, width=width, pieces=pieces, block_t=lanes(nodes), block_w=lanes(width), block_p=lanes(pieces),
        greedy=greedy, is_forced=forced is not None, overlap=gpu.can_overlap,
        num_warps=4 if nodes <= 32 else 8, **launch_options(gpu),
    )  # fmt: skip


@jit
def _accept_kernel(
    choice: Arg, finite_in: Arg, tokens: Arg, parent: Arg, depth: Arg, mask: Arg, forced: Arg,
    path: Arg, accept_len: Arg, out_tokens: Arg, bonus: Arg, finite: Arg, out_choice: Arg, choice_row: Arg,
    tree_row: Arg, mask_row: Arg, mask_node: Arg, path_row: Arg,
    rows_in: Arg, draft_rows_in: Arg, masked_drafts: Arg, masked_row: Arg,
    masks_drafts: constexpr, masks_nodes: constexpr,
    nodes: constexpr, width: constexpr, pieces: constexpr, block_t: constexpr, block_w: constexpr,
    block_p: constexpr, greedy: constexpr, is_forced: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program. choice: keys [rows, nodes, pieces] if greedy, else tokens [rows, nodes], and finite_in
    bytes [rows, nodes]. Grid (rows,).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, block_t)
    real = node < nodes
    if greedy:
        part = tl.arange(0, block_p)
        known = real[:, None] & (part < pieces)[None, :]
        at = (row * nodes + node[:, None]) * pieces + part[None, :]
        key = tl.max(tl.load(choice + at, mask=known, other=-0x7FFFFFFFFFFFFFFF), 1)
        token = index_of(key).to(tl.int64)
        sound = tl.abs(value_of(key)) < float("inf")  # false of NaN
    else:
        token = tl.load(choice + row * nodes + node, mask=real, other=0)
        sound = tl.load(finite_in + row * nodes + node, mask=real, other=1) != 0
    tl.store(out_choice + row * choice_row + node, token, mask=real)

    column = tl.arange(0, block_w)
    if is_forced:
        length = tl.load(forced + row).to(tl.int32)
        at_column = tl.where(column <= length, column, 0)
        on_path = node <= length
    else:
        up = tl.load(parent + row * tree_row + node, mask=real, other=0).to(tl.int32)
        expected = tl.sum(tl.where(up[:, None] == node[None, :], token[None, :], 0), 1)  # the parent's choice
        drafted = tl.load(tokens + row * tree_row + node, mask=real, other=-1)
        wanted = drafted == expected
        if masks_drafts:
            wanted = wanted & (tl.load(rows_in + row) == tl.load(draft_rows_in + row))
        if masks_nodes:
            wanted = wanted & (tl.load(masked_drafts + row * masked_row + node, mask=real, other=0) == 0)
        wanted = wanted | (node == 0)
        line = mask + row * mask_row + node[:, None] * mask_node + node[None, :]
        ancestor = tl.load(line, mask=real[:, None] & real[None, :], other=0) != 0
        wrong = tl.sum((ancestor & (wanted.to(tl.int32) == 0)[None, :]).to(tl.int32), 1)
        agreed = real & (wrong == 0)
        level = tl.load(depth + row * tree_row + node, mask=real, other=0).to(tl.int32)
        deepest = tl.max(tl.where(agreed, level * block_t + (block_t - 1 - node), 0), 0)  # of several the first
        length = deepest // block_t
        last = block_t - 1 - deepest % block_t
        on_path = tl.load(mask + row * mask_row + last * mask_node + node, mask=real, other=0) != 0
        here = on_path[None, :] & (level[None, :] == column[:, None])  # a line has one node a depth
        at_column = tl.sum(tl.where(here, node[None, :], 0), 1)
    tl.store(finite + row, tl.min((sound | (on_path.to(tl.int32) == 0)).to(tl.int32), 0).to(tl.uint8))
    emitted = tl.sum(tl.where(at_column[:, None] == node[None, :], token[None, :], 0), 1)
    inside = column < width
    tl.store(path + row * path_row + column, at_column.to(tl.int64), mask=inside)
    tl.store(out_tokens + row * path_row + column, emitted, mask=inside)
    tl.store(accept_len + row, length.to(tl.int64))
    tl.store(bonus + row, tl.sum(tl.where(column == length, emitted, 0), 0))
