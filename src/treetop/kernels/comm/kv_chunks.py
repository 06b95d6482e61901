"""KV chunks between pages and staging slots: what goes to another worker, and what comes from one.

A group's part of a slot is [kv_head][layer][token][plane][head_dim], each head's segment beginning at a multiple of 16
bytes. Its checksum is taken of the bytes that are moved, on their way: the sum of w_i * (2 i + 1) over its 32-bit words
w_i, modulo 2^64. Every factor is odd, so no change of one word goes unseen, and neither do two words that change
places.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.attention.attention import within_page
from treetop.kernels.kv import moved, slots_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

_WORD = torch.int32
_TILE = 2048
"""Words that a program moves."""


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Where a chunk's K/V of a group lie.

    first, count: its tokens.
    page_size: tokens a page.
    offset: byte of the slot at which the first head's segment begins.
    stride: bytes from one head's to the next one's.
    """

    first: int
    count: int
    page_size: int
    offset: int
    stride: int


def checksum(words: Tensor) -> Tensor:
    """Of each segment. words: [..., n] int32. Returns [...] int64, which is modulo 2^64."""
    factors = 2 * torch.arange(words.shape[-1], device=words.device) + 1
    return ((words.to(torch.int64) & 0xFFFFFFFF) * factors).sum(-1)


def pack_reference(slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor) -> None:
    """Copy a chunk's K/V of a group, all its layers, from the pages of a row into a slot; add up its checksums.

    slot: [slot_bytes] uint8. pool: [layers, slots, planes, kv_heads, head_dim]. table: [columns] int32, the row's
    pages. sums: [kv_heads] int64, to which the checksum of each KV head is added.
    """
    taken = moved(pool).index_select(1, _slots(table, span)).permute(3, 0, 1, 2, 4).contiguous()
    segments = _segments(slot, pool, span)
    segments.copy_(taken.view(torch.uint8).view(segments.shape))
    sums += checksum(taken.view(_WORD).flatten(1))


def unpack_reference(slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor) -> None:
    """`pack_reference` the other way: from a slot into the pages of a row, but for the null page.

    The checksums are of what the slot holds.
    """
    layers, _, planes, heads, dim = pool.shape
    taken, pool = _segments(slot, pool, span).contiguous(), moved(pool)
    slots = _slots(table, span)
    slots = torch.where(slots >= span.page_size, slots, 0)
    values = taken.view(pool.dtype).view(heads, layers, span.count, planes, dim)
    pool.index_copy_(1, slots, values.permute(1, 2, 3, 0, 4))
    pool[:, 0].zero_()
    sums += checksum(taken.view(_WORD))


def _slots(table: Tensor, span: ChunkSpan) -> Tensor:
    """Where the chunk's tokens are in the pool, [count] int64."""
    positions = torch.arange(span.first, span.first + span.count, device=table.device)[None]
    row = positions.new_zeros(1)
    return slots_of(table[None], row, positions, torch.ones_like(positions, dtype=torch.bool), span.page_size)[0]


def _segments(slot: Tensor, pool: Tensor, span: ChunkSpan) -> Tensor:
    """The heads' bytes in a slot, [kv_heads, bytes] uint8."""
    layers, _, planes, heads, dim = pool.shape
    size = layers * span.count * planes * dim * pool.element_size()
    assert slot.is_contiguous()
    assert span.offset + (heads - 1) * span.stride + size <= len(slot), "a chunk fits into its slot"
    return slot.as_strided((heads, size), (span.stride, 1), slot.storage_offset() + span.offset)


def pack(slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor, gpu: GpuTraits) -> None:
    """`pack_reference` in one launch."""
    _move(slot, pool, table, span, sums, into_pages=False)


def unpack(slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor, gpu: GpuTraits) -> None:
    """`unpack_reference` in one launch; the null page is not touched."""
    _move(slot, pool, table, span, sums, into_pages=True)


def _move(slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor, into_pages: bool) -> None:
    _segments(slot, pool, span)  # it fits
    layers, _, planes, heads, _ = pool.shape
    words, slot_words = pool.view(_WORD), slot.view(_WORD)
    dim = words.shape[4]
    assert words.stride()[1:] == (planes * heads * dim, heads * dim, dim, 1)
    assert table.stride(0) == sums.stride(0) == 1
    width = lanes(planes * dim)
    tokens = max(_TILE // width, 1)
    _move_kernel[(-(-span.count // tokens), layers, heads)](
        slot_words, words, table, sums, span.first, span.count, span.offset // 4, span.stride // 4, words.stride(0),
        heads, page_size=span.page_size, planes=planes, dim=dim, tokens=tokens, width=width, into_pages=into_pages,
        num_warps=4,
    )  # fmt: skip


@jit
def _move_kernel(
    slot: Arg, pool: Arg, table: Arg, sums: Arg, first: Arg, count: Arg, offset: Arg, stride: Arg, pool_layer: Arg,
    heads: Arg, page_size: constexpr, planes: constexpr, dim: constexpr, tokens: constexpr, width: constexpr,
    into_pages: constexpr,
) -> None:  # fmt: skip
    """A block of tokens of one layer and head, in 32-bit words, one way or the other. Grid (blocks, layers, heads)."""
    layer, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    lane = tl.arange(0, width).to(tl.int64)
    position = first + token
    page = tl.load(table + position // page_size, mask=token < count, other=0).to(tl.int64)
    there = (token < count)[:, None] & (lane < planes * dim)[None, :]
    number = (layer * count + token)[:, None] * (planes * dim) + lane[None, :]
    staged = slot + offset + head * stride + number
    place = (page * page_size + within_page(position, page_size))[:, None] * (planes * heads * dim)
    paged = pool + layer * pool_layer + place + ((lane // dim) * heads * dim + head * dim + lane % dim)[None, :]
    if into_pages:
        word = tl.load(staged, mask=there, other=0)
        tl.store(paged, word, mask=there & (page > 0)[:, None])
    else:
        word = tl.load(paged, mask=there, other=0)
        tl.store(staged, word, mask=there)
    weighed = (word.to(tl.int64) & 0xFFFFFFFF) * (2 * number + 1)
    tl.atomic_add(sums + head, tl.sum(tl.sum(tl.where(there, weighed, 0), 1), 0))
