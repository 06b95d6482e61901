"""What low-rank adapters add to a product of few rows, added in the product's own launch (`kernels.gemm.adapter_rows`).

    total[token] += B[slot of its row] inner[token]        before a gate, and before anything is rounded

`shrink` comes right before such a product. A program has all rows of its outputs, so it takes the adapters of the batch
side by side as one more block of k, in which a row has zeros where another's ranks are. Rows without an adapter keep
the sums that they had.
Source: L. Chen et al., "Punica: Multi-Tenant LoRA Serving", arXiv:2310.18547.
"""

from dataclasses import dataclass

from torch import Tensor

from treetop.kernels.dependent_launch import ask_for
from treetop.kernels.gemm.adapter_rows import AdapterFactors, RowTiles, shrink
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

MOST_ROWS = 64
"""Of a product: its programs have a block of all of them."""


@dataclass(frozen=True, slots=True)
class AdapterSums:
    """For a product of rows * n tokens.

    inner: [shares, rows, n, joined * rank] float32, of `shrink`.
    """

    inner: Tensor
    factors: AdapterFactors
    tiles: RowTiles


def sums_of(x: Tensor, factors: AdapterFactors, tiles: RowTiles, gpu: GpuTraits) -> AdapterSums:
    """For a product with x [rows, n, in]."""
    return AdapterSums(shrink(x, factors, tiles, gpu), factors, tiles)


def arguments(sums: AdapterSums | None, absent: Tensor) -> tuple[tuple[Tensor | int, ...], dict[str, int]]:
    """What a product's kernel takes of them, named as in `add_sums`; without any `shares` is 0, and absent there for
    all tensors."""
    if sums is None:
        return (absent, absent, absent, absent, absent, 1, 0), dict.fromkeys(("shares", "rank", "ranks", "joins"), 0)
    factors, tiles = sums.factors, sums.tiles
    sizes = {"shares": len(sums.inner), "rank": factors.rank, "joins": len(factors.ends)}
    sizes["ranks"] = max(16, power_of_two(factors.rank))
    most = min(len(tiles.slots), len(factors.b) - 1)
    return (sums.inner, factors.b, factors.bounds, tiles.slots, tiles.present, sums.inner.shape[2], most), sizes


@jit
def ask_for_sums(line: Arg, size: Arg, b: Arg, present: Arg, most: Arg, rank: constexpr) -> None:
    """Bring what `add_sums` reads of the first adapters' B into the L2 cache. line: less than `size`."""
    lane = tl.arange(0, 8)
    slot = tl.load(present + lane, mask=lane < most, other=0).to(tl.int64)
    ask_for(b + (slot[None, :] * size + line[:, None]) * rank)


@jit
def add_sums(
    total: Arg, line: Arg, size: Arg, row: Arg, rows: Arg, inner: Arg, b: Arg, bounds: Arg, slots: Arg, present: Arg,
    per_row: Arg, most: Arg, shares: constexpr, rank: constexpr, ranks: constexpr, joins: constexpr,
    rows_left: constexpr,
) -> Arg:  # fmt: skip
    """total with what adapters add: [lines, rows], or [rows, lines] if `rows_left`, float32.

    line: outputs, of `size`. row: tokens, of `rows`, each row of a batch has per_row. present: the slots of the batch's
    adapters, then 0, up to `most`.
    """
    own = tl.load(slots + row // per_row, mask=row < rows, other=0).to(tl.int32)
    changed = total
    if tl.max(own, 0) > 0:
        piece: constexpr = min(ranks, 1024 // row.shape[0])
        together: constexpr = max(1, min(64, 2048 // row.shape[0]) // piece)
        lane = tl.arange(0, together)
        column = tl.arange(0, together * piece)
        adapted = (own > 0)[:, None]
        for join in tl.static_range(joins):
            low, high = tl.load(bounds + join), tl.load(bounds + join + 1)
            inside = (line >= low) & (line < high)
            if tl.max(inside.to(tl.int32), 0) > 0:
                for begin in tl.range(0, rank, piece, num_stages=1):
                    number = begin + tl.arange(0, piece)
                    mask = adapted & (number < rank)[None, :]
                    at = inner + (row * (joins * rank))[:, None] + (join * rank + number)[None, :]
                    values = tl.load(at, mask=mask, other=0.0)
                    for share in tl.static_range(1, shares):
                        values += tl.load(at + share * rows * (joins * rank), mask=mask, other=0.0)
                    ordinal = begin + column % piece
                    for first in tl.range(0, most, together, num_stages=1):
                        slot = tl.load(present + first + lane, mask=first + lane < most, other=0)
                        if tl.max(slot, 0) > 0:
                            place = first + column // piece
                            of_b = tl.load(present + place, mask=place < most, other=0)
                            there = ((of_b > 0) & (ordinal < rank))[None, :] & inside[:, None]
                            b_at = b + of_b.to(tl.int64)[None, :] * size * rank + line[:, None] * rank
                            factor = tl.load(b_at + ordinal[None, :], mask=there, other=0.0)
                            mine = (own[:, None] == slot[None, :]) & (slot > 0)[None, :]
                            wide = tl.where(mine[:, :, None], values[:, None, :], 0.0)
                            wide = tl.reshape(wide, [wide.shape[0], together * piece]).to(factor.dtype)
                            if rows_left:
                                changed = tl.dot(wide, tl.trans(factor), changed, input_precision="ieee")
                            else:
                                changed = tl.dot(factor, tl.trans(wide), changed, input_precision="ieee")
    return tl.where((own > 0)[:, None] if rows_left else (own > 0)[None, :], changed, total)
