"""Simulated acceptance: what a head says of its proposals and what the target chooses, drawn in the place of both.

Nodes of a profile (`speculative.profile`) were drawn once; a round draws among them by a hash of (the request's seed,
where its row stands, which group of siblings): a captured round draws anew at each replay, and ranks that share a model
draw the same. A tree of S levels takes S + 1 launches, one of them before it begins.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sampling.sampling import SampledTokens
from treetop.kernels.tree.grow import TreeBuilder
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

DRAWS = 1 << 15
"""Nodes that are drawn of each depth, once; rounds draw among them."""
_STEPS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_MIX = 0x2545F4914F6CDD1D


@dataclass(frozen=True, slots=True)
class DrawnNodes:
    """What was drawn, `DRAWS` nodes of each depth.

    logits: [S, draws, ranks + 1] float32, of the proposals, the last of each of all other tokens.
    rank: [S, draws] int64, of the proposal that the target chooses; as many as there are where it is none of them.
    tail: other tokens. vocab_size: the target's.
    kinds: of requests, which draw among as many parts of the nodes; a request's seed says which is its own.
    """

    logits: Tensor
    rank: Tensor
    tail: int
    vocab_size: int
    kinds: int = 1


@dataclass(frozen=True, slots=True)
class RoundOfRows:
    """What a round's draws depend on.

    seed, committed, classes: [num_rows] int64, of all rows. rows: [rows] int64, the batch's. dummy_row: padding.
    inv_temp: [depths, classes] float32, what the head's logits are multiplied by.
    """

    seed: Tensor
    committed: Tensor
    classes: Tensor
    rows: Tensor
    dummy_row: int
    inv_temp: Tensor

    def draws(self, index: Tensor) -> Tensor:
        """31 bits for each row and index, [rows, n] int64. index: [n] int64."""
        mixed = (self.seed[self.rows] * _STEPS[0] + self.committed[self.rows] * _STEPS[1])[:, None]
        return _mixed(mixed + (index + 1) * _STEPS[2])

    def nodes(self, draws: Tensor, drawn: DrawnNodes) -> Tensor:
        """Which of the drawn nodes a row's draws mean. draws: [rows, n]; so is the result."""
        part = drawn.rank.shape[1] // drawn.kinds
        kind = _mixed(self.seed[self.rows] * _STEPS[0])[:, None] % drawn.kinds
        return kind * part + draws % part


def _mixed(x: Tensor) -> Tensor:
    """31 bits of a hash of int64."""
    for _ in range(2):
        x = (x ^ (x >> 29)) * _MIX
    return (x >> 33) & 0x7FFFFFFF


def logprob_of(logits: Tensor, tail: int, inv_temp: Tensor | float) -> Tensor:
    """Log-probabilities of the proposals: [..., ranks] float32. logits: [..., ranks + 1] of `DrawnNodes`."""
    hot = logits * inv_temp
    others = hot[..., -1:] + log(tail)
    return hot[..., :-1] - torch.logsumexp(torch.cat([hot[..., :-1], others], dim=-1), dim=-1, keepdim=True)


def say_roots_reference(drawn: DrawnNodes, at: RoundOfRows, k: int, logprob: Tensor) -> None:
    """Before trees begin: what the head says of the k best proposals stored with live rows, into [num_rows, k or more]
    float32.
    """
    says = _says(drawn, at, 0, torch.zeros(1, dtype=torch.int64, device=at.rows.device), k)[:, 0]
    live = (at.rows != at.dummy_row)[:, None]
    kept = logprob[at.rows]
    logprob[at.rows] = torch.where(live, torch.cat([says.to(kept.dtype), kept[:, k:]], dim=1), kept)


def say_level_reference(drawn: DrawnNodes, at: RoundOfRows, depth: int, k: int) -> Tensor:
    """What the head says of the k best proposals after each of a level's k nodes, [rows, k, k] float32."""
    groups = torch.arange(1 + (depth - 1) * k, 1 + depth * k, device=at.rows.device)
    return _says(drawn, at, depth, groups, k)


def _says(drawn: DrawnNodes, at: RoundOfRows, depth: int, groups: Tensor, k: int) -> Tensor:
    """[rows, n, k] float32. groups: [n] int64."""
    inv_temp = at.inv_temp[depth][at.classes[at.rows]][:, None, None]
    logits = drawn.logits[depth, at.nodes(at.draws(groups), drawn)]
    return logprob_of(logits, drawn.tail, inv_temp)[..., :k].contiguous()


