"""Weights in bfloat16 of codes and scales, two neighbours at a time, in a kernel's registers.

A number is made by moving its bits: e4m3 and e2m1 to the end of the exponent and the start of the mantissa, where it is
2 ** 120 and 2 ** 126 times too small, subnormal codes too; an integer to the end of the mantissa of 128, from which 128
and its zero are taken. That is exact. One multiplication by the scale then rounds once: in bfloat16 where scales are
bfloat16s; as number * high + number * low, of which only the sum rounds, where they are float16s, for a number has 5
bits at most and the lower part of such a scale 3; elsewhere in float32. So a weight has the bits of
`quantized_weight.decode`, rounded to bfloat16.

Of `scale_forms`, a scale goes from its word to both halves of a register by few instructions, once for all its weights:

    levels  Numbers in e2m1 times scales in e4m3 are bfloat16s without rounding. Their factor goes to the sums, and so
            do the last 2 ** 8 that they are too small by, for 448 * 2 ** 126 is no bfloat16.
    folded  An integer n at the end of a bfloat16's bits is n * 2 ** -133, and 4 bits further up n * 2 ** -129, since
            subnormal numbers are linear. So n * s - 8 * s is one `fma`, 2 ** 8 too small, which sums make up for: of
            s times 2 ** 125 or 2 ** 121, and s times -2 ** -5, which are additions to its exponent.
    halves  n * h + n * l, of which only the sum rounds.

Sources: PTX ISA 8.5; OCP Microscaling Formats (MX) Specification 1.0.
"""

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl


@jit
def moved_number(word: Arg, part: constexpr, numbers: constexpr) -> Arg:
    if numbers == "e4m3":
        n = _moved(word, _MOVE_E4M3_0) if part == 0 else _moved(word, _MOVE_E4M3_1)
    elif numbers == "int4":
        if part == 0:
            n = _moved(word, _MOVE_INT4_0)
        elif part == 1:
            n = _moved(word, _MOVE_INT4_1)
        elif part == 2:
            n = _moved(word, _MOVE_INT4_2)
        else:
            n = _moved(word, _MOVE_INT4_3)
    elif part == 0:
        n = _moved(word, _MOVE_E2M1_0)
    elif part == 1:
        n = _moved(word, _MOVE_E2M1_1)
    elif part == 2:
        n = _moved(word, _MOVE_E2M1_2)
    else:
        n = _moved(word, _MOVE_E2M1_3)
    return n


@jit
def times(
    n: Arg, s: Arg, m: Arg, numbers: constexpr, form: constexpr, scales: constexpr, fast: constexpr, dtype: constexpr
) -> Arg:
    """Numbers [lines, columns], less m if they are integers, times s, rounded once. s, m: [lines, 1] float32."""
    if fast:
        if numbers == "int4":
            n = _two_of(n, tl.broadcast_to(m.to(tl.bfloat16), n.shape), _LESS)
        if form == "bfloat16" or form == "folded" or scales == "e8m0" or scales == "e4m3":
            w = _two_of(n, tl.broadcast_to(s.to(tl.bfloat16), n.shape), _TIMES)
        elif form == "float16":
            high = s.to(tl.bfloat16)
            low = (s - high.to(tl.float32)).to(tl.bfloat16)
            w = _three_of(n, tl.broadcast_to(high, n.shape), tl.broadcast_to(low, n.shape), _TIMES_BOTH)
        else:
            w = _two_wide(n, tl.broadcast_to(s, n.shape), _TIMES_WIDE)
    elif numbers == "int4":
        w = ((n - m) * s).to(dtype)
    else:
        w = (n * s).to(dtype)
    return w


