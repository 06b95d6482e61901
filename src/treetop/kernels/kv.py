"""Where K/V live and how they get there: the one address function, and the two writes; and what they are in FP8.

A number in FP8 (e4m3) stands for itself times a float32 scale of its layer, plane and K/V head. Tails and pages alike
hold codes, rounded once, where a token's K/V are written: so whoever reads a token, from a tail, a page, or a page of
another worker, sees the same numbers. Source: OCP 8-bit Floating Point Specification 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.types.ids import GroupName
from treetop.types.kv import KVFormat, KVPart

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3; what is larger is stored as it."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts e4m3."""


def kv_dtype(form: KVFormat, engine: torch.dtype) -> torch.dtype:
    """What numbers of a format are stored in; uint8 where they lie in parts."""
    return torch.uint8 if form.parts else FP8 if form.fp8 else engine


@dataclass(frozen=True, slots=True)
class KVParts:
    """How planes are stored whose parts are not alike (`types.kv.KVPart`).

    engine: the dtype that is written and read.
    """

    parts: tuple[KVPart, ...]
    engine: torch.dtype

    def packed(self, kv: Tensor) -> Tensor:
        """K/V [..., head_dim] as they are stored, [..., width] uint8: each number rounded once, to the nearest."""
        pieces = []
        for part, own in zip(self.parts, kv.split([each.numbers for each in self.parts], -1), strict=True):
            dtype = getattr(torch, part.dtype)
            if not part.group:
                pieces.append(own.contiguous().to(dtype).view(torch.uint8))
                continue
            groups = own.to(torch.float32).unflatten(-1, (-1, part.group))
            largest = torch.finfo(dtype).max
            factor = groups.abs().amax(-1) / largest
            factor = torch.where(factor > 0, factor, 1.0)
            codes = (groups / factor[..., None]).clamp(-largest, largest).to(dtype)
            pieces += [codes.flatten(-2).view(torch.uint8), factor.view(torch.uint8)]
        return torch.cat(pieces, -1)

    def unpacked(self, data: Tensor) -> Tensor:
        """What stored K/V [..., width] uint8 stand for, [..., head_dim]."""
        found = []
        for part, own in zip(self.parts, data.split([each.num_bytes for each in self.parts], -1), strict=True):
            dtype = getattr(torch, part.dtype)
            codes = own[..., : part.numbers * dtype.itemsize].contiguous().view(dtype)
            if part.group:
                factor = own[..., codes.shape[-1] * dtype.itemsize :].contiguous().view(torch.float32)
                codes = (codes.to(torch.float32).unflatten(-1, (-1, part.group)) * factor[..., None]).flatten(-2)
            found.append(codes.to(self.engine))
        return torch.cat(found, -1)


def moved(x: Tensor) -> Tensor:
    """The same memory in a dtype that every operation moves: PyTorch's copy FP8 only here and there."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def encoded(kv: Tensor, scales: Tensor | None) -> Tensor:
    """K/V as they are stored: over their scales, in float32, to the nearest, at most +-448; NaN stays NaN.

    kv: [..., planes, kv_heads, head_dim]. scales: [planes, kv_heads] float32; None where numbers are stored as they
    are.
    """
    if scales is None:
        return kv
    wide = torch.promote_types(kv.dtype, torch.float32)
    return (kv.to(wide) / scales.to(wide)[..., None]).clamp(-LARGEST, LARGEST).to(FP8)


def decoded(kv: Tensor, scales: Tensor | None, dtype: torch.dtype, parts: KVParts | None = None) -> Tensor:
    """What stored K/V stand for, rounded to `dtype`. kv, scales: as in `encoded`. parts: of what is stored so."""
    if parts is not None:
        return parts.unpacked(kv)
    if scales is None:
        return kv
    wide = torch.promote_types(dtype, torch.float32)
    return (kv.to(wide) * scales.to(wide)[..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class PageTable:
    """One KV group's table, and the group's name. data: [num_rows, columns] int32."""

    group: GroupName
    data: Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's pages.

    data: [slots, planes, kv_heads, head_dim], of which K is the first plane and V the last.
    value_dim, index_dim: see `types.kv.KVFormat`.
    scales: [planes, kv_heads] float32, of numbers in FP8; None of others.
    parts: how planes lie there that are stored in parts, [slots, planes, kv_heads, width] uint8.
    """

    data: Tensor
    value_dim: int | None = None
    index_dim: int = 0
    scales: Tensor | None = None
    parts: KVParts | None = None

    @property
    def planes(self) -> Tensor:
        """Without what is an indexer's."""
        return self.data[..., : self.data.shape[-1] - self.index_dim] if self.index_dim else self.data

    @property
    def k(self) -> Tensor:
        return self.planes[:, 0]

    @property
    def v(self) -> Tensor:
        return self.data[:, -1, :, : self.value_dim]

    @property
    def index_keys(self) -> Tensor:
        """Of the indexer, [slots, index_dim]."""
        return self.data[:, 0, 0, self.data.shape[-1] - self.index_dim :]


