"""Learning a calibration, once a round, on the device (`kernels.tree.calibration` says what it is for).

What is learned from: every verified node whose children the head proposed, on the accepted path or not, and all k of
them, selected or not. Predicted and observed shares are kept as sums in which later rounds weigh more, and of which no
more than `HORIZON` nodes' worth is remembered. The inverse temperature follows the best proposals of a depth: it rises
while they are chosen more often than predicted (stochastic approximation; H. Robbins and S. Monro, Ann. Math. Statist.
22, 1951). A bias is the log of observed over predicted, both with a prior.

Sums of a round are integers, so that they are the same in any order; all ranks that share a model learn the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.grow import TreeBuilder
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import Accepted

HORIZON = 8192.0
"""Nodes that a class remembers at each depth."""
PRIOR_NODES = 64.0
"""Nodes of a depth that the inverse temperature a head begins with counts for."""
PRIOR_CHOICES = 4.0
"""Choices, predicted and observed alike, that a shift of 0 counts for."""
NEWEST = 2.0
"""How much more a new node weighs than the mean of those before."""
GAIN = 4.0
"""About one over how fast the best proposal's probability changes with the log of the inverse temperature."""
LARGEST_STEP = 0.25
"""Of the log of the inverse temperature, in one round."""
LOG_INV_TEMP = 2.7725887
"""Bound of the log of the inverse temperature, log 16."""
SHIFT = 2.0794415
"""Bound of a shift, log 8."""
ONE = 1 << 24
"""A probability of 1 in a round's sums."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Of which rows a round teaches something.

    rows: [rows] int64, the batch's.
    dummy_row: padding, which teaches nothing.
    constrained: [num_rows] bool, rows whose choices are not the target's alone; None if there are none.
    makes_logits: there are logits to multiply.
    """

    rows: Tensor
    dummy_row: int
    constrained: Tensor | None
    makes_logits: bool


def learn_reference(calibration: Calibration, growth: TreeBuilder, accepted: Accepted, observed: Observed) -> None:
    """Learn from what a round's trees proposed and the target chose."""
    _add_up(calibration, growth, accepted, observed)
    _fold(calibration, growth.shape.topk, observed.makes_logits)


def _add_up(calibration: Calibration, growth: TreeBuilder, accepted: Accepted, observed: Observed) -> None:
    """A round's sums. Group 0 of the candidates hangs on the root, group g on `parents[g]` (`kernels.tree.tree`)."""
    k, steps, n = growth.shape.topk, growth.shape.num_steps, len(observed.rows)
    groups = 1 + (steps - 1) * k
    at = growth.chosen[:, :, None] == growth.parents[:, None, :groups]  # [rows, T, groups]
    live = (observed.rows != observed.dummy_row) & accepted.finite
    if observed.constrained is not None:
        live &= ~observed.constrained[observed.rows]
    verified = at.any(dim=1) & live[:, None]
    choice = (accepted.choice[:, :, None] * at).sum(dim=1)
    hits = (growth.tokens.view(n, groups, k) == choice[:, :, None]).to(torch.int64)
    predicted = (growth.logprob.view(n, groups, k).exp().nan_to_num() * ONE + 0.5).to(torch.int64)
    each = torch.cat([torch.ones_like(hits[:, :, :1]), hits, predicted], dim=2) * verified[:, :, None]
    root, deeper = each[:, :1], each[:, 1:].reshape(n, steps - 1, k, 1 + 2 * k).sum(dim=2)
    by_depth = torch.cat([root, deeper], dim=1)  # [rows, S, 1 + 2k]
    ranks = calibration.logprob_bias.shape[2]
    sums = calibration.sums[:, :steps]
    sums[:, :, : 1 + k].index_add_(0, growth.classes, by_depth[:, :, : 1 + k])
    sums[:, :, 1 + ranks : 1 + ranks + k].index_add_(0, growth.classes, by_depth[:, :, 1 + k :])


