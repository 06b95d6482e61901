"""Choosing tokens: greedily, or by counter-based uniforms, the one logits processor and a draw.

A token is drawn by inverse CDF in vocabulary order from a uniform that depends on (request seed, position of the token)
alone. So a request's tokens do not depend on its batch, its row, the tree, or a retraction.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.sampling.process import LogitsProcessors, concerned
from treetop.types.parallel import Parallel

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
TEMPERATURES = (1e-30, 1e30)
"""Least and most: a positive one is clamped to them, for logits / temperature must not overflow. 0 is greedy."""


@dataclass(frozen=True, slots=True)
class RowSamplingParams:
    """Per-row sampling parameters, under the names of their options.

    temperature, top_p, min_p: [n] float32.
    top_k: [n] int64, 0 is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What rows choose by.

    params: of every row.
    seed: [num_rows] int64.
    processors: None if no logits are changed.
    """

    params: RowSamplingParams
    seed: Tensor
    processors: LogitsProcessors | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The target's token after each node.

    token: [rows, T] int64.
    finite: [rows, T] bool, whether its logits are.
    logprob: [rows, T] float32, what it was drawn with: under the warped distribution, 0 for a row of temperature 0.
        None where nothing was drawn.
    """

    token: Tensor
    finite: Tensor
    logprob: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PartialArgmax:
    """The first of the largest logits of each piece of the vocabulary, as keys [rows, T, pieces] int64."""

    key: Tensor


def greedy_reference(logits: Tensor) -> SampledTokens:
    """The largest logit's token after each node, the first of several. logits: [rows, T, vocab]."""
    best, token = logits.max(dim=-1)  # NaN wins a maximum, so `best` tells of it
    return SampledTokens(token, torch.isfinite(best))


def greedy_of_ranks(
    greedy: Callable[[Tensor], SampledTokens | PartialArgmax], parallel: Parallel, logits: Tensor
) -> SampledTokens | PartialArgmax:
    """`greedy` over a vocabulary that ranks share: the same on all of them, who say no more than their best.

    logits: [rows, T, width] of this rank's part.
    """
    chosen, first = greedy(logits), parallel.rank * logits.shape[-1]
    if isinstance(chosen, PartialArgmax):
        return PartialArgmax(parallel.join(chosen.key - first))  # a key has its index counted down
    token = chosen.token[..., None]
    best, tokens = parallel.join(logits.gather(-1, token)), parallel.join(token + first)
    value, winner = best.max(dim=-1, keepdim=True)
    return SampledTokens(tokens.gather(-1, winner)[..., 0], torch.isfinite(value[..., 0]))


def draw_reference(
    logits: Tensor, sampler: SamplingMetadata, rows: Tensor, positions: Tensor, filtered: bool
) -> SampledTokens:
    """A token after each node, drawn from the warped logits [rows, T, vocab] by its row's sampler.

    sampler: of all rows; `rows` [rows] picks. positions: [rows, T] int64, where the nodes stand; a token stands one
    further. filtered: see `warp`. Rows of temperature 0 take the first of the largest logits.
    """
    chosen, params = greedy_reference(logits), sampler.params
    logprob = torch.zeros(chosen.token.shape, dtype=torch.float32, device=logits.device)
    chosen = SampledTokens(chosen.token, chosen.finite, logprob)
    some = concerned(params.temperature[rows] > 0)
    if not len(some):
        return chosen
    count, width, vocab = len(some), *logits.shape[1:]
    drawn_rows, finite = rows[some], chosen.finite[some]
    each_row = drawn_rows.repeat_interleave(width)
    each = RowSamplingParams(*(v[each_row] for v in (params.temperature, params.top_k, params.top_p, params.min_p)))
    safe = torch.where(finite[:, :, None], logits[some], 0)
    uniforms = philox_uniform(sampler.seed[drawn_rows][:, None].expand(count, width), positions[some] + 1)
    weights = warp(safe.reshape(count * width, vocab), each, filtered)
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    token = _drawn(cdf, uniforms.reshape(-1))
    # not the weights' `sum`: of one row alone threads divide it, so that its order is another
    own, total = weights.gather(1, token[:, None])[:, 0], cdf[:, -1]
    chosen.token[some] = token.reshape(count, width)
    logprob[some] = (own / total).log().to(torch.float32).reshape(count, width)
    return chosen