def choose_drawn_reference(drawn: DrawnNodes, at: RoundOfRows, growth: TreeBuilder) -> SampledTokens:
    """What the target chooses after each node of the trees, [rows, T]: a proposal, or a token that is none.

    A node whose proposals were never asked for has no children, so any token will do.
    """
    k, steps, device = growth.shape.topk, growth.shape.num_steps, at.rows.device
    index = torch.arange(1 + (steps - 1) * k, device=device)
    draws = at.draws(index)  # [rows, groups]
    rank = drawn.rank[(index + k - 1) // k, at.nodes(draws, drawn)]
    children = growth.tokens.view(len(draws), -1, k)
    some = (draws[..., None] + torch.arange(k + 1, device=device)) % drawn.vocab_size  # one of them is no child
    taken = (some[..., None] == children[..., None, :]).any(dim=-1)  # [rows, groups, k + 1]
    other = some.gather(2, taken.to(torch.int32).argmin(dim=2, keepdim=True))
    chosen = children.gather(2, rank.clamp(max=k - 1)[..., None])
    wanted = torch.where(rank[..., None] < k, chosen, other)[..., 0]
    here = growth.chosen[:, :, None] == growth.above[:, None]  # [rows, T, groups]
    token = torch.where(here.any(dim=2), (here * wanted[:, None]).sum(dim=2), wanted[:, :1])
    return SampledTokens(token, torch.ones_like(token, dtype=torch.bool))


def say_roots(drawn: DrawnNodes, at: RoundOfRows, k: int, logprob: Tensor, gpu: GpuTraits) -> None:
    """`say_roots_reference` in one launch."""
    assert logprob.stride(1) == 1
    _launch_says(drawn, at, 0, k, logprob, gpu)


def say_level(drawn: DrawnNodes, at: RoundOfRows, depth: int, k: int, gpu: GpuTraits) -> Tensor:
    """`say_level_reference` in one launch."""
    says = torch.empty((len(at.rows), k, k), dtype=torch.float32, device=at.rows.device)
    _launch_says(drawn, at, depth, k, says, gpu)
    return says


def _launch_says(drawn: DrawnNodes, at: RoundOfRows, depth: int, k: int, out: Tensor, gpu: GpuTraits) -> None:
    """Into [num_rows, k or more] at depth 0, else into [rows, k, k]."""
    _, draws, width = drawn.logits.shape
    _says_kernel[(len(at.rows),)](
        out, drawn.logits[depth], at.seed, at.committed, at.classes, at.inv_temp[depth], at.rows, at.dummy_row,
        out.stride(0), 1 + (depth - 1) * k if depth else 0, log(drawn.tail),
        roots=depth == 0, k=k, draws=draws, kinds=drawn.kinds, ranks=width - 1, block_k=lanes(k if depth else 1),
        block_r=lanes(width), overlap=gpu.can_overlap, num_warps=1, **launch_options(gpu),
    )  # fmt: skip


def choose_drawn(drawn: DrawnNodes, at: RoundOfRows, growth: TreeBuilder, gpu: GpuTraits) -> SampledTokens:
    """`choose_drawn_reference` in one launch."""
    shape, device = growth.shape, at.rows.device
    k, groups = shape.topk, 1 + (shape.num_steps - 1) * shape.topk
    token = torch.empty((len(at.rows), shape.num_draft_tokens), dtype=torch.int64, device=device)
    finite = torch.empty(token.shape, dtype=torch.bool, device=device)
    assert growth.tokens.is_contiguous()
    _choose_drawn_kernel[(len(at.rows),)](
        token, finite.view(torch.uint8), drawn.rank, at.seed, at.committed, at.rows,
        growth.parents, growth.chosen, growth.tokens, growth.parents.stride(0), growth.chosen.stride(0),
        drawn.vocab_size, k=k, groups=groups, nodes=shape.num_draft_tokens, candidates=shape.num_candidates,
        draws=drawn.rank.shape[1], kinds=drawn.kinds, block_g=lanes(groups), block_t=lanes(shape.num_draft_tokens),
        overlap=gpu.can_overlap, num_warps=2, **launch_options(gpu),
    )  # fmt: skip
    return SampledTokens(token, finite)


@jit
def _draws(seeds: Arg, committed: Arg, row: Arg, index: Arg) -> Arg:
    """`RoundOfRows.draws` of one row. index: [n] int64."""
    row = index * 0 + row
    mixed = tl.load(seeds + row) * 0x1E3779B97F4A7C15 + tl.load(committed + row) * 0x3F58476D1CE4E5B9
    return _hash(mixed + (index + 1) * 0x14D049BB133111EB)


@jit
def _hash(x: Arg) -> Arg:
    """`_mixed`."""
    for _ in tl.static_range(2):
        x = (x ^ (x >> 29)) * 0x2545F4914F6CDD1D
    return (x >> 33) & 0x7FFFFFFF


@jit
def _nodes(seeds: Arg, row: Arg, draw: Arg, draws: constexpr, kinds: constexpr) -> Arg:
    """`RoundOfRows.nodes` of one row. draw: [n] int64."""
    kind = _hash(tl.load(seeds + (draw * 0 + row)) * 0x1E3779B97F4A7C15) % kinds
    return kind * (draws // kinds) + draw % (draws // kinds)


@jit
def _says_kernel(
    out: Arg, logits: Arg, seeds: Arg, committed: Arg, classes: Arg, inv_temps: Arg, rows: Arg, dummy_row: Arg,
    out_row: Arg, first: Arg, log_tail: Arg,
    roots: constexpr, k: constexpr, draws: constexpr, kinds: constexpr, ranks: constexpr, block_k: constexpr,
    block_r: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """All groups of one row a program: one of the roots, k of a level. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + item)
    slot, rank = tl.arange(0, block_k), tl.arange(0, block_r)
    line = _nodes(seeds, row, _draws(seeds, committed, row, (first + slot).to(tl.int64)), draws, kinds)
    inside = (rank <= ranks)[None, :]
    x = tl.load(logits + line[:, None] * (ranks + 1) + rank[None, :], mask=inside, other=0.0)
    x = x * tl.load(inv_temps + tl.load(classes + row)) + tl.where(rank[None, :] == ranks, log_tail, 0.0)
    x = tl.where(inside, x, float("-inf"))
    top = tl.max(x, 1)[:, None]
    says = x - (top + tl.log(tl.sum(tl.exp(x - top), 1))[:, None])
    if roots:
        there = ((slot == 0) & (slot + row != dummy_row))[:, None] & (rank < k)[None, :]
        tl.store(out + row * out_row + slot[:, None] * k + rank[None, :], says, mask=there)
    else:
        there = (slot < k)[:, None] & (rank < k)[None, :]
        tl.store(out + item * out_row + slot[:, None] * k + rank[None, :], says, mask=there)


@jit
def _choose_drawn_kernel(
    token: Arg, finite: Arg, ranks: Arg, seeds: Arg, committed: Arg, rows: Arg,
    parents: Arg, chosen: Arg, tokens: Arg, parent_row: Arg, chosen_row: Arg, vocab: Arg,
    k: constexpr, groups: constexpr, nodes: constexpr, candidates: constexpr, draws: constexpr, kinds: constexpr,
    block_g: constexpr, block_t: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program. token: [rows * T] int64; finite: the same, bytes. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + item)
    node, group = tl.arange(0, block_t), tl.arange(0, block_g)
    real, known = node < nodes, group < groups
    flat = tl.load(chosen + item * chosen_row + node, mask=real, other=-2)
    deep = group > k  # the others hang on the root and its children (`kernels.tree.tree`)
    up = tl.where(deep, tl.load(parents + item * parent_row + group, mask=deep & known, other=-3), group - 1)
    here = (flat[:, None] == up[None, :]) & known[None, :]
    own = tl.max(tl.where(here, group[None, :], 0), 1).to(tl.int64)
    draw = _draws(seeds, committed, row, own)
    rank = tl.load(ranks + (own + k - 1) // k * draws + _nodes(seeds, row, draw, draws, kinds))
    child = tokens + item * candidates + own * k
    wanted = tl.load(child + tl.minimum(rank, k - 1))
    other = draw
    for step in range(k + 1):
        some = (draw + k - step) % vocab
        taken = tl.zeros([block_t], tl.int32)
        for sibling in range(k):
            taken |= (tl.load(child + sibling) == some).to(tl.int32)
        other = tl.where(taken == 0, some, other)
    where = item * nodes + node
    tl.store(token + where, tl.where(rank < k, wanted, other), mask=real)
    tl.store(finite + where, tl.full([block_t], 1, tl.uint8), mask=real)