def _fold(calibration: Calibration, k: int, makes_logits: bool) -> None:
    """The sums enter what is remembered, and inverse temperature and biases follow. k: proposals of each of the round's
    nodes."""
    c, ranks = calibration, calibration.logprob_bias.shape[2]
    sums = c.sums.to(torch.float32)
    nodes, chosen = sums[:, :, 0], sums[:, :, 1 : 1 + ranks]
    predicted = sums[:, :, 1 + ranks :] * (1.0 / ONE)
    if makes_logits:
        missed, known = chosen[:, :, 0] - predicted[:, :, 0], PRIOR_NODES + c.nodes + nodes
        step = (GAIN * missed / known).clamp(-LARGEST_STEP, LARGEST_STEP).T
        c.inv_temp.copy_((c.inv_temp.log() + step).clamp(-LOG_INV_TEMP, LOG_INV_TEMP).exp())
    keep = (1.0 - NEWEST * nodes / (PRIOR_NODES + c.nodes + nodes)).clamp(min=0.0)[:, :, None]
    c.seen.mul_(keep)[:, :, :k].add_(nodes[:, :, None])
    c.chosen.mul_(keep).add_(chosen)
    c.predicted.mul_(keep).add_(predicted)
    c.nodes.add_(nodes).clamp_(max=HORIZON)
    c.logprob_bias.copy_(logprob_bias_of(c))
    c.sums.zero_()


def logprob_bias_of(calibration: Calibration) -> Tensor:
    """The shifts that what is remembered says: [classes, depths, ranks] float32."""
    ratio = (calibration.chosen + PRIOR_CHOICES) / (calibration.predicted + PRIOR_CHOICES)
    return ratio.log().clamp(-SHIFT, SHIFT)


