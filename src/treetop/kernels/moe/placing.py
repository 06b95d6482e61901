"""Which tokens come to an expert: assignments put in order, and cut into tiles.

The products with experts want the tokens of an expert side by side, so the assignments (token, which of its experts)
are put in order by expert, then by token, and cut into tiles of one expert. Launches have room for as many tiles as
there can be, and those in excess end at once.
"""

from treetop.kernels.dependent_launch import pdl_wait
from treetop.kernels.moe.routes import RouterSpec
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl


def tile_rows(tokens: int, spec: RouterSpec, narrow: bool = False) -> int:
    """Assignments of a tile: about what an expert gets, from 16 to 128; or 8 of one token, if `narrow`."""
    if narrow and tokens == 1:
        return 8
    mean = tokens * spec.top_k / spec.num_experts
    return next((rows for maximum, rows in ((8, 16), (24, 32), (64, 64)) if mean <= maximum), 128)


def may_be_narrow(gpu: GpuTraits, batch_invariant: bool) -> bool:
    """Whether tiles may have 8 rows: on Hopper, where it was measured, and where a token need not have the same bits
    in any batch, for products of more rows may be other instructions."""
    return gpu.by_warp_groups and not gpu.has_tensor_memory and not batch_invariant


def most_tiles(tokens: int, rows: int, spec: RouterSpec) -> int:
    """Tiles of so many rows that there can be: each expert has at most one that is not full."""
    assignments = tokens * spec.top_k
    return min(assignments, spec.num_experts) + assignments // rows


@jit
def place_kernel(
    expert_in: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    tokens: Arg, blocks: Arg, maximum: Arg, rows: constexpr, top_k: constexpr, experts: constexpr, block: constexpr,
    block_e: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Puts the assignments of a block of tokens in order; the first block's program writes the tiles.

    Grid (blocks,).
    """
    pdl_wait(overlap, early=True)
    mine = tl.program_id(0)
    expert = tl.arange(0, block_e)
    before = tl.zeros([block_e], tl.int32)
    total = tl.zeros([block_e], tl.int32)
    for first in range(0, blocks, 8):
        other = first + tl.arange(0, 8)[:, None]
        there = (other < blocks) & (expert < experts)[None, :]
        count = tl.load(counts + other * experts + expert[None, :], mask=there, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(other < mine, count, 0), 0)
    token = mine * block + tl.arange(0, block)
    slot = tl.full([block, block_e], -1, tl.int32)
    for i in tl.static_range(top_k):
        chosen = tl.load(expert_in + token * top_k + i, mask=token < tokens, other=-1)
        slot = tl.where(expert[None, :] == chosen[:, None], i, slot)
    write_order(order, slot, token, before, total, top_k)
    if mine == 0:
        write_tiles(tile_expert, tile_start, tile_count, number, expert, total, tokens, maximum, rows)


@jit
def place_by_rank_kernel(
    expert_in: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    assignments: Arg, maximum: Arg, rows: constexpr, experts: constexpr, block_e: constexpr, own: constexpr,
    block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Puts `own` assignments in order: behind all of lower experts, and those of the same one that come before.

    Writes the tiles that begin with one of them. Grid (assignments / own,).
    """
    pdl_wait(overlap, early=True)
    mine = tl.program_id(0) * own + tl.arange(0, own)
    of = tl.load(expert_in + mine, mask=mine < assignments, other=-1)
    rank = tl.zeros([own], tl.int32)
    for first in range(0, tl.minimum((tl.program_id(0) + 1) * own, assignments), block):
        other = first + tl.arange(0, block)
        its = tl.load(expert_in + other, mask=other < assignments, other=-1)
        rank += tl.sum(((its[None, :] == of[:, None]) & (other[None, :] < mine[:, None])).to(tl.int32), 1)
    expert = tl.arange(0, block_e)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    tiles = (count + rows - 1) // rows
    below = expert[None, :] < of[:, None]
    start = tl.sum(tl.where(below, count[None, :], 0), 1)
    tile = tl.sum(tl.where(below, tiles[None, :], 0), 1) + rank // rows
    there = of >= 0
    tl.store(order + start + rank, mine, mask=there)
    begins = there & (rank % rows == 0)
    total = tl.sum(tl.where(expert[None, :] == of[:, None], count[None, :], 0), 1)
    tl.store(tile_expert + tile, of, mask=begins)
    tl.store(tile_start + tile, start + rank, mask=begins)
    tl.store(tile_count + tile, tl.minimum(total - rank, rows), mask=begins)
    if tl.program_id(0) == 0:
        _end_tiles(tile_expert, tile_start, tile_count, number, tl.sum(tiles, 0), maximum)


@jit
def write_order(order: Arg, slot: Arg, token: Arg, before: Arg, total: Arg, top_k: constexpr) -> None:
    """slot: [block, experts], which of a token's experts this is, -1 for none. before: of each expert, in blocks
    before this one; total: in all."""
    chosen = (slot >= 0).to(tl.int32)
    place = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(chosen, 0) - 1
    tl.store(order + place, token[:, None] * top_k + slot, mask=slot >= 0)


@jit
def write_tiles(
    tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, expert: Arg, count: Arg, tokens: Arg, maximum: Arg,
    rows: constexpr,
) -> None:  # fmt: skip
    """count: [experts], assignments of each."""
    start = tl.cumsum(count, 0) - count
    tiles = (count + rows - 1) // rows
    place = tl.cumsum(tiles, 0) - tiles
    for tile in range((tokens + rows - 1) // rows):  # an expert has a token once
        there = tile < tiles
        tl.store(tile_expert + place + tile, expert, mask=there)
        tl.store(tile_start + place + tile, start + tile * rows, mask=there)
        tl.store(tile_count + place + tile, tl.minimum(count - tile * rows, rows), mask=there)
    _end_tiles(tile_expert, tile_start, tile_count, number, tl.sum(tiles, 0), maximum)


@jit
def _end_tiles(tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, total: Arg, maximum: Arg) -> None:
    """How many tiles there are; those that are not there are zeros: they are read, and not used."""
    tl.store(number, total)
    for first in range(0, maximum, 128):
        at = first + tl.arange(0, 128)
        unused = (at >= total) & (at < maximum)
        tl.store(tile_expert + at, 0, mask=unused)
        tl.store(tile_start + at, 0, mask=unused)
        tl.store(tile_count + at, 0, mask=unused)