def _mul_hi_lo(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 64-bit product of 32-bit numbers, in int64 arithmetic that cannot overflow."""
    x_hi, x_lo = x >> 16, x & 0xFFFF
    low = factor * x_lo  # < 2^48
    high = factor * x_hi + (low >> 16)  # < 2^49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_uniform(seed: Tensor, position: Tensor, draw: int = 0) -> Tensor:
    """A uniform draw in [0, 1) from Philox-4x32-10.

    seed: int64 >= 0, the key. position: int64 of the same shape, with `draw` the counter. Returns float64, a multiple
    of 2^-32, so that it is exact in every wider computation.
    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    key = [seed & _LOW, seed >> 32]
    zero = torch.zeros_like(position)
    c = [position & _LOW, position >> 32, zero + draw, zero]
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c[0])
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c[2])
        c = [hi1 ^ c[1] ^ key[0], lo1, hi0 ^ c[3] ^ key[1], lo0]
        key = [(key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW]
    return c[0].to(torch.float64) * 2.0**-32


def warp(logits: Tensor, params: RowSamplingParams, filtered: bool = True) -> Tensor:
    """Weights of tokens after temperature, top-k, top-p and min-p, in this order, each on the rest of the one before.

    logits: [n, vocab]. filtered: whether any row has a top-k or top-p; without one nothing is sorted, and the result is
    the same to the bit. Returns [n, vocab] like logits or float32: probabilities over that of the best token, exact
    zeros where filtered. Temperature 0 keeps the first of the largest logits; ties at a filter's edge keep the smaller
    token ids.
    """
    wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    greedy = params.temperature == 0
    temperature = torch.where(greedy, 1.0, params.temperature).clamp(*TEMPERATURES).to(wide.dtype)
    best, first = wide.max(dim=-1, keepdim=True)
    weights = torch.exp((wide - best) / temperature[:, None])
    if filtered and _some_filter(params):
        weights = weights * _inside_filters(wide, weights, params)
    weights = weights * (weights >= params.min_p[:, None].to(weights.dtype))
    return torch.where(greedy[:, None], torch.zeros_like(weights).scatter_(1, first, 1.0), weights)


def _some_filter(params: RowSamplingParams) -> bool:
    """Whether any row has a top-k or a top-p, where looking is free: nothing waits for a CPU."""
    return params.top_k.device.type != "cpu" or bool(((params.top_k > 0) | (params.top_p < 1)).any())


def _inside_filters(logits: Tensor, weights: Tensor, params: RowSamplingParams) -> Tensor:
    """Tokens that top-k and top-p keep. logits, weights: [n, vocab]. Returns [n, vocab] bool."""
    vocab = logits.shape[-1]
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    top_k = torch.where(params.top_k > 0, params.top_k, vocab)[:, None]
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < top_k
    ranked = (weights.gather(1, order) * keep).to(torch.float64)
    mass = ranked.cumsum(dim=-1)
    top_p = params.top_p[:, None].to(torch.float64)
    keep = keep & ((mass - ranked < top_p * mass[:, -1:]) | (top_p >= 1) | (rank == 0))  # the best always stays
    return torch.zeros_like(keep).scatter_(1, order, keep)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniform * total`; one of weight 0 is never drawn.

    weights: [n, vocab]. uniform: [n] float64 in [0, 1). Returns [n] int64.
    """
    return _drawn(weights.cumsum(dim=-1, dtype=torch.float64), uniform)


def _drawn(cdf: Tensor, uniform: Tensor) -> Tensor:
    return torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