def slots_of(page_table: Tensor, rows: Tensor, positions: Tensor, visible: Tensor, page_size: int) -> Tensor:
    """Slot of each position: `page_table[row, position // p] * p + position % p`, the null slot 0 where not visible.

    page_table: [num_rows, columns] int32, one group's. rows: [rows] int64. positions: [rows, n] or [1, n] int64.
    visible: [rows, n] bool; a lane that is not visible reads column 0, whatever its position. Returns [rows, n] int64.
    """
    return slots_at(page_table, rows, positions // page_size, positions % page_size, visible, page_size)


def slots_at(
    page_table: Tensor, rows: Tensor, column: Tensor, offset: Tensor, visible: Tensor, page_size: int
) -> Tensor:
    """`slots_of` positions that are given as column of the page table and offset in the page, [rows, n] or [1, n]."""
    page = page_table[rows[:, None], torch.where(visible, column, 0)].to(torch.int64)
    return torch.where(visible, page * page_size + offset, 0)


@dataclass(frozen=True, slots=True)
class Ruler:
    """Positions 0, 1, ... and where they lie in their pages. positions, column, offset: [1, n] int64."""

    page_size: int
    positions: Tensor
    column: Tensor
    offset: Tensor


def make_ruler(length: int, page_size: int, device: torch.device) -> Ruler:
    positions = torch.arange(length, device=device)[None]
    return Ruler(page_size, positions, positions // page_size, positions % page_size)


def write_pages(pages: PagedKV, slots: Tensor, kv: Tensor) -> None:
    """Store new K/V at their slots; what goes to the null slot is dropped, so that it stays zero.

    slots: [rows, n] int64. kv: [rows, n, planes, kv_heads, head_dim], as they are stored.
    """
    data = moved(pages.data)
    data.index_copy_(0, slots.reshape(-1), moved(kv).flatten(0, 1))
    data[0].zero_()


def commit_tail(pool: Tensor, tail: Tensor, source: Tensor, slots: Tensor) -> None:
    """Copy chosen tail entries of all layers, all planes at once, into pages.

    pool: [layers, slots, planes, kv_heads, head_dim]. tail: [layers, rows, t, planes, kv_heads, head_dim]. source:
    [rows, n] int64, index into t. slots: [rows, n] int64; entries past the accepted path go to the null slot and are
    dropped. Tail and pool are different memory, so no order of copying can overwrite what is still to be read
    (sgl-15360).
    """
    row = torch.arange(source.shape[0], device=source.device)[:, None]
    flat = (row * tail.shape[2] + source).reshape(-1)
    pool, tail = moved(pool), moved(tail)
    chosen = tail.flatten(1, 2).index_select(1, flat)
    pool.index_copy_(1, slots.reshape(-1), chosen)
    pool[:, 0].zero_()
