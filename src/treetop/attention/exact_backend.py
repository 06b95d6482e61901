"""Attention on a CPU in float32 whose result depends on a query's position and its keys alone, to the bit.

    score of a key    (q * scale) . k, one sum over the head
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

That the library's products are such chains, whatever their shape, is no promise: `problem` probes it. A factor of a
product it puts where that is cheapest for the shape, so queries are scaled before. Where products are no chains, scores
and sums are of integers (`attention.integer_sums`), and the rest is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.contract import TailKV
from treetop.attention.exact_layout import (
    BLOCK,
    LEAST_KEYS,
    ExactPlan,
    ExactPrefix,
    LaidKeys,
    LaidLayer,
    LaidQueries,
    Sums,
    gather,
    in_blocks,
    lay_keys,
    lay_queries,
    layer_of,
    of_batch,
    of_least,
    ones_of,
)
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
from treetop.kernels.kv import PagedKV, decoded, moved, slots_at, slots_of
from treetop.types.ids import is_draft

MOST_NODES = 64
"""Of a tree."""
_FAR = -80.0
"""Below the largest score, from where on a weight is 0: `exp` is probed as far, and takes a vector library 15 times as
long for -inf, and 80 times for what has no normal number."""


class ChainSums:
    """`Sums` by the library's products."""

    def held(self, keys: LaidKeys) -> LaidKeys:
        return keys

    def scores(self, some: LaidQueries, held: LaidKeys) -> None:
        scored(some.q, held.turned, some.scores)

    def weighed(self, some: LaidQueries, held: LaidKeys) -> tuple[Tensor, Tensor]:
        weights, values, later = some.blocks, held.blocks, some.later
        if later is not None:
            last = some.weights[..., -later.shape[-1] :]
            apart = (last * later).flatten(0, 1).flatten(1, 2)
            last.masked_fill_(later, 0.0)
            weights, values = [*weights, of_least(apart)], [*values, held.v[:, -later.shape[-1] :]]
        folded(weights, values, some.total)
        return some.values, some.mass


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
        kv_len, most, first = metadata.kv_len[:, None], metadata.max_kv_len, None
        if metadata.causal:
            whole, extra, longest = max(most, LEAST_KEYS), 0, 0
        else:
            whole, longest = most // BLOCK * BLOCK, most
            if whole:
                first = metadata.kv_len // BLOCK * BLOCK
                longest = int((metadata.kv_len - first).max())
            extra = max(longest, LEAST_KEYS)
        ruler = self._plain.ruler(whole + extra, metadata)
        table, size, position, end = metadata.table.data, metadata.page_size, ruler.positions, kv_len
        if first is None:
            there = position < end
            slots = slots_at(table, metadata.rows, ruler.column, ruler.offset, there, size)
        else:
            closed = position < whole
            end = torch.where(closed, first[:, None], kv_len)
            position = torch.where(closed, position, first[:, None] + position - whole)
            there = position < end
            slots = slots_of(table, metadata.rows, position, there, size)
        return ExactPrefix(slots, position, there, whole, first, longest)

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
        later = None
        if begun.longest + tail.shape[2] > BLOCK:
            ends = BLOCK if begun.first is None else (begun.first + BLOCK)[:, None, None]
            beyond = metadata.tail_positions[:, None] >= ends
            later = beyond if bool((beyond & tail).any()) else None
        return ExactPlan(begun, _bias(visible), later)

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
        return ExactPlan(plan.prefix, _bias(chosen), plan.later)

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
        layer = layer_of(q, kv, plan)
        keys = layer.keys
        gather(kv, layer, q.dtype)
        nodes = decoded(tail.planes, tail.scales, q.dtype).permute(2, 0, 3, 1, 4)
        if len(nodes) == 2 and nodes.shape[4] == keys.wide:
            keys.tail.copy_(nodes)
        else:
            keys.tail[0] = nodes[0]
            keys.tail[1, ..., : keys.wide] = nodes[-1, ..., : keys.wide]
        return _of_tree(self._sums, q, layer, plan, scale, sinks)

    def causal(
        self, q: Tensor, kv: PagedKV, plan: ExactPlan | TorchPlan, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._plain.causal(q, kv, plan, scale, sinks)
        layer = layer_of(q, kv, plan)
        gather(kv, layer, q.dtype)
        return _at_once(self._sums, q, layer.keys, layer.queries, scale, sinks)


def _bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _of_tree(sums: Sums, q: Tensor, layer: LaidLayer, plan: ExactPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """As `_at_once`, and as in `torch_backend` a row whose result is not finite is computed again, each query with
    zeros where it sees nothing: a zero there and another number of queries change no bit."""
    out, keys = _at_once(sums, q, layer.keys, layer.queries, scale, sinks), layer.keys
    heads, dim, kv_heads = *q.shape[2:], keys.tail.shape[2]
    for row in broken_rows(out):
        own = slice(row, row + 1)
        for node in range(q.shape[1]):
            at = slice(node, node + 1)
            alone = ExactPlan(plan.prefix, plan.bias[own, at], None if plan.later is None else plan.later[own])
            seen, of_row = lay_keys(alone, kv_heads, dim, keys.wide), slice(row * kv_heads, (row + 1) * kv_heads)
            seen.both[:, :kv_heads] = keys.both[:, of_row].where((alone.bias == 0)[0, 0, :, None], 0.0)
            some = lay_queries(alone, heads, dim, kv_heads, seen)
            out[own, at] = _at_once(sums, q[own, at], seen, some, scale, sinks)
    return out


def _at_once(
    sums: Sums, q: Tensor, keys: LaidKeys, queries: list[LaidQueries], scale: float, sinks: Tensor | None
) -> Tensor:
    """q: [rows, n, heads, d]. Returns [rows, n, heads, wide]."""
    rows, n, heads, dim = q.shape
    held, kv_heads = sums.held(keys), keys.tail.shape[2]
    by_head = q.view(rows, n, kv_heads, -1, dim)
    if len(queries) == 1:
        out = _of_queries(sums, by_head, queries[0], held, scale, sinks)
    else:
        out = torch.cat([_of_queries(sums, by_head[:, each.lanes], each, held, scale, sinks) for each in queries], 1)
    return out.reshape(rows, n, heads, keys.wide)


def _of_queries(sums: Sums, q: Tensor, some: LaidQueries, held: Any, scale: float, sinks: Tensor | None) -> Tensor:
    """q: [rows, n, kv_heads, group, d]. held: of `Sums`. Returns [rows, n, kv_heads, group, wide]."""
    torch.mul(q, scale, out=some.place)
    sums.scores(some, held)
    weights = some.weights
    weights += some.bias
    peak = weights.amax(dim=-1, keepdim=True)
    if sinks is not None:
        logit = sinks.view(q.shape[2], 1, q.shape[3], 1)
        peak = torch.maximum(peak, logit)
    weights.sub_(peak).clamp_(min=_FAR).exp_().sub_(_least_weight())
    total, mass = sums.weighed(some, held)
    if sinks is not None:
        mass = mass + torch.exp(logit - peak).transpose(1, 2)
    out = total / mass
    return out if out.dtype == q.dtype else out.to(q.dtype)


@cache
def _least_weight() -> Tensor:
    """exp(-80), as it is for any element of a tensor. Without dimensions."""
    return torch.tensor([_FAR]).exp_()[0]


def scored(q: Tensor, turned: Tensor, out: Tensor | None = None) -> Tensor:
    """q @ k.T. q: [batch, queries, d]. turned: k.T [batch, d, keys]. All at least the least of a product."""
    return torch.bmm(q, turned, out=out)


def folded(weights: Sequence[Tensor], v: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of blocks, one after another. weights: of each [batch, queries, keys]. v: of each [batch, keys, d].

    Returns [batch, queries, d]. Batch and queries are at least the least of a product.
    """
    total = torch.bmm(weights[0], v[0], out=out)
    for some, values in zip(weights[1:], v[1:], strict=True):
        total.baddbmm_(some, values)
    return total


# ----------------------------------------------------------------------------------------------------- the probe

_BATCHES = (1, 2, 3, 8)
_QUERIES = (1, 5, 16, 17, 31, 64, 120)
_KEYS = (16, 17, 31, 64, 100, 129, 300)
_CHAINS = ((1, 0), (2, 0), (3, 0), (3, 2), (16, 0), (77, 12), (100, 28), (127, 1), (128, 0), (127, 64), (64, 128))
"""Keys of a block, and what lies between them."""
_MANY = (2, 1031, 1301)
"""Batch, queries and keys of a prefill that is long enough for any kernel of a library's."""


@cache
def problem(dim: int, threads: int, value_dim: int | None = None) -> str | None:
    """What of attention with heads of `dim` is not as the module needs it on this machine; None if all is.

    threads: of PyTorch. value_dim: of a head's value, where that is narrower (MLA). Tried are the
    calls that serve, with numbers of widely different size.
    """
    generator = torch.Generator().manual_seed(dim * threads)
    most = max(_QUERIES)
    q, k = (adversarial((8, count, dim), generator) for count in (most, max(_KEYS)))
    wide = value_dim or dim
    width = wide + ones_of(wide)
    k = F.pad(k, (0, ones_of(wide)))[..., :dim]  # keys lie in wider lines
    want = scored(q, k.transpose(1, 2))
    for batch in _BATCHES:
        for queries, keys in ((n, m) for n in _QUERIES for m in _KEYS):
            at = max(_KEYS) - keys
            some, of_these = of_least(q[:batch, :queries].contiguous()), k[:batch, at:]
            got = scored(some, of_batch(of_these).transpose(1, 2))
            if not torch.equal(got[:batch, :queries], want[:batch, :queries, at:]):
                return f"attention's scores with heads of {dim}"
    if (of_many := _problem_of_many(dim, wide, generator)) is not None:
        return of_many
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
            weights, v = of_least(spread[:batch, :queries].contiguous()), of_batch(spread_v[:batch])
            got = folded([weights], [v])[:batch, :queries]
            if not torch.equal(got, want[:batch, :queries]):
                return f"attention's sums with heads of {wide}"
            got = torch.baddbmm(of_least(total[:batch, :queries]), weights, v)[:batch, :queries]
            if not torch.equal(got, added[:batch, :queries]):
                return f"attention's sums with heads of {wide}"
    return None


def _problem_of_many(dim: int, wide: int, generator: torch.Generator) -> str | None:
    """The same of a long prefill, whose queries and keys are compared with some of them at a time."""
    (batch, queries, keys), line = _MANY, max(dim, wide) + ones_of(wide)
    q, both = adversarial((batch, queries, dim), generator), adversarial((batch, keys, line), generator)
    turned, v = both[..., :dim].transpose(1, 2), both[..., : wide + ones_of(wide)]
    scores = scored(q, turned)
    for some, theirs in zip(q.split(240, 1), scores.split(240, 1), strict=True):
        for keys_of, want in zip(turned.split(300, 2), theirs.split(300, 2), strict=True):
            if not torch.equal(scored(some, keys_of), want):
                return f"attention's scores with heads of {dim}"
    weights, values = scores.abs_(), in_blocks(v, keys, 1)
    total = folded(in_blocks(weights, keys, 2), values)
    for some, want in zip(weights.split(240, 1), total.split(240, 1), strict=True):
        if not torch.equal(folded(in_blocks(some, keys, 2), values), want):
            return f"attention's sums with heads of {wide}"
    return None
