"""Choosing the verify tree among the candidates that have grown; on a GPU in one launch.

Scores are compared alike both ways, ties go to the smaller index. Flat candidate indices: see `kernels.tree.tree`.
"""

import torch

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sort_key import index_of, key_of
from treetop.kernels.tree.grow import TreeBuilder, mask_bytes, row_stride
from treetop.kernels.tree.tree import select_tree
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import DraftTree, PathPositions, copy_into


def select_reference(growth: TreeBuilder, tree: DraftTree, places: PathPositions) -> None:
    """Choose the verify tree among the candidates, into buffers whose node 0 `start` wrote, and place its nodes."""
    root = tree.tokens[:, 0]
    candidates = growth.tokens, growth.scores, growth.parents
    copy_into(tree, select_tree(root, *candidates, growth.shape, growth.chosen))
    torch.add(places.committed[:, None], tree.depth, out=places.nodes)


def select(growth: TreeBuilder, tree: DraftTree, places: PathPositions, gpu: GpuTraits) -> None:
    """`select_reference` in one launch."""
    shape = growth.shape
    flags = mask_bytes(tree.mask)
    _select_kernel[(len(growth.tokens),)](
        growth.tokens, growth.scores, growth.parents, places.committed,
        tree.tokens, tree.parent, tree.depth, flags, tree.logprob, places.nodes,
        growth.chosen, growth.chosen.stride(0),
        row_stride(tree), flags.stride(0), flags.stride(1), places.nodes.stride(0), growth.parents.stride(0),
        k=shape.topk, steps=shape.num_steps, candidates=shape.num_candidates, count=shape.num_draft_tokens - 1,
        block_n=lanes(shape.num_candidates), block_t=lanes(shape.num_draft_tokens - 1),
        overlap=gpu.can_overlap, num_warps=4 if shape.num_draft_tokens <= 33 else 8, **launch_options(gpu),
    )  # fmt: skip


@jit
def _select_kernel(
    tokens: Arg, scores: Arg, parents: Arg, committed: Arg,
    node_tokens: Arg, node_parent: Arg, depth: Arg, mask: Arg, logprob: Arg, nodes: Arg,
    out_chosen: Arg, chosen_row: Arg,
    tree_row: Arg, mask_row: Arg, mask_node: Arg, nodes_row: Arg, parent_row: Arg,
    k: constexpr, steps: constexpr, candidates: constexpr, count: constexpr,
    block_n: constexpr, block_t: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One tree a program: the `count` best candidates, best first, then each one's place among them. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, block_n)
    real = candidate < candidates
    score = tl.load(scores + row * candidates + candidate, mask=real, other=0.0)
    key = tl.where(real, key_of(score, candidate), -0x7FFFFFFFFFFFFFFF)
    slot = tl.arange(0, block_t)
    flat = tl.zeros([block_t], tl.int32)
    for i in range(count):
        best = tl.max(key, 0)
        flat = tl.where(slot == i, index_of(best), flat)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)

    there = slot < count
    other = there[None, :]
    node = 1 + tl.sum(((flat[None, :] < flat[:, None]) & other).to(tl.int32), 1)  # breadth first is by flat index
    up = _parent_of(parents + row * parent_row, flat, there, k)
    parent = tl.sum(((flat[None, :] <= up[:, None]) & other).to(tl.int32), 1)
    level = tl.where(flat < k, 1, (flat - k) // (k * k) + 2).to(tl.int64)
    seen = (flat[None, :] == flat[:, None]).to(tl.int32)
    line = up
    for _ in range(steps - 1):
        seen |= (flat[None, :] == line[:, None]).to(tl.int32)
        line = _parent_of(parents + row * parent_row, line, there & (line >= 0), k)
    token = tl.load(tokens + row * candidates + flat, mask=there, other=0)
    worth = tl.load(scores + row * candidates + flat, mask=there, other=0.0)

    at = row * tree_row + node
    tl.store(node_tokens + at, token, mask=there)
    tl.store(logprob + at, worth, mask=there)
    tl.store(node_parent + at, parent.to(tl.int64), mask=there)
    tl.store(depth + at, level, mask=there)
    tl.store(out_chosen + row * chosen_row + node, flat.to(tl.int64), mask=there)
    tl.store(out_chosen + row * chosen_row, -1)
    tl.store(nodes + row * nodes_row + node, tl.load(committed + row) + level, mask=there)
    square = mask + row * mask_row + node[:, None] * mask_node + node[None, :]
    tl.store(square, seen.to(tl.uint8), mask=there[:, None] & other)
    tl.store(mask + row * mask_row + node * mask_node, tl.full([block_t], 1, tl.uint8), mask=there)
    tl.store(mask + row * mask_row + node, tl.zeros([block_t], tl.uint8), mask=there)


@jit
def _parent_of(parents: Arg, flat: Arg, there: Arg, k: constexpr) -> Arg:
    """Flat index of each candidate's parent; -1 for the root's children and where not `there`."""
    group = tl.where(there, flat, 0) // k  # siblings; group g of 1 .. k hangs on candidate g - 1
    deep = there & (group > k)
    found = tl.load(parents + group, mask=deep, other=0).to(tl.int32)
    return tl.where(deep, found, tl.where(there, group - 1, -1))
