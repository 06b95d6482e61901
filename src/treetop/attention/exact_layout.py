"""Where exact attention on a CPU lays out what it multiplies, and the views of it that its products take.

Layers of one kind in one plan fill the same memory in turn, so that a view is made once a plan and not once a layer:
beside weights that go through the caches each call of a tensor operation takes a multiple of what it takes alone.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.kv import PagedKV, decoded, moved

BLOCK = 128
"""Positions of a block: the longest chain of all, and with a tail no longer than the library keeps one."""
_ONES, _LEAST_WIDTH = 8, 32
"""Columns of ones beside the values, whose sum is that of the weights, at least; and of both together. With fewer it
would be another product."""
LEAST_KEYS = 16
_LEAST_QUERIES, _LEAST_BATCH = 16, 2
"""Of a product: with fewer the library computes dot products, or cuts a product among threads."""
_SCORES = 2**24
"""Of a slice of a prefill's queries, which bounds its memory."""


@dataclass(frozen=True, slots=True)
class ExactPrefix:
    """Where the keys of the committed prefix lie, in the order of the module.

    slots: [rows, whole + open] int64, the null slot where there is no key.
    position: [rows or 1, whole + open] int64. there: [rows, whole + open] bool, whether it holds a key.
    whole: keys in whole blocks, a multiple of `BLOCK`; of a prefill all.
    first: [rows] int64, where the open block begins; None is 0. longest: keys of an open block, at most.
    """

    slots: Tensor
    position: Tensor
    there: Tensor
    whole: int
    first: Tensor | None
    longest: int


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """bias: [rows, n, keys], 0 where a key is seen, -inf elsewhere; of the prefix, then of the tail.
    later: [rows, 1, t] bool, tail columns in the block after the open one; None if there is none in any row.
    layers: what layers of a kind share and fill in turn, see `LaidLayer`; the first of a plan makes it.
    """

    prefix: ExactPrefix
    bias: Tensor
    later: Tensor | None
    layers: dict[tuple[int, ...], "LaidLayer"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaidKeys:
    """A layer's keys and values, those of a head one after another, and views of them, which are made once a plan.

    both: [2, batch, keys, d + ones], keys and what is not read, values and ones. batch: rows times K/V heads, at least
        `_LEAST_BATCH`.
    k: [batch, keys, d]. turned: [batch, d, keys]. v: [batch, keys, wide + ones], and blocks of these.
    tail: [2, rows, kv_heads, t, d], of `both`.
    wide: numbers of a value.
    """

    both: Tensor
    k: Tensor
    turned: Tensor
    v: Tensor
    blocks: list[Tensor]
    tail: Tensor
    wide: int


@dataclass(frozen=True, slots=True)
class LaidQueries:
    """Queries of a plan that are computed at once, and views, which are made once.

    lanes: which of them.
    q: [batch, queries, d], scaled, zeros behind a K/V head's n * group. place: [rows, n, kv_heads, group, d] of it.
    scores: [batch, queries, keys], and blocks of these. weights: [rows, kv_heads, n, group, keys] of it.
    bias: [rows, 1, n, 1, keys]. later: [rows, 1, 1, 1, t].
    total: [batch, queries, wide + ones]. values: [rows, n, kv_heads, group, wide] of it. mass: [..., 1], beside them.
    """

    lanes: slice
    q: Tensor
    place: Tensor
    scores: Tensor
    weights: Tensor
    blocks: list[Tensor]
    bias: Tensor
    later: Tensor | None
    total: Tensor
    values: Tensor
    mass: Tensor

    def of_heads(self, x: Tensor) -> Tensor:
        """x [batch, queries, ...] without what is padded, [rows, n, kv_heads, group, ...]."""
        rows, n, kv_heads, group, _ = self.place.shape
        return _unpadded(x, rows * kv_heads, n * group).view(rows, kv_heads, n, group, -1).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class LaidLayer:
    """What layers of a kind fill in turn: a layer's numbers hold until the next one's.

    lines: [2 * batch * keys] int64, which line of a layer's pages each key and each value is, the null slot's for the
        tail.
    gathered: [2 * batch * keys, d] of `LaidKeys.both`, where these lines go.
    """

    keys: LaidKeys
    queries: list[LaidQueries]
    lines: Tensor
    gathered: Tensor


class Sums(Protocol):
    """The two sums of attention."""

    def held(self, keys: LaidKeys) -> Any:
        """What the other two take of a layer's keys and values."""

    def scores(self, some: LaidQueries, held: Any) -> None:
        """q . k, into `scores`."""

    def weighed(self, some: LaidQueries, held: Any) -> tuple[Tensor, Tensor]:
        """The sum of weights, which lie in `scores`, times values, [rows, n, kv_heads, group, wide], and that of the
        weights, [rows, n, kv_heads, group, 1]. Weights may be written to."""


def layer_of(q: Tensor, kv: PagedKV, plan: ExactPlan) -> LaidLayer:
    """What layers of this one's kind share. q: [rows, n, heads, d]."""
    (heads, dim), (planes, kv_heads) = q.shape[2:], kv.data.shape[1:3]
    wide = kv.value_dim or dim
    kind = heads, dim, planes, kv_heads, wide
    found = plan.layers.get(kind)
    if found is None:
        found = plan.layers[kind] = _lay(plan, heads, dim, planes, kv_heads, wide)
    return found


def _lay(plan: ExactPlan, heads: int, dim: int, planes: int, kv_heads: int, wide: int) -> LaidLayer:
    keys, slots = lay_keys(plan, kv_heads, dim, wide), plan.prefix.slots
    nodes = plan.bias.shape[2] - slots.shape[1]
    if nodes:
        slots = torch.cat([slots, _null_slots(len(slots), nodes)], dim=1)
    lines = torch.add(_first_lines(planes, kv_heads), slots[:, None], alpha=planes * kv_heads).flatten(1, 2)
    if len(keys.k) > lines.shape[1]:
        lines = of_batch(lines.transpose(0, 1)).transpose(0, 1)
    gathered = keys.both.flatten(0, 2).narrow(1, 0, dim)
    return LaidLayer(keys, lay_queries(plan, heads, dim, kv_heads, keys), lines.reshape(-1), gathered)


@cache
def _null_slots(rows: int, count: int) -> Tensor:
    return torch.zeros((rows, count), dtype=torch.int64)


@cache
def _first_lines(planes: int, kv_heads: int) -> Tensor:
    """Lines of the null slot: its keys by head, and its values, [2, 1, kv_heads, 1]."""
    head = torch.arange(kv_heads)
    return torch.stack([head, (planes - 1) * kv_heads + head]).view(2, 1, kv_heads, 1)


def lay_keys(plan: ExactPlan, kv_heads: int, dim: int, wide: int) -> LaidKeys:
    (rows, _, count), start = plan.bias.shape, plan.prefix.slots.shape[1]
    both = torch.ones(2, max(rows * kv_heads, _LEAST_BATCH), count, dim + ones_of(wide))
    k, v = both[0].narrow(2, 0, dim), both[1].narrow(2, 0, wide + ones_of(wide))
    own = both.narrow(1, 0, rows * kv_heads).view(2, rows, kv_heads, count, -1)
    tail = own.narrow(3, start, count - start).narrow(4, 0, dim)
    return LaidKeys(both, k, k.transpose(1, 2), v, in_blocks(v, plan.prefix.whole, 1), tail, wide)


def lay_queries(plan: ExactPlan, heads: int, dim: int, kv_heads: int, keys: LaidKeys) -> list[LaidQueries]:
    """In slices that bound the memory of scores, which all share it."""
    (rows, n, count), group, batch = plan.bias.shape, heads // kv_heads, len(keys.k)
    step = min(n, max(1, _SCORES // (rows * heads * count)))
    store = torch.empty(batch, max(step * group, _LEAST_QUERIES), count)
    later, found = None if plan.later is None else plan.later[:, None, None], list[LaidQueries]()
    for start in range(0, n, step):
        own = min(step, n - start)
        queries = max(own * group, _LEAST_QUERIES)
        q, total = torch.zeros(batch, queries, dim), torch.empty(batch, queries, keys.v.shape[2])
        scores = store
        if queries < store.shape[1]:
            scores = store.view(-1).narrow(0, 0, batch * queries * count).view(batch, queries, count)
        place, weights, sums = (
            _unpadded(x, rows * kv_heads, own * group).view(rows, kv_heads, own, group, -1) for x in (q, scores, total)
        )
        place, sums = place.transpose(1, 2), sums.transpose(1, 2)
        bias, blocks = plan.bias.narrow(1, start, own)[:, None, :, None], in_blocks(scores, plan.prefix.whole, 2)
        values, mass = sums.narrow(4, 0, keys.wide), sums.narrow(4, keys.wide, 1)
        lanes = slice(start, start + own)
        found.append(LaidQueries(lanes, q, place, scores, weights, blocks, bias, later, total, values, mass))
    return found


def _unpadded(x: Tensor, batch: int, queries: int) -> Tensor:
    return x if x.shape[:2] == (batch, queries) else x[:batch, :queries]


def in_blocks(x: Tensor, whole: int, dim: int) -> list[Tensor]:
    """x by blocks of keys, which lie along `dim`: `whole` of them in blocks, the rest is the open one."""
    count = x.shape[dim]
    if not whole or whole == count <= BLOCK:
        return [x]
    spans = [(start, min(start + BLOCK, whole)) for start in range(0, whole, BLOCK)]
    spans += [(whole, count)] if count > whole else []
    return [x.narrow(dim, start, stop - start) for start, stop in spans]


def gather(kv: PagedKV, layer: LaidLayer, dtype: torch.dtype) -> None:
    """Lay out K/V of the plan's keys. The tail's are the null slot's, which is finite."""
    stored, keys = moved(kv.planes), layer.keys
    planes, dim = stored.shape[1], stored.shape[3]
    pages = stored.view(-1, dim)
    if kv.scales is None and planes == 2 and keys.wide == dim:
        torch.index_select(pages, 0, layer.lines, out=layer.gathered)
        return
    found = pages.index_select(0, layer.lines).view(kv.data.dtype).view(*keys.both.shape[:3], dim)
    if kv.scales is not None:
        batch, kv_heads = found.shape[1], kv.scales.shape[1]
        scales = kv.scales[[0, -1]].repeat(1, -(-batch // kv_heads))[:, :batch]
        found = decoded(found.permute(2, 0, 1, 3), scales, dtype).permute(1, 2, 0, 3)
    keys.k.copy_(found[0])
    keys.v[..., : keys.wide] = found[1, ..., : keys.wide]


def ones_of(dim: int) -> int:
    return max(_ONES, _LEAST_WIDTH - dim)


def of_least(x: Tensor) -> Tensor:
    """x [batch, queries, ...] padded to the least batch and number of queries of a product."""
    x = of_batch(x)
    excess = _LEAST_QUERIES - x.shape[1]
    return F.pad(x, (0, 0, 0, excess)) if excess > 0 else x


def of_batch(x: Tensor) -> Tensor:
    """x [batch, ...] with zeros up to the least batch."""
    excess = _LEAST_BATCH - len(x)
    return torch.cat([x, x.new_zeros(excess, *x.shape[1:])]) if excess > 0 else x
