"""Cutting the trees of a batch to one budget of nodes, those of the likeliest paths first.

Nodes of all live rows are compared by the draft's chance of the path to them. A chance never rises from parent to child
and a parent stands before its child, so what is kept of a row is a tree again, in the order it had.

Why no token depends on it: what is kept follows from the drafts' chances alone, which are known before the target
chooses anything. The target's choice at a node depends on the text before it, the request's seed and the position;
accepting follows these choices through children that are fixed before, and that is lossless for any set of children
(`kernels.tree.accept`). Rows of the same batch compete for nodes, so how many tokens a round emits depends on them, and
which tokens does not.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sort_key import key_of
from treetop.kernels.tree.grow import mask_bytes, row_stride
from treetop.kernels.tree.tree import stable_topk
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import DraftTree, FlatNodes, PathPositions, copy_into

NOT_CHOSEN = -2
"""In place of a candidate where a tree has none: the root's is -1."""


def trim_reference(
    tree: DraftTree, places: PathPositions, chosen: Tensor, rows: Tensor, dummy_row: int, out: FlatNodes
) -> None:
    """Keep the root of each row and the best other nodes of all, and write where they stand.

    tree, places: [rows, T], written over; of `places` the nodes. chosen: [rows, T] int64, of `TreeBuilder`, written
    over. rows: [rows] int64, of the batch; the dummy row's nodes come last. out: of N = `len(out.at)` nodes, with
    rows <= N < rows * T. Ties go to the earlier row, then to the earlier node; a chance that is NaN counts as none.
    """
    count, width = tree.tokens.shape
    live, least = (rows != dummy_row)[:, None], torch.full_like(tree.logprob[:, 1:], float("-inf"))
    score = torch.where(live & ~tree.logprob[:, 1:].isnan(), tree.logprob[:, 1:], least)
    best = stable_topk(score.reshape(1, -1), len(out.at) - count)[1][0]
    kept = torch.zeros(score.numel(), dtype=torch.bool, device=score.device).index_fill_(0, best, True)
    kept = torch.cat([torch.ones_like(live), kept.view(count, width - 1)], dim=1)

    place_nodes(kept, out)
    node = torch.arange(width, device=kept.device).expand(count, -1)
    there = node < out.count[:, None]
    old = torch.where(kept, node, width).sort(dim=1).values.clamp(max=width - 1)  # the kept nodes, then padding
    new = kept.cumsum(dim=1) - 1  # of kept nodes
    parent = new.gather(1, tree.parent.gather(1, old))
    own_mask = tree.mask.gather(1, old[:, :, None].expand(-1, -1, width)).gather(2, old[:, None].expand(-1, width, -1))
    alone = torch.eye(width, dtype=torch.bool, device=kept.device)
    cut = DraftTree(
        torch.where(there, tree.tokens.gather(1, old), 0),
        torch.where(there, parent, 0),
        torch.where(there, tree.depth.gather(1, old), 0),
        torch.where(there[:, :, None], own_mask & there[:, None], alone),
        torch.where(there, tree.logprob.gather(1, old), float("-inf")),
    )
    chosen.copy_(torch.where(there, chosen.gather(1, old), NOT_CHOSEN))
    copy_into(tree, cut)
    torch.add(places.committed[:, None], tree.depth, out=places.nodes)


def place_nodes(kept: Tensor, out: FlatNodes) -> None:
    """Write where nodes stand of which these are kept, [rows, T] bool; every entry, of padding rows too."""
    count, width = kept.shape
    out.count.copy_(kept.sum(dim=1))
    out.row_start.copy_(out.count.cumsum(0) - out.count)
    node = torch.arange(width, device=kept.device).expand(count, -1)
    there = node < out.count[:, None]
    first = torch.arange(count, device=kept.device)[:, None] * width
    out.spread.copy_(out.row_start[:, None] + torch.where(there, node, 0))
    own = torch.where(there, out.spread, len(out.at))  # padding goes to a place that is cut
    flat = torch.zeros(len(out.at) + 1, dtype=torch.int64, device=kept.device)
    out.at.copy_(flat.scatter_(0, own.reshape(-1), (first + node).reshape(-1))[:-1])


def trim(
    tree: DraftTree, places: PathPositions, chosen: Tensor, rows: Tensor, dummy_row: int, out: FlatNodes, gpu: GpuTraits
) -> None:
    """`trim_reference` in two launches: what is kept of each row, and what becomes of it."""
    count, width = tree.tokens.shape
    flags = mask_bytes(tree.mask)
    assert rows.is_contiguous()
    assert places.committed.stride(0) == places.nodes.stride(1) == chosen.stride(1) == out.spread.stride(1) == 1
    block_t, options = lanes(width), launch_options(gpu)
    _rank_kernel[(count,)](
        out.count, out.spread, out.spread.stride(0), tree.logprob, row_stride(tree), rows, dummy_row, count,
        len(out.at) - count,
        nodes=width, block_t=block_t, block_o=min(256, lanes(count * width)),
        overlap=gpu.can_overlap, num_warps=4, **options,
    )  # fmt: skip
    _trim_kernel[(count,)](
        out.count, out.row_start, out.at, out.spread, out.spread.stride(0),
        tree.tokens, tree.parent, tree.depth, flags, tree.logprob, places.committed, places.nodes, chosen,
        row_stride(tree), flags.stride(0), flags.stride(1), places.nodes.stride(0), chosen.stride(0),
        count, len(out.at), not_chosen=NOT_CHOSEN, nodes=width, block_t=block_t, block_r=lanes(count),
        overlap=gpu.can_overlap, num_warps=4 if width <= 33 else 8, **options,
    )  # fmt: skip


