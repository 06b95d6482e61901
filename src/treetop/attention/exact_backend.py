"""Attention on a CPU in float32 whose result depends on a query's position and its keys alone, to the bit.

    score of a key    q . k * scale, one sum over the head
    weight            exp(max(score - the largest score that the query sees, -80)) - exp(-80)
    block b           sum of weight * (v, 1) over the keys at positions 128 b .. 128 b + 127, one after another
    result            ((block 0 + block 1) + block 2) ..., its values over its last number

A library's product of few numbers is a chain: each output is one accumulator, which takes its terms in their order. A
key that is not seen, whose score is -inf, has weight 0, and leaves an accumulator as it is, to the bit. So it does not
matter what lies between the keys of a block: the tail's columns follow the committed keys of the block that the row's
end lies in, and along any path they rise in position. A row's keys are laid out as

    | block 0 | block 1 | ... | the open block, from its start to the row's end | tail |

where rows with fewer whole blocks have what is not theirs masked. A path that crosses into the next block has the rest
of its tail summed apart, and added last. A prefill has all its keys in pages, and only blocks.

That the library's products are such chains, whatever their shape, is no promise: `problem` probes it. Where they are
not, scores and sums are of integers (`attention.integer_sums`), and the rest is the same.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.contract import TailKV
from treetop.attention.integer_sums import IntegerSums, index_scores_of_integers
from treetop.attention.torch_backend import (
    CAPABILITIES,
    TorchBackend,
    TorchPlan,
    TorchPrefix,
    broken_rows,
    first_hidden,
)
from treetop.exact.probe import adversarial
from treetop.kernels.attention.attention import tail_visible
from treetop.kernels.attention.indexer import IndexQuery, best_keys
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, decoded, moved, slots_of
from treetop.types.ids import is_draft

BLOCK = 128
"""Positions of a block: the longest chain of all, and with a tail no longer than the library keeps one."""
MOST_NODES = 64
"""Of a tree."""
_ONES, _LEAST_WIDTH = 8, 32
"""Columns of ones beside the values, whose sum is that of the weights, at least; and of both together. With fewer it
would be another product."""
_LEAST_QUERIES, _LEAST_KEYS, _LEAST_BATCH = 16, 16, 2
"""Of a product: with fewer the library computes dot products, or cuts a product among threads."""
_FAR = -80.0
"""Below the largest score, from where on a weight is 0: `exp` is probed as far, and takes a vector library 15 times as
long for -inf, and 80 times for what has no normal number."""
_UNREAD = torch.zeros(1)
"""What a product is not added to."""
_SCORES = 2**24
"""Of a slice of a prefill's queries, which bounds its memory."""


@dataclass(frozen=True, slots=True)
class ExactPrefix:
    """Where the keys of the committed prefix lie, in the order of the module.

    slots: [rows, whole + open] int64, the null slot where there is no key.
    position: [rows or 1, whole + open] int64. there: [rows, whole + open] bool, whether it holds a key.
    whole: keys in whole blocks, a multiple of `BLOCK`; of a prefill all.
    first: [rows] int64, where the open block begins.
    """

    slots: Tensor
    position: Tensor
    there: Tensor
    whole: int
    first: Tensor


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """bias: [rows, n, keys], 0 where a key is seen, -inf elsewhere; of the prefix, then of the tail.
    later: [rows, 1, t] bool, tail columns in the block after the open one; None if there is none in any row.
    lines: by planes and K/V heads, [planes, rows, kv_heads, keys] int64: which line of a layer's pages each key is, the
        null slot's for the tail. Layers of a kind share it; the first of a plan makes it.
    values: by K/V heads and width, [rows, kv_heads, keys, width + ones]: where each layer of a kind in turn puts its
        values, with ones behind that are written once.
    """

    prefix: ExactPrefix
    bias: Tensor
    later: Tensor | None
    lines: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Sums(Protocol):
    """The two sums of attention. batch: rows times K/V heads."""

    def held(self, k: Tensor, v: Tensor, wide: int) -> Any:
        """What the other two take of keys [batch, keys, d] and values [batch, keys, wide + ones] with ones behind."""

    def scores(self, q: Tensor, held: Any, scale: float) -> Tensor:
        """q: [batch, queries, d]. Returns [batch, queries, keys], padded to at least that."""

    def weighed(self, weights: Tensor, padded: Tensor, held: Any, plan: ExactPlan) -> tuple[Tensor, Tensor]:
        """The sum of weights times values, [batch, n * group, wide], and that of the weights, [batch, n * group, 1].

        weights: [rows, kv_heads, n, group, keys], a view of `padded`, what `scores` gave; both may be written to.
        """


