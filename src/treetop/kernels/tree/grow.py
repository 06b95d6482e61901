"""Growing a tree; on a GPU one launch to start, one a draft level. `kernels.tree.select` chooses among what has grown.

A score is the sum of corrected log-probabilities (`kernels.tree.calibration`) along the path. Both ways give the same
bits: scores are the same float32 additions, ties go to the smaller index. Flat candidate indices: see
`kernels.tree.tree`.

The first of each frontier is the top-1 chain, whatever its score: a tree that is not worth its branches is a chain.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sort_key import index_of, key_of
from treetop.kernels.tree.calibration import Calibration, InverseTemperature, corrected, corrected_in_registers
from treetop.kernels.tree.rows import RowTables
from treetop.kernels.tree.topk import MOST
from treetop.kernels.tree.tree import next_level_mask, root_tree, stable_topk
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.layout import SpecShape
from treetop.types.tree import DraftTree, PathPositions, copy_into

_BLOCK = 4096
"""Elements of hidden states that a program moves."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level, which the head runs on next.

    tokens: [rows, k] int64.
    score: [rows, k] float32.
    hidden: [rows, k, draft hidden].
    mask: [rows, k, t] bool, the node's true ancestors and itself among the t nodes of all levels so far.
    """

    tokens: Tensor
    score: Tensor
    hidden: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Children:
    """What the head proposes after each node of a frontier, and its states.

    tokens: [rows, k, k] int64.
    logprob: [rows, k, k] float32.
    hidden: [rows, k, draft hidden].
    """

    tokens: Tensor
    logprob: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """A batch of growing trees: every candidate by its flat index, and where the levels stand.

    tokens: [rows, n] int64.
    scores: [rows, n] float32.
    parents: [rows, 1 + k * S] int64, the flat index of the parent of each group of siblings, the first group's being
        the root; of the first 1 + k, which are always -1 to k - 1, kernels write none, and the last k are never used.
    positions: [rows, k * S] int64, where the nodes of each level stand in the draft, which runs one position behind its
        tokens.
    logprob: [rows, n] float32, each candidate's own, not corrected.
    chosen: [rows, T] int64, the flat index of each node of the tree; -1 for the root.
    classes: [rows] int64, of the rows, by which they are calibrated.
    inv_temp, logprob_bias: of the engine's `Calibration`.
    """

    shape: SpecShape
    tokens: Tensor
    scores: Tensor
    parents: Tensor
    positions: Tensor
    logprob: Tensor
    chosen: Tensor
    classes: Tensor
    inv_temp: Tensor
    logprob_bias: Tensor

    @property
    def above(self) -> Tensor:
        """The parent of each group of candidates, [rows, 1 + k * (S - 1)]: of the first 1 + k always -1 to k - 1."""
        k, groups = self.shape.topk, 1 + (self.shape.num_steps - 1) * self.shape.topk
        first = torch.arange(-1, k, device=self.parents.device).expand(len(self.parents), -1)
        return torch.cat([first, self.parents[:, k + 1 : groups]], dim=1)[:, :groups]

    def row_inv_temp(self, depth: int) -> InverseTemperature:
        """By which the head's log-probabilities after these rows' nodes of a depth are taken."""
        return InverseTemperature(self.inv_temp[depth], self.classes)


def make_growth(
    shape: SpecShape,
    count: int,
    calibration: Calibration,
    make: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> TreeBuilder:
    """Candidates of `count` rows, in memory that `make` gives."""
    wide, long, real = shape.topk * shape.num_steps, torch.int64, torch.float32
    return TreeBuilder(
        shape,
        make((count, shape.num_candidates), long),
        make((count, shape.num_candidates), real),
        make((count, 1 + wide), long),
        make((count, wide), long),
        make((count, shape.num_candidates), real),
        make((count, shape.num_draft_tokens), long),
        make((count,), long),
        calibration.inv_temp,
        calibration.logprob_bias,
    )


def fits(shape: SpecShape) -> bool:
    """Whether one program can hold a row's candidates and its tree's mask in registers."""
    return shape.topk <= MOST and shape.num_draft_tokens <= 128 and shape.num_candidates <= 2048


# ---------------------------------------------------------------------------------------------------------- start


def draft_positions(committed: Tensor, level: int, k: int) -> Tensor:
    """Nodes of depth `level + 1` stand at `committed + level`: the draft runs one position behind its token.

    Returns [rows, k] int64. Source: sgl-25015, where they were one too far.
    """
    return (committed + level)[:, None].expand(-1, k)


def start_reference(
    tables: RowTables, rows: Tensor, growth: TreeBuilder, tree: DraftTree, places: PathPositions, identity: Tensor
) -> Frontier:
    """Begin the trees: node 0, where the rows stand, and level 0, the first frontier.

    rows: [rows] int64. growth: unwritten. identity: [k, k] bool, constant. A tree without levels is complete after
    this, and its frontier is nothing.
    """
    shape, n = growth.shape, rows.shape[0]
    k = shape.topk
    committed, root = tables.committed[rows], tables.root[rows]
    places.committed.copy_(committed)
    torch.add(committed[:, None], torch.arange(shape.commit_width, device=rows.device), out=places.path)
    growth.classes.copy_(tables.classes[rows])
    if shape.num_steps == 0:
        copy_into(tree, root_tree(root))
        places.nodes.copy_(committed[:, None])
        nothing = growth.scores  # [rows, 0]
        return Frontier(tokens=nothing, score=nothing, hidden=nothing, mask=nothing)
    assert tables.draft is not None
    tree.tokens[:, 0] = root
    tokens, score, logprob = growth.tokens[:, :k], growth.scores[:, :k], growth.logprob[:, :k]
    tokens.copy_(tables.draft.tokens[rows, :k])
    logprob.copy_(tables.draft.logprob[rows, :k])
    score.copy_(corrected(logprob, growth.logprob_bias[growth.classes, 0, :k]))
    growth.parents[:, : k + 1] = torch.arange(-1, k, device=rows.device)
    levels = [draft_positions(committed, level, k) for level in range(shape.num_steps)]
    torch.cat(levels, dim=1, out=growth.positions)
    hidden = tables.draft.hidden[rows][:, None].expand(-1, k, -1)
    return Frontier(tokens, score, hidden, identity.expand(n, k, k))


def start(
    tables: RowTables,
    rows: Tensor,
    growth: TreeBuilder,
    tree: DraftTree,
    places: PathPositions,
    identity: Tensor,
    gpu: GpuTraits,
) -> Frontier:
    """`start_reference` in one launch. Often the first of a graph, it has nothing before it to overlap with."""
    shape, draft = growth.shape, tables.draft
    k, steps = shape.topk, shape.num_steps
    assert draft is not None or steps == 0
    state = tables.root[:, None] if draft is None else draft.hidden
    width = state.shape[1] if steps else 0
    hidden = torch.empty((len(rows), k, width), dtype=state.dtype, device=rows.device)
    block = min(_BLOCK // lanes(k), lanes(width))
    flags = mask_bytes(tree.mask)
    _start_kernel[(len(rows), max(1, -(-width // block)))](
        rows, tables.committed, tables.root, *((draft.tokens, draft.logprob) if draft else (tables.root,) * 2), state,
        tree.tokens, tree.parent, tree.depth, flags, tree.logprob, places.committed, places.nodes, places.path,
        growth.tokens, growth.scores, growth.positions, hidden,
        tables.classes, growth.classes, growth.logprob_bias, growth.logprob, growth.logprob_bias.stride(0),
        draft.tokens.stride(0) if draft else 0, state.stride(0), row_stride(tree), flags.stride(0),
        places.nodes.stride(0), places.path.stride(0), shape.num_candidates, width,
        k=k, steps=steps, block_k=lanes(k), block_w=lanes(steps + 1),
        block_p=lanes(k * steps), block=block, num_warps=4,
    )  # fmt: skip
    tokens, scores = growth.tokens[:, :k], growth.scores[:, :k]
    return Frontier(tokens, scores, hidden, identity.expand(len(rows), k, k))


@jit
def _start_kernel(
    rows: Arg, committed: Arg, root: Arg, tokens: Arg, logprob: Arg, hidden: Arg,
    node_tokens: Arg, parent: Arg, depth: Arg, mask: Arg, node_logprob: Arg,
    out_committed: Arg, nodes: Arg, path: Arg, out_tokens: Arg, out_scores: Arg, positions: Arg, out_hidden: Arg,
    classes: Arg, out_classes: Arg, logprob_bias: Arg, out_logprob: Arg, class_stride: Arg,
    token_row: Arg, hidden_row: Arg, tree_row: Arg, mask_row: Arg, nodes_row: Arg, path_row: Arg,
    candidates: Arg, width: Arg,
    k: constexpr, steps: constexpr, block_k: constexpr, block_w: constexpr, block_p: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """One block of a row's hidden state a program, the first also the rest. Grid (rows, blocks)."""
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + item)
    if part == 0:
        length = tl.load(committed + row)
        tl.store(out_committed + item, length)
        kind = tl.load(classes + row)
        tl.store(out_classes + item, kind)
        tl.store(nodes + item * nodes_row, length)
        column = tl.arange(0, block_w)
        tl.store(path + item * path_row + column, length + column, mask=column < steps + 1)
        tl.store(node_tokens + item * tree_row, tl.load(root + row))
        tl.store(parent + item * tree_row, 0)
        tl.store(depth + item * tree_row, 0)
        tl.store(node_logprob + item * tree_row, 0.0)
        tl.store(mask + item * mask_row, 1)
        if steps > 0:
            branch = tl.arange(0, block_k)
            there = branch < k
            token = tl.load(tokens + row * token_row + branch, mask=there, other=0)
            tl.store(out_tokens + item * candidates + branch, token, mask=there)
            own = tl.load(logprob + row * token_row + branch, mask=there, other=0.0)
            tl.store(out_logprob + item * candidates + branch, own, mask=there)
            first = tl.zeros([block_k], tl.int64) + row * token_row
            score = corrected_in_registers(logprob, logprob_bias + kind * class_stride, first, branch, there, k)
            tl.store(out_scores + item * candidates + branch, score, mask=there)
            node = tl.arange(0, block_p)
            tl.store(positions + item * (k * steps) + node, length + node // k, mask=node < k * steps)
    if steps > 0:
        lane = part * block + tl.arange(0, block)
        inside = lane < width
        state = tl.load(hidden + row * hidden_row + lane, mask=inside, other=0.0)
        for branch_of in tl.static_range(k):
            tl.store(out_hidden + (item * k + branch_of) * width + lane, state, mask=inside)


# ----------------------------------------------------------------------------------------------------------- grow


def grow_reference(growth: TreeBuilder, level: int, frontier: Frontier, children: Children) -> Frontier:
    """Record a frontier's children, those of level `level + 1`, and make the k best of them the next frontier."""
    k = frontier.tokens.shape[1]
    first = k + level * k**2
    scores = growth.scores[:, first : first + k**2]
    logprob = growth.logprob[:, first : first + k**2]
    logprob.copy_(children.logprob.flatten(1))
    own = corrected(children.logprob, growth.logprob_bias[growth.classes, level + 1, :k][:, None])
    torch.add(frontier.score[:, :, None], own, out=scores.unflatten(1, (k, k)))
    tokens = children.tokens.flatten(1)
    growth.tokens[:, first : first + k**2] = tokens
    ranked = scores.clone()
    ranked[:, 0] = float("inf")  # the greedy chain's next node
    chosen = stable_topk(ranked, k)[1]
    group = 1 + (level + 1) * k  # the first below the new frontier
    torch.add(chosen, first, out=growth.parents[:, group : group + k])
    parent = chosen // k
    hidden = children.hidden
    return Frontier(
        tokens.gather(1, chosen),
        scores.gather(1, chosen),
        hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[2])),
        next_level_mask(frontier.mask, parent),
    )


