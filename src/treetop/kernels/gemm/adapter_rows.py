"""What low-rank adapters add to a product, each row of a batch its own adapter's: grouped by adapter, in two launches.

    inner[token] = A[slot of its row] x[token]          a part for each share of k, in float32
    out[token]  += B[slot of its row] inner[token]      added up in the order of the shares

Rows with one adapter share tiles (`tile_rows`, once a forward), so that its factors are read once for all of them. The
first launch cuts k, for there are few ranks and many columns; it is cut by k alone, whatever the number of rows. It
goes before the product beside which it is, and the second after it. Slot 0 is of rows without an adapter, padding too:
their programs return at once. Nothing is decided by the host: rows and slots are data of the device.

Where a row's bits may depend on it alone, programs have equally many tokens whatever each row has of them. On a CPU
there are calls that were probed then, for `RANKS` ranks each: so the ranks of others, for which tables are wide enough,
change no bit either.
Source: L. Chen et al., "Punica: Multi-Tenant LoRA Serving", arXiv:2310.18547.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_num_threads

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.exact import BatchInvariantCall, batch_invariant_linear
from treetop.kernels.fused import batch_invariant_functions, gate_mul_reference, joined, joined_in_order
from treetop.kernels.gate import Gate, activated
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, lanes, power_of_two, tl


@dataclass(frozen=True, slots=True)
class AdapterFactors:
    """Of one product, by slot; those of slot 0 are 0 for ever.

    A product may be joined of several (q, k and v), each with ranks of its own.

    a: [slots, joined * rank, in]. b: [slots, out, rank], scaled. ends: behind the last output of each that is joined.
    bounds: 0 and these, [joined + 1] int32.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    bounds: Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Rows of a batch in the order of their slots, cut into tiles of one slot and at most `per_tile` rows.

    slots: [rows] int64, of each row. order: [rows] int32. slot, start, count: [most tiles] int32, where a tile lies in
    `order`; a tile that is not there has no rows. present: [rows] int32, slots of adapters that some row has, then 0.
    """

    per_tile: int
    slots: Tensor
    order: Tensor
    present: Tensor
    slot: Tensor
    start: Tensor
    count: Tensor


_FEW, _MANY = 16, 64
"""Tokens of a tile, where rows have up to 4 each and where they have more."""
_SHARE, _MOST_SHARES = 512, 16
"""Columns of a share of k, and how many shares there are at most."""
_BLOCK_K = 128
"""Columns that a program of the first launch takes at a time."""
_STAGES_BYTES = 64 << 10
"""Shared memory for all that it takes: as much as lets programs of a product be beside it."""
RANKS = 16
"""That a product on a CPU takes at a time, where a row's bits may depend on it alone."""

RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def tokens_of_tile(n: int) -> int:
    """How many tokens a tile holds where each row has n."""
    return _FEW if n <= 4 else _MANY