class ChainSums:
    """`Sums` by the library's products."""

    def held(self, k: Tensor, v: Tensor, wide: int) -> tuple[Tensor, Tensor, int]:
        return k, v, wide

    def scores(self, q: Tensor, held: tuple[Tensor, Tensor, int], scale: float) -> Tensor:
        return scored(q, held[0], scale)

    def weighed(
        self, weights: Tensor, padded: Tensor, held: tuple[Tensor, Tensor, int], plan: ExactPlan
    ) -> tuple[Tensor, Tensor]:
        later, (_, v, wide), (rows, kv_heads, n, group, _) = None, held, weights.shape
        if plan.later is not None:
            last = weights[..., -plan.later.shape[2] :]
            later = (last * plan.later[:, None, None]).flatten(0, 1).flatten(1, 2)
            last.masked_fill_(plan.later[:, None, None], 0.0)
        total = folded(padded, v, plan.prefix.whole, later)[: rows * kv_heads, : n * group]
        return total[..., :wide], total[..., wide : wide + 1]


class ExactBackend:
    """The target's attention as above. Drafts, which change no token, have PyTorch's.

    integers: sums are of integers, and not the library's.
    """

    name = "torch"
    capabilities = replace(CAPABILITIES, exact=True)

    def __init__(self, dtype: torch.dtype, device: torch.device, integers: bool = False) -> None:
        self._plain = TorchBackend(dtype, device)
        self._sums: Sums = IntegerSums() if integers else ChainSums()

    def begin(self, metadata: AttentionMetadata) -> ExactPrefix | TorchPrefix:
        if is_draft(metadata.table.group):
            return self._plain.begin(metadata)
        kv_len = metadata.kv_len[:, None]
        if metadata.causal:
            whole, extra, first = max(metadata.max_kv_len, _LEAST_KEYS), 0, torch.zeros_like(metadata.kv_len)
        else:
            first, most = metadata.kv_len // BLOCK * BLOCK, int(metadata.kv_len.max())
            whole = most // BLOCK * BLOCK
            extra = max(int((metadata.kv_len - first).max()) if whole else most, _LEAST_KEYS)
        position = torch.arange(whole + extra, device=kv_len.device)[None]
        end = kv_len
        if whole and not metadata.causal:
            closed = position < whole
            end = torch.where(closed, first[:, None], kv_len)
            position = torch.where(closed, position, first[:, None] + position - whole)
        there = position < end
        slots = slots_of(metadata.table.data, metadata.rows, position, there, metadata.page_size)
        return ExactPrefix(slots, position, there, whole, first)

    def plan(self, begun: ExactPrefix | TorchPrefix, metadata: AttentionMetadata) -> ExactPlan | TorchPlan:
        if isinstance(begun, TorchPrefix):
            return self._plain.plan(begun, metadata)
        visible, oldest = begun.there[:, None], metadata.oldest
        if oldest is not None:
            visible = visible & (begun.position[:, None] >= oldest[:, :, None])
        if metadata.causal:
            # What has no key, the dummy row, sees the null slot, so that its weights are numbers.
            causal = begun.position[:, None] <= metadata.positions[:, :, None]
            empty = ~begun.there[:, None, :1] & (begun.position[:, None] == 0)
            return ExactPlan(begun, _bias(visible & causal | empty), None)
        assert metadata.tail_positions is not None
        tail = tail_visible(metadata)
        visible = torch.cat([visible.expand(-1, tail.shape[1], -1), tail], dim=2)
        later = metadata.tail_positions[:, None] >= (begun.first + BLOCK)[:, None, None]
        return ExactPlan(begun, _bias(visible), later if bool((later & tail).any()) else None)

    def choose(self, query: IndexQuery, kv: PagedKV, plan: ExactPlan | TorchPlan, tail: TailKV | None) -> Tensor:
        """[rows, n, keys] bool, of keys in the order of the plan, which along any path is that of positions."""
        if isinstance(plan, TorchPlan):
            return self._plain.choose(query, kv, plan, tail)
        visible, slots = plan.bias == 0, plan.prefix.slots
        if visible.shape[2] <= query.top_k:
            return visible
        keys = moved(kv.index_keys).index_select(0, slots.reshape(-1)).unflatten(0, slots.shape)
        if tail is not None:
            keys = torch.cat([keys, moved(tail.index_keys)], dim=1)
        return best_keys(index_scores_of_integers(query, keys.view(kv.data.dtype)), visible, query.top_k)

    def hidden(self, plan: ExactPlan | TorchPlan, chosen: Tensor) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._plain.hidden(plan, chosen)
        return first_hidden(plan.bias == 0, chosen)

    def narrowed(self, plan: ExactPlan | TorchPlan, chosen: Tensor) -> ExactPlan | TorchPlan:
        if isinstance(plan, TorchPlan):
            return self._plain.narrowed(plan, chosen)
        return replace(plan, bias=_bias(chosen))

    def prefix_tail(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: ExactPlan | TorchPlan,
        tail: TailKV,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._plain.prefix_tail(q, kv, plan, tail, scale, sinks)
        seen = _gather(kv, plan, q.dtype)
        nodes = decoded(tail.planes, tail.scales, q.dtype).permute(2, 0, 3, 1, 4)
        start = plan.prefix.slots.shape[1]
        seen.k[:, :, start:] = nodes[0]
        seen.v[:, :, start:, : seen.wide] = nodes[-1, ..., : seen.wide]
        return _of_tree(self._sums, q, seen, plan, scale, sinks)

    def causal(
        self, q: Tensor, kv: PagedKV, plan: ExactPlan | TorchPlan, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._plain.causal(q, kv, plan, scale, sinks)
        return _at_once(self._sums, q, _gather(kv, plan, q.dtype), plan, scale, sinks)


def _bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The plan's keys and values, those of a head one after another.

    k: [rows, kv_heads, keys, d]. v: [rows, kv_heads, keys, wide + ones], a value and ones behind it.
    """

    k: Tensor
    v: Tensor
    wide: int


def _gather(kv: PagedKV, plan: ExactPlan, dtype: torch.dtype) -> _Seen:
    """K/V of the plan's keys. The tail's are the null slot's, which is finite.

    Holds until the next layer of the plan: values of plain pages go from these straight to their place before the ones.
    """
    stored = moved(kv.planes)
    _, planes, kv_heads, dim = stored.shape
    lines = plan.lines.get((planes, kv_heads))
    if lines is None:
        slots = F.pad(plan.prefix.slots, (0, plan.bias.shape[2] - plan.prefix.slots.shape[1]))
        first = torch.arange(planes * kv_heads, device=slots.device).view(planes, 1, kv_heads, 1)
        lines = plan.lines[planes, kv_heads] = torch.add(first, slots[:, None], alpha=planes * kv_heads)
    shape, wide = lines.shape[1:], kv.value_dim or dim
    v = plan.values.get((kv_heads, wide))
    if v is None:
        v = plan.values[kv_heads, wide] = torch.ones(*shape, wide + _ones(wide), dtype=dtype)
    pages = stored.view(-1, dim)
    if kv.scales is None and planes == 2 and wide == dim:
        k = pages.index_select(0, lines[0].view(-1)).view(*shape, dim)
        torch.index_select(pages, 0, lines[1].view(-1), out=v.view(-1, v.shape[3])[:, :wide])
        return _Seen(k, v, wide)
    found = pages.index_select(0, lines.view(-1)).view(kv.data.dtype).view(*lines.shape, dim)
    if kv.scales is not None:
        found = decoded(found.permute(1, 3, 0, 2, 4), kv.scales, dtype).permute(2, 0, 3, 1, 4)
    v[..., :wide] = found[-1, ..., :wide]
    return _Seen(found[0].contiguous(), v, wide)


def _of_tree(sums: Sums, q: Tensor, seen: _Seen, plan: ExactPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """As `_at_once`, and as in `torch_backend` a row whose result is not finite is computed again, each query with
    zeros where it sees nothing: a zero there and another number of queries change no bit."""
    out = _at_once(sums, q, seen, plan, scale, sinks)
    for row in broken_rows(out):
        own = slice(row, row + 1)
        for node in range(q.shape[1]):
            at = slice(node, node + 1)
            bias = plan.bias[own, at]
            later = None if plan.later is None else plan.later[own]
            k, v = (each[own].where((bias == 0)[0, 0, :, None], 0.0) for each in (seen.k, seen.v))
            one = ExactPlan(plan.prefix, bias, later)
            out[own, at] = _at_once(sums, q[own, at], _Seen(k, v, seen.wide), one, scale, sinks)
    return out


def _at_once(sums: Sums, q: Tensor, seen: _Seen, plan: ExactPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """q: [rows, n, heads, d]. Returns [rows, n, heads, wide]."""
    rows, n, heads, dim = q.shape
    kv_heads, keys = seen.k.shape[1:3]
    held = sums.held(seen.k.flatten(0, 1), seen.v.flatten(0, 1), seen.wide)
    grouped = q.view(rows, n, kv_heads, -1, dim).transpose(1, 2)  # [rows, kv_heads, n, group, d]
    step = max(1, _SCORES // (rows * heads * keys))
    if n <= step:
        out = _of_queries(sums, grouped, held, plan, scale, sinks)
    else:
        parts = [slice(start, start + step) for start in range(0, n, step)]
        out = torch.cat(
            [_of_queries(sums, grouped[:, :, each], held, _lanes(plan, each), scale, sinks) for each in parts], dim=2
        )
    return out.transpose(1, 2).reshape(rows, n, heads, seen.wide)


def _ones(dim: int) -> int:
    return max(_ONES, _LEAST_WIDTH - dim)


def _lanes(plan: ExactPlan, lanes: slice) -> ExactPlan:
    """The plan of some of its queries."""
    return ExactPlan(plan.prefix, plan.bias[:, lanes], plan.later)


def _of_queries(sums: Sums, q: Tensor, held: Any, plan: ExactPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """q: [rows, kv_heads, n, group, d]. held: of `Sums`. Returns [rows, kv_heads, n, group, wide]."""
    rows, kv_heads, n, group, _ = q.shape
    padded = sums.scores(q.reshape(rows * kv_heads, n * group, -1), held, scale)
    weights = padded[: rows * kv_heads, : n * group].view(rows, kv_heads, n, group, -1)
    weights += plan.bias[:, None, :, None]
    peak = weights.amax(dim=-1, keepdim=True)
    if sinks is not None:
        logit = sinks.view(kv_heads, 1, group, 1)
        peak = torch.maximum(peak, logit)
    weights.sub_(peak).clamp_(min=_FAR).exp_().sub_(_least_weight())
    total, mass = sums.weighed(weights, padded, held, plan)
    if sinks is not None:
        mass = mass + torch.exp(logit - peak).flatten(0, 1).flatten(1, 2)
    return (total / mass).to(q.dtype).view(rows, kv_heads, n, group, -1)


@cache
def _least_weight() -> float:
    """exp(-80), as it is for any element of a tensor."""
    return torch.tensor([_FAR]).exp().item()


def scored(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q @ k.T * scale. q: [batch, queries, d]. k: [batch, keys, d], at least 16. Returns [batch, queries, keys], padded
    as `_of_least` does."""
    q, k = _of_least(q), _of_batch(k)
    return torch.baddbmm(_UNREAD, q, k.transpose(1, 2), beta=0, alpha=scale)


def folded(weights: Tensor, v: Tensor, whole: int, later: Tensor | None = None) -> Tensor:
    """The sum of the blocks, as the module says. weights: [batch, queries, keys]. v: [batch, keys, d].

    whole: keys in blocks, the rest is the open one. later: [batch, queries, t], weights of the last keys that come
    after it. Returns [batch, queries, d].
    """
    batch, queries, keys = weights.shape
    weights, v = _of_least(weights), _of_batch(v)
    spans = [(start, min(start + BLOCK, whole)) for start in range(0, whole, BLOCK)]
    spans += [(whole, keys)] if keys > whole else []
    total: Tensor | None = None
    for start, stop in spans:
        part = weights[:, :, start:stop], v[:, start:stop]
        total = torch.bmm(*part) if total is None else total.baddbmm_(*part)
    assert total is not None
    if later is not None:
        total.baddbmm_(_of_least(later), v[:, keys - later.shape[2] :])
    return total[:batch, :queries]


def _of_least(x: Tensor) -> Tensor:
    """x [batch, queries, ...] padded to the least batch and number of queries of a product."""
    x = _of_batch(x)
    excess = _LEAST_QUERIES - x.shape[1]
    return F.pad(x, (0, 0, 0, excess)) if excess > 0 else x


def _of_batch(x: Tensor) -> Tensor:
    return x if len(x) >= _LEAST_BATCH else F.pad(x, (0, 0, 0, 0, 0, _LEAST_BATCH - len(x)))


# ----------------------------------------------------------------------------------------------------- the probe

_BATCHES = (1, 2, 3, 8)
_QUERIES = (1, 5, 16, 17, 31, 64, 120)
_KEYS = (16, 17, 31, 64, 100, 129, 300)
_CHAINS = ((1, 0), (2, 0), (3, 0), (3, 2), (16, 0), (77, 12), (100, 28), (127, 1), (128, 0), (127, 64), (64, 128))
"""Keys of a block, and what lies between them."""


@cache
def problem(dim: int, threads: int, value_dim: int | None = None) -> str | None:
    """What of attention with heads of `dim` is not as the module needs it on this machine; None if all is.

    threads: of PyTorch. value_dim: of a head's value, where that is narrower (MLA). Tried are the
    calls that serve, with numbers of widely different size.
    """
    generator = torch.Generator().manual_seed(dim * threads)
    most = max(_QUERIES)
    q, k = (adversarial((8, count, dim), generator) for count in (most, max(_KEYS)))
    want = scored(q, k, 0.3)
    for batch in _BATCHES:
        for queries, keys in ((n, m) for n in _QUERIES for m in _KEYS):
            at = max(_KEYS) - keys
            got = scored(q[:batch, :queries].contiguous(), k[:batch, at:].contiguous(), 0.3)
            if not torch.equal(got[:batch, :queries], want[:batch, :queries, at:]):
                return f"attention's scores with heads of {dim}"
    wide = value_dim or dim
    width = wide + _ones(wide)
    for count, between in _CHAINS:
        weights, v = adversarial((8, most, count), generator).abs(), adversarial((8, count, width), generator)
        total = adversarial((8, most, width), generator)
        want, added = torch.bmm(weights, v), torch.baddbmm(total, weights, v)
        if not torch.equal(added, total + want):
            return f"attention's sums with heads of {wide}"
        places = torch.randperm(count + between, generator=generator)[:count].sort().values
        spread, spread_v = (
            weights.new_zeros(8, most, count + between),
            adversarial((8, count + between, width), generator),
        )
        spread[:, :, places], spread_v[:, places] = weights, v
        for batch, queries in ((batch, n) for batch in _BATCHES for n in _QUERIES):
            got = folded(spread[:batch, :queries].contiguous(), spread_v[:batch].contiguous(), 0)
            if not torch.equal(got, want[:batch, :queries]):
                return f"attention's sums with heads of {wide}"
            some = _of_least(total[:batch, :queries]), _of_least(spread[:batch, :queries]), _of_batch(spread_v[:batch])
            got = torch.baddbmm(*some)[:batch, :queries]
            if not torch.equal(got, added[:batch, :queries]):
                return f"attention's sums with heads of {wide}"
    return None