@jit
def _rank_kernel(
    counts: Arg, kept: Arg, kept_row: Arg, logprob: Arg, tree_row: Arg, rows: Arg, dummy_row: Arg, count: Arg,
    most: Arg, nodes: constexpr, block_t: constexpr, block_o: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """How many nodes of one row are kept, and which, as 0 and 1: its root, and those with fewer than `most` better ones
    in all rows, roots left out. Grid (rows,).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, block_t)
    real = node < nodes
    own = _trim_key(logprob, tree_row, rows, dummy_row, row * nodes + node, real, nodes)
    better = tl.zeros([block_t], tl.int32)
    for start in range(0, count * nodes, block_o):
        other = start + tl.arange(0, block_o).to(tl.int64)
        key = _trim_key(logprob, tree_row, rows, dummy_row, other, other < count * nodes, nodes)
        better += tl.sum((key[None, :] > own[:, None]).to(tl.int32), 1)
    stays = real & ((node == 0) | (better < most))
    tl.store(kept + row * kept_row + node, stays.to(tl.int64), mask=real)
    tl.store(counts + row, tl.sum(stays.to(tl.int64), 0))


@jit
def _trim_key(
    logprob: Arg, tree_row: Arg, rows: Arg, dummy_row: Arg, at: Arg, there: Arg, nodes: constexpr
) -> Arg:  # fmt: skip
    """What nodes `at` [n] int64, counted over all rows, are compared by; the least of all for roots."""
    row, node = at // nodes, at % nodes
    live = tl.load(rows + row, mask=there, other=0) != dummy_row
    score = tl.load(logprob + row * tree_row + node, mask=there, other=0.0)
    score = tl.where(live & (score == score), score, float("-inf"))  # noqa: PLR0124 (NaN)
    return tl.where(there & (node > 0), key_of(score, at.to(tl.int32)), -0x7FFFFFFFFFFFFFFF)


@jit
def _trim_kernel(
    counts: Arg, row_start: Arg, at: Arg, spread: Arg, spread_row: Arg,
    tokens: Arg, parent: Arg, depth: Arg, mask: Arg, logprob: Arg, committed: Arg, places: Arg, chosen: Arg,
    tree_row: Arg, mask_row: Arg, mask_node: Arg, places_row: Arg, chosen_row: Arg, count: Arg, total: Arg,
    not_chosen: constexpr, nodes: constexpr, block_t: constexpr, block_r: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row: its kept nodes move to the front, padding follows. `spread` holds what is kept, and is written over.
    Grid (rows,).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, block_r)
    own = tl.load(counts + each, mask=each < count, other=0)
    start = tl.sum(tl.where(each < row, own, 0), 0)
    size = tl.sum(tl.where(each == row, own, 0), 0)

    node = tl.arange(0, block_t)
    real = node < nodes
    kept = tl.load(spread + row * spread_row + node, mask=real, other=0) != 0
    before = ((node[None, :] < node[:, None]) & kept[None, :]).to(tl.int32)
    new = tl.sum(before, 1)  # of kept nodes
    from_new = (new[None, :] == node[:, None]) & kept[None, :]
    old = tl.sum(tl.where(from_new, node[None, :], 0), 1)
    there = node < size
    line = row * tree_row + old
    token = tl.load(tokens + line, mask=there, other=0)
    up = tl.load(parent + line, mask=there, other=0).to(tl.int32)
    level = tl.load(depth + line, mask=there, other=0)
    worth = tl.load(logprob + line, mask=there, other=float("-inf"))
    flat = tl.load(chosen + row * chosen_row + old, mask=there, other=not_chosen)
    both = there[:, None] & there[None, :]
    seen = tl.load(mask + row * mask_row + old[:, None] * mask_node + old[None, :], mask=both, other=0)
    above = tl.sum(((node[None, :] < up[:, None]) & kept[None, :]).to(tl.int64), 1)
    alone = (node[:, None] == node[None, :]) & (there[:, None] == 0)
    tl.debug_barrier()  # threads write where others have read

    line = row * tree_row + node
    tl.store(tokens + line, token, mask=real)
    tl.store(parent + line, tl.where(there, above, 0), mask=real)
    tl.store(depth + line, level, mask=real)
    tl.store(logprob + line, worth, mask=real)
    tl.store(chosen + row * chosen_row + node, flat, mask=real)
    tl.store(places + row * places_row + node, tl.load(committed + row) + level, mask=real)
    square = mask + row * mask_row + node[:, None] * mask_node + node[None, :]
    tl.store(square, tl.where(alone, 1, seen).to(tl.uint8), mask=real[:, None] & real[None, :])
    tl.store(spread + row * spread_row + node, start + tl.where(there, node, 0), mask=real)
    tl.store(row_start + row, start)
    tl.store(at + start + node, row * nodes + node, mask=there & (start + node < total))