def learn(
    calibration: Calibration, growth: TreeBuilder, accepted: Accepted, observed: Observed, gpu: GpuTraits
) -> None:
    """`learn_reference` in two launches."""
    c, shape, constrained = calibration, growth.shape, observed.constrained
    depths, ranks = c.logprob_bias.shape[1:]
    assert growth.tokens.is_contiguous()
    assert growth.logprob.is_contiguous()
    _add_up_kernel[(len(observed.rows),)](
        c.sums, observed.rows, growth.classes, accepted.finite.view(torch.uint8),
        observed.rows if constrained is None else constrained.view(torch.uint8),
        growth.parents, growth.chosen, growth.tokens, growth.logprob, accepted.choice, observed.dummy_row,
        growth.parents.stride(0), growth.chosen.stride(0), accepted.choice.stride(0), depths, ranks,
        k=shape.topk, steps=shape.num_steps, nodes=shape.num_draft_tokens, candidates=shape.num_candidates,
        block_k=lanes(shape.topk), block_t=lanes(shape.num_draft_tokens), one=ONE,
        has_constrained=constrained is not None, overlap=gpu.can_overlap, num_warps=1, **launch_options(gpu),
    )  # fmt: skip
    _fold_kernel[(len(c.nodes),)](
        c.inv_temp, c.logprob_bias, c.nodes, c.seen, c.chosen, c.predicted, c.sums, depths, ranks, shape.topk,
        block_d=lanes(depths), block_r=lanes(ranks), makes_logits=observed.makes_logits, one=ONE, horizon=HORIZON,
        prior_nodes=PRIOR_NODES, prior_choices=PRIOR_CHOICES, newest=NEWEST, gain=GAIN, largest_step=LARGEST_STEP,
        log_inv_temp=LOG_INV_TEMP, bound=SHIFT, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip


@jit
def _add_up_kernel(
    sums: Arg, rows: Arg, classes: Arg, finite: Arg, constrained: Arg,
    parents: Arg, chosen: Arg, tokens: Arg, logprob: Arg, choice: Arg, dummy_row: Arg,
    parent_row: Arg, chosen_row: Arg, choice_row: Arg, depths: Arg, ranks: Arg,
    k: constexpr, steps: constexpr, nodes: constexpr, candidates: constexpr, block_k: constexpr, block_t: constexpr,
    one: constexpr, has_constrained: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program; integers, so that their order is no matter. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + item)
    live = (row != dummy_row) & (tl.load(finite + item) != 0)
    if has_constrained:
        live = live & (tl.load(constrained + row) == 0)
    if live:
        rank, node = tl.arange(0, block_k), tl.arange(0, block_t)
        there, real = rank < k, node < nodes
        flat = tl.load(chosen + item * chosen_row + node, mask=real, other=-2)
        words = tl.load(choice + item * choice_row + node, mask=real, other=0)
        kind = tl.load(classes + item)
        for level in range(steps):
            hits, shares = tl.zeros([block_k], tl.int64), tl.zeros([block_k], tl.int64)
            seen = tl.full([], 0, tl.int64)
            for slot in range(k):
                group = tl.where(level == 0, 0, 1 + (level - 1) * k + slot)
                deep = group > k  # the others hang on the root and its children (`kernels.tree.tree`)
                up = tl.where(deep, tl.load(parents + item * parent_row + group, mask=deep, other=0), group - 1)
                at = (flat == up) & real & ((level > 0) | (slot == 0))
                verified = tl.sum(at.to(tl.int64), 0)
                word = tl.sum(tl.where(at, words, 0), 0)
                child = item * candidates + group * k + rank
                token = tl.load(tokens + child, mask=there, other=-1)
                own = tl.load(logprob + child, mask=there, other=float("-inf"))
                own = tl.where(own == own, own, float("-inf"))  # noqa: PLR0124 - NaN is not itself
                seen += verified
                hits += (token == word).to(tl.int64) * verified
                shares += (tl.exp(own) * one + 0.5).to(tl.int64) * verified
            of_depth = sums + (kind * depths + level) * (1 + 2 * ranks)
            tl.atomic_add(of_depth, seen)
            tl.atomic_add(of_depth + 1 + rank, hits, mask=there)
            tl.atomic_add(of_depth + 1 + ranks + rank, shares, mask=there)


@jit
def _fold_kernel(
    inv_temp: Arg, logprob_bias: Arg, nodes: Arg, seen: Arg, chosen: Arg, predicted: Arg, sums: Arg, depths: Arg,
    ranks: Arg,
    k: Arg,
    block_d: constexpr, block_r: constexpr, makes_logits: constexpr, one: constexpr, horizon: constexpr,
    prior_nodes: constexpr, prior_choices: constexpr, newest: constexpr, gain: constexpr, largest_step: constexpr,
    log_inv_temp: constexpr, bound: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One class a program. k: proposals of each of the round's nodes. Grid (classes,)."""
    pdl_wait(overlap, early=True)
    kind = tl.program_id(0)
    depth, rank = tl.arange(0, block_d), tl.arange(0, block_r)
    inside = depth < depths
    there = inside[:, None] & (rank < ranks)[None, :]
    line = (kind * depths + depth) * (1 + 2 * ranks)
    cell = (kind * depths + depth)[:, None] * ranks + rank[None, :]
    new_nodes = tl.load(sums + line, mask=inside, other=0).to(tl.float32)
    at = sums + line[:, None] + 1 + rank[None, :]
    new_chosen = tl.load(at, mask=there, other=0).to(tl.float32)
    new_predicted = tl.load(at + ranks, mask=there, other=0).to(tl.float32) * (1.0 / one)
    old_nodes = tl.load(nodes + kind * depths + depth, mask=inside, other=0.0)
    if makes_logits:
        missed = tl.sum(tl.where(rank[None, :] == 0, new_chosen - new_predicted, 0.0), 1)
        step = gain * missed / (prior_nodes + old_nodes + new_nodes)
        own = inv_temp + depth * tl.num_programs(0) + kind
        hot = tl.log(tl.load(own, mask=inside, other=1.0)) + tl.minimum(tl.maximum(step, -largest_step), largest_step)
        tl.store(own, tl.exp(tl.minimum(tl.maximum(hot, -log_inv_temp), log_inv_temp)), mask=inside)
    keep = tl.maximum(1.0 - newest * new_nodes / (prior_nodes + old_nodes + new_nodes), 0.0)[:, None]
    new_seen = tl.where((rank < k)[None, :], new_nodes[:, None], 0.0)
    all_seen = tl.load(seen + cell, mask=there, other=0.0) * keep + new_seen
    all_chosen = tl.load(chosen + cell, mask=there, other=0.0) * keep + new_chosen
    all_predicted = tl.load(predicted + cell, mask=there, other=0.0) * keep + new_predicted
    log = tl.log((all_chosen + prior_choices) / (all_predicted + prior_choices))
    tl.store(logprob_bias + cell, tl.minimum(tl.maximum(log, -bound), bound), mask=there)
    tl.store(seen + cell, all_seen, mask=there)
    tl.store(chosen + cell, all_chosen, mask=there)
    tl.store(predicted + cell, all_predicted, mask=there)
    tl.store(nodes + kind * depths + depth, tl.minimum(old_nodes + new_nodes, horizon), mask=inside)
    tl.store(sums + line, 0, mask=inside)
    tl.store(at, 0, mask=there)
    tl.store(at + ranks, 0, mask=there)