def grow(growth: TreeBuilder, level: int, frontier: Frontier, children: Children, gpu: GpuTraits) -> Frontier:
    """`grow_reference` in one launch."""
    rows, k, t = frontier.mask.shape
    width = children.hidden.shape[2]
    assert children.hidden.is_contiguous()
    proposed, logprob = children.tokens.contiguous(), children.logprob.contiguous()
    flags = mask_bytes(frontier.mask)
    tokens, score = torch.empty_like(proposed[:, 0]), torch.empty_like(logprob[:, 0])
    hidden = torch.empty_like(children.hidden)
    mask = torch.empty((rows, k, t + k), dtype=torch.uint8, device=tokens.device)
    block = min(_BLOCK // lanes(k), lanes(width))
    _grow_kernel[(rows, max(1, -(-width // block)))](
        frontier.score, proposed, logprob, children.hidden, flags,
        growth.tokens, growth.scores, growth.parents, tokens, score, hidden, mask,
        growth.logprob, growth.classes, growth.logprob_bias[:, level + 1], growth.logprob_bias.stride(0),
        frontier.score.stride(0), *flags.stride(), growth.shape.num_candidates, growth.parents.stride(0),
        k + level * k * k, 1 + (level + 1) * k, t, width,
        k=k, block_k=lanes(k), block_c=lanes(k * k), block_t=lanes(k * growth.shape.num_steps),
        block=block, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return Frontier(tokens, score, hidden, mask.view(torch.bool))


@jit
def _grow_kernel(
    above: Arg, tokens: Arg, logprob: Arg, hidden: Arg, mask: Arg,
    all_tokens: Arg, all_scores: Arg, parents: Arg, out_tokens: Arg, out_score: Arg, out_hidden: Arg, out_mask: Arg,
    all_logprob: Arg, classes: Arg, logprob_bias: Arg, class_stride: Arg,
    above_row: Arg, mask_row: Arg, mask_node: Arg, mask_column: Arg, candidates: Arg, parent_row: Arg,
    first: Arg, first_group: Arg, t: Arg, width: Arg,
    k: constexpr, block_k: constexpr, block_c: constexpr, block_t: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Every program of a row finds its k best children; each moves one block of their parents' states, the first also
    writes the rest. first: flat index of the first child; first_group: number of the first group below the new
    frontier. Grid (rows, blocks).
    """
    pdl_wait(overlap, early=True)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    child = tl.arange(0, block_c)
    real = child < k * k
    own_bias = logprob_bias + tl.load(classes + row) * class_stride
    score = tl.load(above + row * above_row + child // k, mask=real, other=0.0)
    score += corrected_in_registers(logprob, own_bias, row * (k * k) + child // k * k, child % k, real, k)
    ranked = tl.where(child == 0, float("inf"), score)  # the greedy chain's next node
    key = tl.where(real, key_of(ranked, child), -0x7FFFFFFFFFFFFFFF)
    slot = tl.arange(0, block_k)
    chosen = tl.zeros([block_k], tl.int32)
    for i in tl.static_range(k):
        best = tl.max(key, 0)
        chosen = tl.where(slot == i, index_of(best), chosen)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
    there = slot < k
    parent = chosen // k

    if part == 0:
        token = tl.load(tokens + row * (k * k) + child, mask=real, other=0)
        tl.store(all_tokens + row * candidates + first + child, token, mask=real)
        tl.store(all_scores + row * candidates + first + child, score, mask=real)
        own = tl.load(logprob + row * (k * k) + child, mask=real, other=0.0)
        tl.store(all_logprob + row * candidates + first + child, own, mask=real)
        tl.store(parents + row * parent_row + first_group + slot, (chosen + first).to(tl.int64), mask=there)
        next_token = tl.load(tokens + row * (k * k) + chosen, mask=there, other=0)
        tl.store(out_tokens + row * k + slot, next_token, mask=there)
        next_score = tl.load(above + row * above_row + parent, mask=there, other=0.0)
        next_score += corrected_in_registers(logprob, own_bias, row * (k * k) + parent * k, chosen % k, there, k)
        tl.store(out_score + row * k + slot, next_score, mask=there)
        column = tl.arange(0, block_t)
        inherited = mask + row * mask_row + parent[:, None] * mask_node + column[None, :] * mask_column
        shown = tl.load(inherited, mask=there[:, None] & (column < t)[None, :], other=0)
        own = (column[None, :] == t + slot[:, None]).to(tl.uint8)
        at = out_mask + (row * k + slot[:, None]) * (t + k) + column[None, :]
        tl.store(at, shown | own, mask=there[:, None] & (column < t + k)[None, :])

    lane = part * block + tl.arange(0, block)
    inside = there[:, None] & (lane < width)[None, :]
    state = tl.load(hidden + (row * k + parent[:, None]) * width + lane[None, :], mask=inside, other=0.0)
    tl.store(out_hidden + (row * k + slot[:, None]) * width + lane[None, :], state, mask=inside)


def mask_bytes(mask: Tensor) -> Tensor:
    """A mask as bytes, which is how kernels read and write it."""
    return mask.view(torch.uint8)


def row_stride(tree: DraftTree) -> int:
    """The stride of a row, in elements, of every tensor of a tree but its mask."""
    strides = {tree.tokens.stride(), tree.parent.stride(), tree.depth.stride(), tree.logprob.stride()}
    assert strides == {(tree.tokens.stride(0), 1)}
    return tree.tokens.stride(0)