def most_tiles(rows: int, per_tile: int, slots: int) -> int:
    return min(rows, rows // per_tile + slots)


# ------------------------------------------------------------------------------------------------------------- tiles


def tile_rows_reference(tiles: RowTiles, num_slots: int) -> None:
    """Write who shares a tile by `tiles.slots`, each below num_slots."""
    order = tiles.slots.argsort(stable=True)
    counts = tiles.slots.bincount(minlength=num_slots)
    per_slot = (counts + tiles.per_tile - 1) // tiles.per_tile
    found = torch.arange(num_slots, device=order.device).repeat_interleave(per_slot)
    at = torch.arange(len(found), device=order.device) - (per_slot.cumsum(0) - per_slot)[found]
    tiles.order.copy_(order)
    present = counts[1:].nonzero()[:, 0] + 1
    tiles.present.zero_()
    tiles.present[: len(present)] = present.to(torch.int32)
    for each in (tiles.slot, tiles.start, tiles.count):
        each.zero_()
    tiles.slot[: len(found)] = found.to(torch.int32)
    tiles.start[: len(found)] = ((counts.cumsum(0) - counts)[found] + at * tiles.per_tile).to(torch.int32)
    tiles.count[: len(found)] = (counts[found] - at * tiles.per_tile).clamp(max=tiles.per_tile).to(torch.int32)


def tile_rows(tiles: RowTiles, num_slots: int, gpu: GpuTraits) -> None:
    """`tile_rows_reference` in one launch."""
    rows, most = len(tiles.slots), len(tiles.slot)
    _tile_rows_kernel[(1,)](
        tiles.order, tiles.present, tiles.slot, tiles.start, tiles.count, tiles.slots, rows, num_slots, most,
        per=tiles.per_tile, block=lanes(rows), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip


@jit_for_any("rows", "slots", "most")
def _tile_rows_kernel(
    order: Arg, present: Arg, tile_slot: Arg, tile_start: Arg, tile_count: Arg, slot_of: Arg, rows: Arg, slots: Arg,
    most: Arg, per: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """All rows and tiles in one program, slot after slot."""
    pdl_wait(overlap, early=True)
    lane = tl.arange(0, block)
    own = tl.load(slot_of + lane, mask=lane < rows, other=-1)
    begun = 0
    tiles = 0
    adapters = 0
    for slot in range(slots):
        mine = own == slot
        count = tl.sum(mine.to(tl.int32), 0)
        known = (slot > 0) & (count > 0)
        tl.store(present + adapters, slot, mask=known)
        adapters += known.to(tl.int32)
        place = begun + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, lane, mask=mine)
        number = tl.cdiv(count, per)
        there = lane < number
        tl.store(tile_slot + tiles + lane, tl.zeros([block], tl.int32) + slot, mask=there)
        tl.store(tile_start + tiles + lane, begun + lane * per, mask=there)
        tl.store(tile_count + tiles + lane, tl.minimum(count - lane * per, per), mask=there)
        begun += count
        tiles += number
    tl.store(present + lane, tl.zeros([block], tl.int32), mask=(lane >= adapters) & (lane < rows))
    beyond = (tiles + lane) < most
    tl.store(tile_slot + tiles + lane, tl.zeros([block], tl.int32), mask=beyond)
    tl.store(tile_start + tiles + lane, tl.zeros([block], tl.int32), mask=beyond)
    tl.store(tile_count + tiles + lane, tl.zeros([block], tl.int32), mask=beyond)


# ---------------------------------------------------------------------------------------------------------- products


def shrink_reference(x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor:
    """The products of x [rows, n, in] with A of each row's adapter, [shares, rows, n, joined * rank]: their sum."""
    return torch.bmm(x, factors.a[tiles.slots].transpose(1, 2))[None]


def shrink_by_rows(
    x: Tensor, factors: AdapterFactors, tiles: RowTiles, linear: RowProduct = batch_invariant_linear
) -> Tensor:
    """`shrink_reference` on a CPU in float32, where what a row gets has the same bits in any batch.

    Factors have a multiple of `RANKS` ranks, in this and in what follows.
    """
    inner = x.new_zeros((*x.shape[:2], factors.a.shape[1]))
    for slot, rows in _of_adapters(tiles):
        own = x[rows].flatten(0, 1)
        for block, out in zip(factors.a[slot].split(RANKS), inner.split(RANKS, dim=2), strict=True):
            out[rows] = linear(own, block, None).view(len(rows), -1, RANKS)
    return inner[None]


def _of_adapters(tiles: RowTiles) -> Iterator[tuple[int, Tensor]]:
    """The slot and the rows of each tile of an adapter's."""
    for slot, start, count in zip(*(each.tolist() for each in (tiles.slot, tiles.start, tiles.count)), strict=True):
        if slot and count:
            yield slot, tiles.order[start : start + count]


def shrink(
    x: Tensor, factors: AdapterFactors, tiles: RowTiles, gpu: GpuTraits, batch_invariant: bool = False
) -> Tensor:
    """`shrink_reference` in one launch, in float32. What it gives of rows without an adapter means nothing.

    It goes before the product that it belongs to, which hides it. batch_invariant: a row has the same bits in any
    batch.
    """
    rows, n, k = x.shape
    splits, joins = min(_MOST_SHARES, -(-k // _SHARE)), len(factors.ends)
    share = -(-k // splits // _BLOCK_K) * _BLOCK_K
    inner = torch.empty((splits, rows, n, joins * factors.rank), dtype=torch.float32, device=x.device)
    grid, where, common = _launch(factors, tiles, rows, n, gpu, batch_invariant)
    stage_bytes = factors.a.itemsize * _BLOCK_K * (common["block_m"] + common["block_r"])
    stages = max(3, min(share // _BLOCK_K + 1, _STAGES_BYTES // stage_bytes))
    _shrink_kernel[(*grid, joins * splits)](
        inner, x.contiguous(), factors.a, *where, k, share=share, block_k=_BLOCK_K, num_stages=stages, **common
    )
    return inner


def expand_reference(parts: Tensor, inner: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor:
    """The parts of a product with what each row's adapter adds to it, in place in the first of them.

    parts: [parts, rows, n, out]. inner: of `shrink`.
    """
    each = joined(inner).to(factors.b.dtype).unflatten(2, (-1, factors.rank)).unbind(2)
    outputs = factors.b[tiles.slots].transpose(1, 2).tensor_split(factors.ends[:-1], dim=2)
    parts[0] += torch.cat([torch.bmm(*pair) for pair in zip(each, outputs, strict=True)], dim=2)
    return parts


def expand_by_rows(
    parts: Tensor, inner: Tensor, factors: AdapterFactors, tiles: RowTiles, linear: RowProduct = batch_invariant_linear
) -> Tensor:
    """`expand_reference` on a CPU, as `shrink_by_rows`. Rows without an adapter stay as they are."""
    for slot, rows in _of_adapters(tiles):
        own = inner[0, rows].flatten(0, 1).split(factors.rank, dim=1)
        outputs = factors.b[slot].tensor_split(factors.ends[:-1])
        added = [_over_ranks(*pair, linear) for pair in zip(own, outputs, strict=True)]
        parts[0, rows] += torch.cat(added, dim=1).view(len(rows), -1, parts.shape[3])
    return parts


def _over_ranks(x: Tensor, b: Tensor, linear: RowProduct) -> Tensor:
    """x [tokens, rank] times b [out, rank], a block of ranks after another: what is 0 beyond an adapter's adds 0."""
    blocks = zip(x.split(RANKS, dim=1), b.split(RANKS, dim=1), strict=True)
    first, *others = (linear(own, block.contiguous(), None) for own, block in blocks)
    for other in others:
        first += other
    return first


def expand(
    parts: Tensor,
    inner: Tensor,
    factors: AdapterFactors,
    tiles: RowTiles,
    gpu: GpuTraits,
    batch_invariant: bool = False,
) -> Tensor:
    """`expand_reference` in one launch. batch_invariant: as of `shrink`."""
    parts = parts.contiguous()
    _expand(parts, parts, inner, factors, tiles, None, gpu, batch_invariant)
    return parts


def expand_gated_reference(
    parts: Tensor, inner: Tensor, factors: AdapterFactors, tiles: RowTiles, kind: Gate = "silu"
) -> Tensor:
    """Activated gate times up of a product with what each row's adapter adds to it; it may use the parts up.

    parts: [parts, rows, n, 2 * inner size], gate first. inner: of `shrink`. Returns [rows, n, inner size].
    """
    return gate_mul_reference(joined(expand_reference(parts, inner, factors, tiles)).to(factors.b.dtype), kind)


def expand_gated_by_rows(
    parts: Tensor,
    inner: Tensor,
    factors: AdapterFactors,
    tiles: RowTiles,
    kind: Gate = "silu",
    linear: RowProduct = batch_invariant_linear,
) -> Tensor:
    """`expand_gated_reference` on a CPU, as `shrink_by_rows`; of rows without an adapter what a product without
    adapters gives."""
    whole = joined_in_order(expand_by_rows(parts, inner, factors, tiles, linear))
    functions = batch_invariant_functions(kind, whole.shape[-1], get_num_threads())
    return BatchInvariantCall(partial(gate_mul_reference, kind=kind, functions=functions), 1)(whole)


def expand_gated(
    parts: Tensor, inner: Tensor, factors: AdapterFactors, tiles: RowTiles, kind: Gate = "silu", *, gpu: GpuTraits,
    batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """`expand_gated_reference` in one launch. batch_invariant: as of `shrink`."""
    out = torch.empty((*parts.shape[1:3], parts.shape[3] // 2), dtype=factors.b.dtype, device=parts.device)
    _expand(out, parts.contiguous(), inner, factors, tiles, kind, gpu, batch_invariant)
    return out


def _expand(
    out: Tensor, parts: Tensor, inner: Tensor, factors: AdapterFactors, tiles: RowTiles, kind: Gate | None,
    gpu: GpuTraits, batch_invariant: bool,
) -> None:  # fmt: skip
    parts_of, rows, n, size = parts.shape
    grid, where, common = _launch(factors, tiles, rows, n, gpu, batch_invariant)
    block_n = 128 if common["block_m"] == _FEW else 64
    _expand_kernel[(*grid, -(-out.shape[-1] // block_n))](
        out, parts, inner, factors.b, factors.bounds, *where, size, splits=len(inner), parts_of=parts_of, kind=kind,
        block_n=block_n, **common,
    )  # fmt: skip


def _launch(
    factors: AdapterFactors, tiles: RowTiles, rows: int, n: int, gpu: GpuTraits, batch_invariant: bool
) -> tuple[tuple[int, int], tuple[Tensor | int, ...], dict[str, Any]]:
    """Of both kernels: tiles and blocks of tokens, where rows are, and what is alike. The cores that multiply may add
    up otherwise for blocks of other sizes."""
    block_m = _FEW if batch_invariant else tokens_of_tile(n)
    common: dict[str, Any] = {
        "rank": factors.rank, "joins": len(factors.ends), "block_m": block_m,
        "block_r": max(16, power_of_two(factors.rank)), "overlap": gpu.can_overlap, "num_warps": 4,
        **launch_options(gpu),
    }  # fmt: skip
    grid = len(tiles.slot), -(-min(tiles.per_tile, rows) * n // block_m)
    return grid, (tiles.order, tiles.slot, tiles.start, tiles.count, n, rows * n), common


@jit_for_any("n", "tokens")
def _shrink_kernel(
    inner: Arg, x: Arg, a: Arg, order: Arg, tile_slot: Arg, tile_start: Arg, tile_count: Arg, n: Arg, tokens: Arg,
    k: Arg, share: constexpr, rank: constexpr, joins: constexpr, block_m: constexpr, block_r: constexpr,
    block_k: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One share of k of one tile's tokens, for one of what is joined. Grid (tiles, blocks of tokens, joins * splits).

    inner: [splits, tokens, joins * rank] float32. x: [tokens, k], contiguous.
    """
    tile, at = tl.program_id(0), tl.program_id(2)
    if overlap and tl.program_id(1) == 0:  # of the slot that a tile has or had
        number, column = tl.arange(0, block_r), at // joins * share + tl.arange(0, block_k // 8) * 64
        guessed = tl.load(tile_slot + tile, volatile=True).to(tl.int64) * (joins * rank) + at % joins * rank
        line = guessed + tl.minimum(number, rank - 1)
        ask_for(a + line[:, None] * k + tl.minimum(column, k - 1)[None, :])
    pdl_wait(overlap, early=True)
    slot = tl.load(tile_slot + tile).to(tl.int64)
    begin, count = tl.load(tile_start + tile), tl.load(tile_count + tile) * n
    lane = tl.program_id(1) * block_m + tl.arange(0, block_m)
    if (slot > 0) & (tl.program_id(1) * block_m < count):
        there = lane < count
        row = tl.load(order + begin + lane // n, mask=there, other=0)
        token = row.to(tl.int64) * n + lane % n
        join, split = at % joins, at // joins
        number = tl.arange(0, block_r)
        x_at = x + token[:, None] * k
        a_at = a + (slot * (joins * rank) + join * rank + number)[None, :] * k
        end = tl.minimum((split + 1) * share, k)
        total = tl.zeros([block_m, block_r], tl.float32)
        for i in range(0, share, block_k):
            column = split * share + i + tl.arange(0, block_k)
            valid = column < end
            values = tl.load(x_at + column[None, :], mask=there[:, None] & valid[None, :], other=0.0)
            factor = tl.load(a_at + column[:, None], mask=(number < rank)[None, :] & valid[:, None], other=0.0)
            total = tl.dot(values, factor, total, input_precision="ieee")
        inner_at = inner + (split.to(tl.int64) * tokens + token)[:, None] * (joins * rank)
        tl.store(inner_at + (join * rank + number)[None, :], total, mask=there[:, None] & (number < rank)[None, :])


@jit_for_any("n", "tokens")
def _expand_kernel(
    out: Arg, parts: Arg, inner: Arg, b: Arg, bounds: Arg, order: Arg, tile_slot: Arg, tile_start: Arg,
    tile_count: Arg, n: Arg, tokens: Arg, size: Arg, splits: constexpr, parts_of: constexpr, kind: constexpr,
    rank: constexpr, joins: constexpr, block_m: constexpr, block_n: constexpr, block_r: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """A block of outputs of one tile's tokens. Grid (tiles, blocks of tokens, blocks of outputs).

    parts: [parts_of, tokens, size]. kind: of a gate, where out is [tokens, size / 2]; else None, and out is the first
    part, to which is added.
    """
    pdl_wait(overlap, early=True)
    tile = tl.program_id(0)
    slot = tl.load(tile_slot + tile).to(tl.int64)
    begin, count = tl.load(tile_start + tile), tl.load(tile_count + tile) * n
    lane = tl.program_id(1) * block_m + tl.arange(0, block_m)
    if tl.program_id(1) * block_m < count:
        there = lane < count
        row = tl.load(order + begin + lane // n, mask=there, other=0)
        token = row.to(tl.int64) * n + lane % n
        first = tl.program_id(2) * block_n
        line = first + tl.arange(0, block_n)
        if kind is None:
            if slot > 0:
                at = out + token[:, None] * size + line[None, :]
                mask = there[:, None] & (line < size)[None, :]
                base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                base += _added(
                    inner, b, bounds, slot, token, there, first, tokens, size, splits, rank, joins, block_m, block_n,
                    block_r,
                )  # fmt: skip
                tl.store(at, base.to(out.dtype.element_ty), mask=mask)
        else:
            half = size // 2
            mask = there[:, None] & (line < half)[None, :]
            gate = _whole(parts, token, line, mask, tokens, size, parts_of)
            up = _whole(parts, token, half + line, mask, tokens, size, parts_of)
            if slot > 0:
                gate += _added(
                    inner, b, bounds, slot, token, there, first, tokens, size, splits, rank, joins, block_m, block_n,
                    block_r,
                )  # fmt: skip
                up += _added(
                    inner, b, bounds, slot, token, there, half + first, tokens, size, splits, rank, joins, block_m,
                    block_n, block_r,
                )  # fmt: skip
            value = activated(gate, kind) * up
            tl.store(out + token[:, None] * half + line[None, :], value.to(out.dtype.element_ty), mask=mask)


@jit
def _whole(parts: Arg, token: Arg, line: Arg, mask: Arg, tokens: Arg, size: Arg, parts_of: constexpr) -> Arg:
    """A block of the sum of a product's parts, in float32."""
    at = parts + token[:, None] * size + line[None, :]
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts_of):
        total += tl.load(at + part * tokens.to(tl.int64) * size, mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def _added(
    inner: Arg, b: Arg, bounds: Arg, slot: Arg, token: Arg, there: Arg, first: Arg, tokens: Arg, size: Arg,
    splits: constexpr, rank: constexpr, joins: constexpr, block_m: constexpr, block_n: constexpr, block_r: constexpr,
) -> Arg:  # fmt: skip
    """What the adapter of a slot adds to the outputs from `first` on, [block_m, block_n] float32."""
    number, line = tl.arange(0, block_r), first + tl.arange(0, block_n)
    total = tl.zeros([block_m, block_n], tl.float32)
    for join in tl.static_range(joins):
        low, high = tl.load(bounds + join), tl.load(bounds + join + 1)
        if (first < high) & (first + block_n > low):
            at = inner + token[:, None] * (joins * rank) + (join * rank + number)[None, :]
            mask = there[:, None] & (number < rank)[None, :]
            values = tl.load(at, mask=mask, other=0.0)
            if block_m * block_r <= 1024:  # all loads at once
                for split in tl.static_range(1, splits):
                    values += tl.load(at + split * tokens.to(tl.int64) * (joins * rank), mask=mask, other=0.0)
            else:
                for split in range(1, splits):
                    values += tl.load(at + split * tokens.to(tl.int64) * (joins * rank), mask=mask, other=0.0)
            own = (line >= low) & (line < high)
            b_at = b + (slot * size + line)[None, :] * rank + number[:, None]
            factor = tl.load(b_at, mask=own[None, :] & (number < rank)[:, None], other=0.0)
            total = tl.dot(values.to(factor.dtype), factor, total, input_precision="ieee")
    return total
