"""`tiles.tile_product` with the next block decoded while tensor cores multiply the one before.

A block's weights are carried from one turn of the loop to the next: they are decoded after the products of the block
before have begun, which run on by themselves. Without that both take turns. The sums are those of `tile_product`, in
the same order, so bits are the same.
"""

from treetop.kernels.gemm.tiles import _line_scale, _part, _scale_blocks
from treetop.kernels.triton_guard import Arg, constexpr, jit, tl


@jit
def tile_product_ahead(
    x_at: Arg, x_there: Arg, words: Arg, scale: Arg, factor: Arg, zero: Arg, tile: Arg, inside: Arg, first: Arg,
    last: Arg, k: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr,
    per: constexpr, fast: constexpr, block_m: constexpr, block_n: constexpr, dtype: constexpr, stages: constexpr,
) -> Arg:  # fmt: skip
    """Arguments and result as of `tile_product`. stages: of the loop."""
    whole: constexpr = 64 if numbers == "e4m3" else 32
    width: constexpr = whole if group == 0 or group >= whole else group
    blocks = (k + 127) // 128
    lane = tl.arange(0, width)[None, :]
    tile = tile.to(tl.int64)
    f = tl.load(factor + tile * 64 + inside) if scales == "times" or scales == "over" else inside.to(tl.float32)
    total = tl.zeros([block_n, block_m], tl.float32)
    s, m = f, f
    if group == 0:
        s, m = _line_scale(scale, zero, f, tile * 64 + inside, 0, numbers, scales, form, has_zero, fast)
    block = tl.minimum(first, blocks - 1)
    decoded = _block(
        words, scale, zero, f, s, m, tile, inside, block, blocks, k, numbers, scales, form, group, has_zero, per, fast,
        dtype,
    )  # fmt: skip
    for block in tl.range(first, last, num_stages=stages):
        for piece in tl.static_range(0, 128 // width):
            column = block * 128 + piece * width + lane
            values = tl.load(x_at + column, mask=x_there[:, None] & (column < k), other=0.0)
            total = tl.dot(decoded[piece], tl.trans(values), total, input_precision="ieee")
        ahead = tl.minimum(block + 1, blocks - 1)
        decoded = _block(
            words, scale, zero, f, s, m, tile, inside, ahead, blocks, k, numbers, scales, form, group, has_zero, per,
            fast, dtype,
        )  # fmt: skip
    if scales == "e4m3":
        of_sums = tl.load(factor + tile * 64 + inside)
        total *= (of_sums * 256.0 if fast else of_sums)[:, None]
    return total


@jit
def _block(
    words: Arg, scale: Arg, zero: Arg, f: Arg, s: Arg, m: Arg, tile: Arg, inside: Arg, block: Arg, blocks: Arg, k: Arg,
    numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr, per: constexpr,
    fast: constexpr, dtype: constexpr,
) -> Arg:  # fmt: skip
    """The weights of a block in pieces of one group each, in the order of their columns."""
    whole: constexpr = 64 if numbers == "e4m3" else 32
    width: constexpr = whole if group == 0 or group >= whole else group
    here = (tile * blocks + block) * 64 + inside
    if group > 0 and group % 128 == 0:
        of = (tile * _scale_blocks(k, group) + block // (group // 128)) * 64 + inside
        s, m = _line_scale(scale, zero, f, of, 0, numbers, scales, form, has_zero, fast)
    word_at = words + here[:, None] * whole + tl.arange(0, width)[None, :]
    word = tl.load(word_at, eviction_policy="evict_first")
    late = word
    if width < whole:
        late = tl.load(word_at + width, eviction_policy="evict_first")
    of_block = (tile * blocks + block) * (per * 64) + inside
    found = ()
    for piece in tl.static_range(0, 128 // width):
        w = _part(
            word if piece * width % whole == 0 else late, piece * width // whole, piece * width, s, m, scale, zero,
            f, of_block, numbers, scales, form, group, has_zero, fast, dtype,
        )  # fmt: skip
        found = found + (w,)  # type: ignore[assignment]  # noqa: RUF005  # Triton knows no stars
    return found
