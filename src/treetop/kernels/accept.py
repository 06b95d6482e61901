# ruff: noqa: PLR0917 (kernels take what they touch as arguments)
"""Choosing and accepting on a GPU: a greedy round in two launches, a sampled one in one after `kernels.draw`.

References: `greedy_choice`, `accept` and `force` of `spec.verify`, which these equal bit for bit. Where a logit
is NaN the node is not finite, and the token chosen there has no meaning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.order import index_of, key_of, value_of
from treetop.kernels.overlap import launch_options, take_turn
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import Accepted, DraftTree

_PIECE = 4096
"""Logits of one program of the first launch."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The target's token after each node, drawn already. token: [rows, T] int64. finite: [rows, T] bool, its logits."""

    token: Tensor
    finite: Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """The first of the largest logits of each piece of the vocabulary, as keys [rows, T, pieces] int64."""

    key: Tensor


def best_of_pieces(logits: Tensor, gpu: GpuTraits) -> Pieces:
    """logits: [rows, T, vocab], contiguous; float32 or narrower."""
    rows, width, vocab = logits.shape
    assert logits.is_contiguous()
    pieces = -(-vocab // _PIECE)
    key = torch.empty((rows, width, pieces), dtype=torch.int64, device=logits.device)
    _pieces_kernel[(rows * width, pieces)](
        key, logits, vocab,
        block=min(_PIECE, lanes(vocab)), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return Pieces(key)


@jit
def _pieces_kernel(key: Arg, logits: Arg, vocab: Arg, block: constexpr, overlap: constexpr) -> None:
    """One piece of one node's logits a program; a key is made of its best alone. Grid (rows * T, pieces)."""
    take_turn(overlap, early=True)
    node, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * block + tl.arange(0, block)
    there = token < vocab
    value = tl.load(logits + node * vocab + token, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))  # noqa: PLR0124 (NaN: not finite, and not lost)
    best = tl.max(value, 0)
    first = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    tl.store(key + node * tl.num_programs(1) + part, key_of(best, first))


def accept(chosen: Drawn | Pieces, tree: DraftTree, out: Accepted, forced: int | None, gpu: GpuTraits) -> None:
    """Merge the pieces if there are any, follow the choices through each tree, and write what is accepted.

    forced: accept this many nodes after the root in order, right or wrong; for measuring speed only.
    """
    rows, nodes = tree.tokens.shape
    greedy = isinstance(chosen, Pieces)
    choice = chosen.key if isinstance(chosen, Pieces) else chosen.token
    finite_in = choice if isinstance(chosen, Pieces) else chosen.finite.view(torch.uint8)
    assert forced is None or forced < min(nodes, out.path.shape[1])
    assert choice.is_contiguous()
    assert finite_in.is_contiguous()
    assert tree.tokens.stride() == tree.parent.stride() == tree.depth.stride()
    assert out.path.stride() == out.tokens.stride()
    flags, width = tree.mask.view(torch.uint8), out.path.shape[1]
    pieces = choice.shape[2] if greedy else 1
    _accept_kernel[(rows,)](
        choice, finite_in, tree.tokens, tree.parent, tree.depth, flags,
        out.path, out.accept_len, out.tokens, out.bonus, out.finite.view(torch.uint8),
        tree.tokens.stride(0), flags.stride(0), flags.stride(1), out.path.stride(0),
        nodes=nodes, width=width, pieces=pieces, block_t=lanes(nodes), block_w=lanes(width), block_p=lanes(pieces),
        greedy=greedy, forced=-1 if forced is None else forced, overlap=gpu.can_overlap,
        num_warps=4 if nodes <= 32 else 8, **launch_options(gpu),
    )  # fmt: skip


@jit
def _accept_kernel(
    choice: Arg, finite_in: Arg, tokens: Arg, parent: Arg, depth: Arg, mask: Arg,
    path: Arg, accept_len: Arg, out_tokens: Arg, bonus: Arg, finite: Arg,
    tree_row: Arg, mask_row: Arg, mask_node: Arg, path_row: Arg,
    nodes: constexpr, width: constexpr, pieces: constexpr, block_t: constexpr, block_w: constexpr,
    block_p: constexpr, greedy: constexpr, forced: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program. choice: keys [rows, nodes, pieces] if greedy, else tokens [rows, nodes], and finite_in
    bytes [rows, nodes]. Grid (rows,).
    """
    take_turn(overlap, early=True)
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

    column = tl.arange(0, block_w)
    if forced >= 0:
        length = tl.full([], forced, tl.int32)
        at_column = tl.where(column <= forced, column, 0)
        on_path = node <= forced
    else:
        up = tl.load(parent + row * tree_row + node, mask=real, other=0).to(tl.int32)
        expected = tl.sum(tl.where(up[:, None] == node[None, :], token[None, :], 0), 1)  # the parent's choice
        drafted = tl.load(tokens + row * tree_row + node, mask=real, other=-1)
        wanted = (drafted == expected) | (node == 0)
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
