"""Choosing the verify tree among the candidates that have grown, and those of a graft; on a GPU in one launch.

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
    copy_into(tree, select_tree(root, *candidates, growth.shape, growth.chosen, growth.graft))
    torch.add(places.committed[:, None], tree.depth, out=places.nodes)


def select(growth: TreeBuilder, tree: DraftTree, places: PathPositions, gpu: GpuTraits) -> None:
    """`select_reference` in one launch."""
    shape = growth.shape
    flags, graft = mask_bytes(tree.mask), growth.graft
    grafted = 0 if graft is None else graft.tokens.shape[1]
    _select_kernel[(len(growth.tokens),)](
        growth.tokens, growth.scores, growth.parents, places.committed,
        *((growth.tokens, growth.scores, growth.parents, growth.parents) if graft is None
          else (graft.tokens, graft.scores, graft.parents, graft.depth)),
        tree.tokens, tree.parent, tree.depth, flags, tree.logprob, places.nodes,
        growth.chosen, growth.chosen.stride(0),
        row_stride(tree), flags.stride(0), flags.stride(1), places.nodes.stride(0), growth.parents.stride(0),
        k=shape.topk, steps=shape.num_steps, candidates=shape.num_candidates, grafted=grafted,
        count=shape.num_draft_tokens - 1,
        block_n=lanes(shape.num_candidates + grafted), block_t=lanes(shape.num_draft_tokens - 1),
        overlap=gpu.can_overlap, num_warps=4 if shape.num_draft_tokens <= 33 else 8, **launch_options(gpu),
    )  # fmt: skip


@jit
def _select_kernel(
    tokens: Arg, scores: Arg, parents: Arg, committed: Arg,
    graft_tokens: Arg, graft_scores: Arg, graft_parents: Arg, graft_depth: Arg,
    node_tokens: Arg, node_parent: Arg, depth: Arg, mask: Arg, logprob: Arg, nodes: Arg,
    out_chosen: Arg, chosen_row: Arg,
    tree_row: Arg, mask_row: Arg, mask_node: Arg, nodes_row: Arg, parent_row: Arg,
    k: constexpr, steps: constexpr, candidates: constexpr, grafted: constexpr, count: constexpr,
    block_n: constexpr, block_t: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One tree a program: the `count` best candidates, best first, then each one's place among them. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, block_n)
    real = candidate < candidates + grafted
    score = tl.load(scores + row * candidates + candidate, mask=candidate < candidates, other=0.0)
    if grafted > 0:
        behind = row * grafted + candidate - candidates
        of_graft = tl.load(graft_scores + behind, mask=real & (candidate >= candidates), other=0.0)
        score = tl.where(candidate >= candidates, of_graft, score)
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
    lines = graft_parents + row * grafted
    up = _parent_of(parents + row * parent_row, lines, flat, there, k, candidates, grafted)
    parent = tl.sum(((flat[None, :] <= up[:, None]) & other).to(tl.int32), 1)
    level = tl.where(flat < k, 1, (flat - k) // (k * k) + 2).to(tl.int64)
    seen = (flat[None, :] == flat[:, None]).to(tl.int32)
    line = up
    for _ in range(steps - 1):
        seen |= (flat[None, :] == line[:, None]).to(tl.int32)
        line = _parent_of(parents + row * parent_row, lines, line, there & (line >= 0), k, candidates, grafted)
    token = tl.load(tokens + row * candidates + flat, mask=there & (flat < candidates), other=0)
    worth = tl.load(scores + row * candidates + flat, mask=there & (flat < candidates), other=0.0)
    if grafted > 0:
        is_graft = there & (flat >= candidates)
        own = row * grafted + flat - candidates
        token = tl.where(is_graft, tl.load(graft_tokens + own, mask=is_graft, other=0), token)
        worth = tl.where(is_graft, tl.load(graft_scores + own, mask=is_graft, other=0.0), worth)
        level = tl.where(is_graft, tl.load(graft_depth + own, mask=is_graft, other=0), level)

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
def _parent_of(
    parents: Arg, lines: Arg, flat: Arg, there: Arg, k: constexpr, candidates: constexpr, grafted: constexpr
) -> Arg:
    """Flat index of each candidate's parent; -1 for the root's children and where not `there`. lines: of the graft."""
    own = there & (flat < candidates)
    group = tl.where(own, flat, 0) // k  # siblings; group g of 1 .. k hangs on candidate g - 1
    deep = own & (group > k)
    found = tl.load(parents + group, mask=deep, other=0).to(tl.int32)
    found = tl.where(deep, found, tl.where(own, group - 1, -1))
    if grafted > 0:
        is_graft = there & (flat >= candidates)
        found = tl.where(is_graft, tl.load(lines + flat - candidates, mask=is_graft, other=0).to(tl.int32), found)
    return found