@jit
def ready_times(word: Arg, held: Arg, part: constexpr, step: constexpr, form: constexpr) -> Arg:
    """A part's weights [lines, columns] in bfloat16 of words whose scales lie ready, or are powers of two; held:
    [lines, 1]."""
    scales = tl.broadcast_to(held, word.shape)
    if form == "halves":
        n = moved_number(word, part, "e2m1")
        w = _ready(n, scales, _HALF_0) if step % 2 == 0 else _ready(n, scales, _HALF_1)
    elif form == "levels":
        n = moved_number(word, part, "e2m1")
        if step % 4 == 0:
            w = _ready(n, scales, _LEVEL_0)
        elif step % 4 == 1:
            w = _ready(n, scales, _LEVEL_1)
        elif step % 4 == 2:
            w = _ready(n, scales, _LEVEL_2)
        else:
            w = _ready(n, scales, _LEVEL_3)
    elif form == "bytes":
        n = moved_number(word, part, "e2m1")
        if step % 4 == 0:
            w = _ready(n, scales, _POWER_0)
        elif step % 4 == 1:
            w = _ready(n, scales, _POWER_1)
        elif step % 4 == 2:
            w = _ready(n, scales, _POWER_2)
        else:
            w = _ready(n, scales, _POWER_3)
    elif part == 0:
        w = _ready(word, scales, _FOLDED_0)
    elif part == 1:
        w = _ready(word, scales, _FOLDED_1)
    elif part == 2:
        w = _ready(word, scales, _FOLDED_2)
    else:
        w = _ready(word, scales, _FOLDED_3)
    return w


@jit
def times_256(w: Arg) -> Arg:
    """Weights in bfloat16, without rounding."""
    return _two_of(w, tl.full(w.shape, 256.0, tl.bfloat16), _TIMES)


@jit
def _ready(a: Arg, held: Arg, asm: constexpr) -> Arg:
    """held: int32, whose two registers are the same."""
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, held], dtype=tl.bfloat16, is_pure=True, pack=2)


@jit
def _moved(word: Arg, asm: constexpr) -> Arg:
    return tl.inline_asm_elementwise(asm, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)


@jit
def _two_of(a: Arg, b: Arg, asm: constexpr) -> Arg:
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)


@jit
def _two_wide(a: Arg, b: Arg, asm: constexpr) -> Arg:
    """b: float32, which are two registers of two neighbours."""
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)


@jit
def _three_of(a: Arg, b: Arg, c: Arg, asm: constexpr) -> Arg:
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2)


# Of two neighbours at a time: $0 is what is made, $1 what is given. A conjunction and a disjunction are one `lop3`.

_MOVE_E4M3_0 = constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $1, 8; and.b32 b, a, 0x7f007f00; shr.b32 b, b, 4;"
    " lop3.b32 $0, a, 0x80008000, b, 0xea; }"
)
_MOVE_E4M3_1 = constexpr(
    "{ .reg .b32 b; and.b32 b, $1, 0x7f007f00; shr.b32 b, b, 4; lop3.b32 $0, $1, 0x80008000, b, 0xea; }"
)
_MOVE_INT4_0 = constexpr("{ .reg .b32 b; mov.b32 b, 0x43004300; lop3.b32 $0, $1, 0x000f000f, b, 0xea; }")
_MOVE_INT4_1 = constexpr(
    "{ .reg .b32 a, b; mov.b32 b, 0x43004300; shr.b32 a, $1, 4; lop3.b32 $0, a, 0x000f000f, b, 0xea; }"
)
_MOVE_INT4_2 = constexpr(
    "{ .reg .b32 a, b; mov.b32 b, 0x43004300; shr.b32 a, $1, 8; lop3.b32 $0, a, 0x000f000f, b, 0xea; }"
)
_MOVE_INT4_3 = constexpr(
    "{ .reg .b32 a, b; mov.b32 b, 0x43004300; shr.b32 a, $1, 12; lop3.b32 $0, a, 0x000f000f, b, 0xea; }"
)
_MOVE_E2M1_0 = constexpr("and.b32 $0, $1, 0x81c081c0;")
_MOVE_E2M1_1 = constexpr("{ .reg .b32 a; shl.b32 a, $1, 3; and.b32 $0, a, 0x81c081c0; }")
_MOVE_E2M1_2 = constexpr("{ .reg .b32 a; shl.b32 a, $1, 6; and.b32 $0, a, 0x81c081c0; }")
_MOVE_E2M1_3 = constexpr(
    "{ .reg .b32 a, b; shr.b32 a, $1, 6; and.b32 a, a, 0x01800180; shr.b32 b, $1, 5;"
    " lop3.b32 a, b, 0x00400040, a, 0xea; shl.b32 b, $1, 5; lop3.b32 $0, b, 0x80008000, a, 0xea; }"
)
_LESS = constexpr("{ .reg .b32 a; mov.b32 a, 0xbf80bf80; fma.rn.bf16x2 $0, $2, a, $1; }")
_TIMES = constexpr("{ .reg .b32 a; mov.b32 a, 0x80008000; fma.rn.bf16x2 $0, $1, $2, a; }")
_TIMES_BOTH = constexpr(
    "{ .reg .b32 a; mov.b32 a, 0x80008000; fma.rn.bf16x2 a, $1, $3, a; fma.rn.bf16x2 $0, $1, $2, a; }"
)
_TIMES_WIDE = constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mul.f32 a, a, $2; mul.f32 b, b, $3;"
    " cvt.rn.bf16x2.f32 $0, b, a; }"
)


def _of_folded(part: int) -> constexpr:
    """n * s - 8 * s, 2 ** 8 too small, of integers in one of four parts: of the last two from their upper byte on."""
    moved, upper = "shr.b32 n, $1, 8; and.b32 n, n" if part > 1 else "and.b32 n, $1", part % 2
    mask, power = ("0x00f000f0", "0x3c803c80") if upper else ("0x000f000f", "0x3e803e80")
    return constexpr(
        f"{{ .reg .b32 n, s, c; {moved}, {mask}; prmt.b32 s, $2, $2, 0x3232; xor.b32 c, s, 0x80008000;"
        f" sub.s32 c, c, 0x02800280; add.s32 s, s, {power}; fma.rn.bf16x2 $0, n, s, c; }}"
    )


_FOLDED_0, _FOLDED_1, _FOLDED_2, _FOLDED_3 = map(_of_folded, range(4))


def _of_half(half: str) -> constexpr:
    """n * h + n * l of the lower half of a word, a, or of the upper one, b: a product may take one half of a register
    twice, without an instruction for that."""
    return constexpr(
        "{ .reg .b16 a, b; .reg .b32 h, l, z; lop3.b32 h, $2, 0x3fff3fff, 0x40004000, 0xea;"
        " lop3.b32 l, $2, 0xff80ff80, 0x00400040, 0xea; sub.s32 l, l, 0x04800480; mov.b32 z, 0x80008000;"
        f" mov.b32 {{a, b}}, h; mov.b32 h, {{{half}, {half}}}; mov.b32 {{a, b}}, l; mov.b32 l, {{{half}, {half}}};"
        " fma.rn.bf16x2 l, $1, l, z; fma.rn.bf16x2 $0, $1, h, l; }"
    )


_HALF_0, _HALF_1 = map(_of_half, "ab")


def _of_level(place: int) -> constexpr:
    """Numbers times the scale at one of four places of a word: its halves to the start of each half of a register."""
    return constexpr(
        "{ .reg .b32 a, b, z; shl.b32 a, $2, 4; and.b32 a, a, 0xf0f0f0f0; shr.b32 b, $2, 4;"
        " lop3.b32 b, b, 0x0f0f0f0f, 0x70707070, 0xea;"
        f" prmt.b32 a, a, b, 0x{4 + place}{place}{4 + place}{place}; mov.b32 z, 0x80008000;"
        " fma.rn.bf16x2 $0, $1, a, z; }"
    )


def _of_power(place: int) -> constexpr:
    """The same of powers of two, 127 more in a byte, times 2 ** 126."""
    return constexpr(
        f"{{ .reg .b32 a, z; prmt.b32 a, $2, 0, 0x4{place}4{place}; mad.lo.s32 a, a, 128, 0x3f003f00;"
        " mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, a, z; }"
    )


_LEVEL_0, _LEVEL_1, _LEVEL_2, _LEVEL_3 = map(_of_level, range(4))
_POWER_0, _POWER_1, _POWER_2, _POWER_3 = map(_of_power, range(4))
