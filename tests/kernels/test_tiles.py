"""Weights in tiles: what a kernel makes of them has the bits of the reference, in the interpreter and by its assembly.

Tests of the kernels run on a GPU or in the interpreted session. The assembly that makes two weights at a time does not
run in the interpreter: its instructions are followed here one by one.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, on_gpu_or_interpreted
from support.operation_cases import coded_weight
from treetop.kernels.gemm import decoding
from treetop.kernels.gemm.quantized_gemm import (
    QuantizedLaunch,
    choose_quantized,
    quantized_gated,
    quantized_gated_reference,
    quantized_gemm,
    quantized_gemm_reference,
)
from treetop.kernels.gemm.quantized_weight import E2M1, QuantizedWeight, QuantScheme, decode, factor_apart, scales_of
from treetop.kernels.gemm.scale_forms import halves, of_halves, without_zero_scales
from treetop.kernels.gemm.tiles import decode_tiles, in_turn, tile, untile, why_not_tiled
from treetop.kernels.moe.experts import Activation, Experts
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.weights import packed
from treetop.weights.packed import TiledExperts, TiledGated, TiledLinear, one_below_the_other

CODINGS = [
    QuantScheme("e4m3", 0),
    QuantScheme("e4m3", 128),
    QuantScheme("e4m3", 32),
    QuantScheme("int4", 0),
    QuantScheme("int4", 16),
    QuantScheme("int4", 32),
    QuantScheme("int4", 64, zeros=True),
    QuantScheme("int4", 128, zeros=True),
    QuantScheme("int4", 256),
    QuantScheme("e2m1", 16, "times"),
    QuantScheme("e2m1", 16, "over"),
    QuantScheme("e2m1", 32, "e8m0"),
]
SCALES = [torch.bfloat16, torch.float16, torch.float32]
TWO_LEVELS = [QuantScheme("e2m1", 16, "times"), QuantScheme("e2m1", 16, "over")]


def made(lines, k, scheme, kind=torch.float32, experts=()):
    """A random weight whose scales are numbers of a kind."""
    weight = coded_weight(torch.Size((*experts, lines)).numel(), k, scheme)
    scale = weight.scale.to(kind).float() if weight.scale.dtype == torch.float32 else weight.scale
    shaped = {"scale": scale, "codes": weight.codes, "factor": weight.factor, "zero": weight.zero}
    return replace(weight, **{n: p if p is None else p.view(*experts, lines, -1) for n, p in shaped.items()})


def equal(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in ("codes", "scale", "factor", "zero")]
    return one.columns == other.columns and all((a is None) == (b is None) for a, b in pairs) and all(
        torch.equal(a, b) for a, b in pairs if a is not None
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("scheme", CODINGS, ids=str)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("lines", "k"), [(64, 128), (37, 78), (130, 500)])
def test_a_weight_comes_back_from_its_tiles(scheme, kind, lines, k):
    """Whatever fills its tiles up; scales in the narrowest form that holds them all."""
    weight = made(lines, k, scheme, kind)
    found = tile(weight)
    assert equal(untile(found), weight)
    if scheme.scales == "float32":
        folds = scheme.numbers == "int4" and not scheme.zeros and kind == torch.bfloat16
        assert found.form == "folded" if folds else found.form == str(kind).removeprefix("torch.")
    assert found.words.shape[1] == -(-lines // 64)
    assert found.nbytes >= weight.nbytes - weight.scale.nbytes // 2
    experts = made(lines, k, scheme, kind, (3,))
    assert equal(untile(tile(experts)), experts)
    both = in_turn(made(lines, k, scheme, kind, (3, 2)))
    assert both.shape == (3, 2 * lines, k)
    assert equal(untile(tile(both)), both)


def test_a_scale_that_is_too_large_is_noted():
    weight = made(64, 128, QuantScheme("e4m3", 128))
    assert not tile(weight).wide
    assert tile(replace(weight, scale=torch.full_like(weight.scale, 64.0))).wide
    weight = made(64, 128, QuantScheme("e2m1", 32, "e8m0"))
    weight.scale[3, 1] = 129
    assert tile(weight).wide
    weight = made(64, 128, QuantScheme("e2m1", 16, "over"))
    assert tile(weight).wide
    assert not tile(replace(weight, factor=torch.full_like(weight.factor, 1e3))).wide


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme("e4m3", 48),
        QuantScheme("int4", 7, zeros=True),
        QuantScheme("e2m1", 64, "e8m0"),
        QuantScheme("e4m3", 16),
    ],
)
def test_groups_that_do_not_divide_a_tile_are_told(scheme):
    assert why_not_tiled(scheme) is not None
    assert all(why_not_tiled(each) is None for each in CODINGS)


SIZES = [(64, 128), (4096, 4096), (100, 77), (1024, 14336), (28672, 4096), (4096, 14336), (6144, 4096)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("numbers", ["e4m3", "int4", "e2m1"])
def test_splits_are_the_same_for_any_number_of_rows(shape, numbers):
    """Those that were measured for some numbers of rows are the others' too."""
    for gated, gpu in product((False, True), (GpuTraits(132, True), GpuTraits(108, False))):
        counts = (1, 16, 17, 32, 33, 64, 65, 256)
        found = {choose_quantized(numbers, shape, gated, rows, gpu).splits for rows in counts}
        assert len(found) == 1
        assert not gated or found == {1}


# ------------------------------------------------------------------------------------------------------- the assembly


def bf16(bits):
    """Two bfloat16s of each 32 bits, [..., 2] float64, the lower first."""
    halves = torch.stack([bits & 0xFFFF, bits >> 16], -1).to(torch.int32)
    return torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16).view(torch.bfloat16).double()


def rounded(numbers):
    """The bits again of [..., 2] float64, rounded once: sums of exact products have 53 bits and more than enough."""
    numbers = torch.where(numbers.abs() < 2.0**-134, 0.0 * numbers, numbers)  # half of the least number
    wide = numbers.float()
    assert torch.equal(wide.double(), numbers), "rounded twice"
    low, high = (wide.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF).unbind(-1)
    return low | high << 16


def f32(bits):
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


MASK = 0xFFFFFFFF
STEPS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: (a << b) & MASK,
    "shr.b32": lambda a, b: a >> b,
    "add.s32": lambda a, b: (a + b) & MASK,
    "sub.s32": lambda a, b: (a - b) & MASK,
    "mad.lo.s32": lambda a, b, c: (a * b + c) & MASK,
    "prmt.b32": lambda a, b, places: sum(
        (((a, b)[place >> 2 & 1] >> (place & 3) * 8) & 0xFF) << each * 8
        for each, place in enumerate(places >> 4 * i & 7 for i in range(4))
    ),
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[table],
    "fma.rn.bf16x2": lambda a, b, c: rounded(bf16(a) * bf16(b) + bf16(c)),
    "mul.f32": lambda a, b: (f32(a) * f32(b)).view(torch.int32).to(torch.int64) & MASK,
    "cvt.rn.bf16x2.f32": lambda a, b: (
        f32(b).to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
        | (f32(a).to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF) << 16
    ),
}


def follow(asm, *given):
    """What a line of assembly makes of registers [...] int64 of 32 bits."""
    registers = {f"${i + 1}": each for i, each in enumerate(given)}
    for step in getattr(asm, "value", asm).strip("{ }").split(";"):
        name, _, rest = step.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if taken := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest):  # both halves of a register
            low, high, whole = taken.groups()
            registers |= {low: registers[whole] & 0xFFFF, high: registers[whole] >> 16}
            continue
        if joined := re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest):
            to, low, high = joined.groups()
            registers[to] = registers[low] | registers[high] << 16
            continue
        to, *sources = [each.strip() for each in rest.split(",")]
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        if name not in ("shl.b32", "shr.b32", "lop3.b32", "prmt.b32"):
            values = [torch.tensor(v) if isinstance(v, int) else v for v in values]
        registers[to] = STEPS[name](*values)
    return registers["$0"]


def pairs(words):
    """Neighbouring words [..., 2 * n] int16 as registers [..., n] int64."""
    low, high = (words.to(torch.int64) & 0xFFFF).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 16


def twice(numbers):
    """Numbers in bfloat16, each as both halves of a register."""
    bits = numbers.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
    return bits | bits << 16


FOLDED = {"e4m3": 2.0**120, "e2m1": 2.0**126, "int4": 1.0}
OF_SUMS = 2.0**8
"""What is left to the sums, where a factor goes to them."""


def assembled(weight, scale, zero):
    """Weights [lines, columns] bfloat16 by the assembly, of a block whose lines have one scale and zero each."""
    numbers, words = weight.scheme.numbers, pairs(weight.words[0, 0, 0])
    apart = weight.scheme.scales == "e4m3"
    made, folded = [], scale.float() * (FOLDED[numbers] / (OF_SUMS if apart else 1))
    for part in range(2 if numbers == "e4m3" else 4):
        n = follow(getattr(decoding, f"_MOVE_{numbers.upper()}_{part}"), words)
        if numbers == "int4":
            n = follow(decoding._LESS, n, twice(zero.float() + 128))
        if weight.form == "bfloat16" or apart:
            n = follow(decoding._TIMES, n, twice(folded))
        elif weight.form == "float16":
            high = folded.to(torch.bfloat16)
            n = follow(decoding._TIMES_BOTH, n, twice(high), twice(folded - high.float()))
        else:
            bits = folded.view(torch.int32).to(torch.int64) & MASK
            n = follow(decoding._TIMES_WIDE, n, bits, bits)
        made.append(bf16(n).flatten(-2))
    return torch.cat(made, -1).to(torch.bfloat16)


def ready(weight):
    """Weights [lines, columns] float64 by the assembly that takes scales as they lie in their words, of a block."""
    words, group, made = pairs(weight.words[0, 0, 0]), weight.scheme.group or 128, []
    held = weight.scale[0, 0].to(torch.int64) & MASK  # [of columns, lines]
    wide = min(group, 32)
    for part, first in product(range(4), range(0, 32, wide)):
        step, own = (32 * part + first) // group, words[:, first // 2 : (first + wide) // 2]
        per = {"folded": 1, "halves": 2}.get(weight.form, 4)
        scale = held[step // per][:, None].expand_as(own)
        if weight.form == "folded":
            n = follow(getattr(decoding, f"_FOLDED_{part}"), own, scale, scale)
        else:
            n = follow(getattr(decoding, f"_MOVE_E2M1_{part}"), own)
            asm = {"halves": "_HALF", "levels": "_LEVEL", "bytes": "_POWER"}[weight.form]
            n = follow(getattr(decoding, f"{asm}_{step % per}"), n, scale, scale)
        made.append(bf16(n).flatten(-2))
    return torch.cat(made, -1) * (OF_SUMS if weight.form in ("folded", "levels") else 1)


@pytest.mark.parametrize("group", [0, 16, 32, 64, 128])
def test_the_assembly_of_folded_scales_makes_the_bits_of_the_reference(group):
    """Every code with scales of all sizes that can be folded, of both signs; of those that cannot, the form tells."""
    scheme = QuantScheme("int4", group)
    exponents = torch.randint(-99, 3, (64, scheme.groups_of(128)))
    scale = torch.ldexp(1 + torch.randint(0, 128, exponents.shape) / 128, exponents)
    scale = scale * torch.where(torch.rand(exponents.shape) < 0.5, -1.0, 1.0)
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    codes[:4] = torch.arange(256, dtype=torch.uint8).view(4, 64)
    weight = QuantizedWeight(scheme, 128, codes, scale)
    small = tile(weight)
    assert (small.form, small.wide) == ("folded", False)
    if group in (0, 128):  # as kernels of many rows have it: one word for a whole block
        assert torch.equal(ready(small), decode(weight).to(torch.bfloat16).double())
    assert equal(untile(small), weight)
    for beyond in (0.0, 8.0, 2.0**-100, 1 + 2.0**-8):
        assert tile(replace(weight, scale=scale * 0 + beyond)).form != "folded"


def test_the_assembly_of_halves_makes_the_bits_of_the_reference():
    """All pairs of numbers and scales of two levels, with factors of every size; of ranges' ends, too."""
    every = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(16, 1)
    factor = torch.ldexp(torch.rand(64, 1) + 1, torch.randint(-100, -8, (64, 1)))
    for code in range(0x7F):
        for scheme, own in zip(TWO_LEVELS, (factor, 1 / factor), strict=True):
            weight = QuantizedWeight(scheme, 128, every, torch.full((64, 8), code, dtype=torch.uint8), own)
            small = tile(weight, torch.bfloat16)
            assert small.form == "halves"
            assert torch.equal(ready(small), decode(weight).to(torch.bfloat16).double())
            assert torch.equal(decode(untile(small)).to(torch.bfloat16), decode(weight).to(torch.bfloat16))


def test_halves_say_of_every_scale_what_its_weights_are():
    """Of all numbers in a binade of float32, one in five, and the least and the largest."""
    mantissas = torch.arange(1 << 23, 1 << 24, 5).float() / (1 << 23)
    for exponent in (-116, -60, 0, 1):
        scale = torch.ldexp(mantissas, torch.tensor(exponent))[: len(mantissas) - 100000 * (exponent == 1)]
        one = torch.full((len(scale), 1), 0x38, dtype=torch.uint8)
        found = halves(QuantizedWeight(TWO_LEVELS[0], 16, one, one, scale[:, None]))
        assert found is not None
        back = of_halves(found)[:, 0]
        for number in E2M1:
            assert torch.equal((number * back).to(torch.bfloat16), (number * scale).to(torch.bfloat16)), number


@pytest.mark.parametrize("scheme", TWO_LEVELS, ids=str)
def test_scales_of_two_levels_that_halves_cannot_say_stay_as_they_are(scheme):
    """Negative ones, ones that are too large or small, and all where products are in other dtypes."""
    weight = made(70, 200, scheme)
    assert tile(weight, torch.float16).form == tile(weight).form == "bytes"
    of = 1.0 if scheme.scales == "times" else -1.0
    low = replace(weight, factor=torch.full_like(weight.factor, 1e-3**of))
    assert tile(low, torch.bfloat16).form == "halves"
    for beyond in (replace(low, scale=low.scale | 0x80), *(replace(low, factor=low.factor * 1e30**s) for s in (1, -1))):
        found = tile(beyond, torch.bfloat16)
        assert found.form == "bytes"
        assert equal(untile(found), beyond)
    low.scale[3, 2] = 0  # weights of zero, whatever their numbers are
    both = untile(tile(low, torch.bfloat16))
    assert torch.equal(decode(both).to(torch.bfloat16), decode(low).to(torch.bfloat16))
    assert not bool(scales_of(both).eq(0).any())


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("numbers", ["e4m3", "int4", "e2m1"])
def test_the_assembly_makes_the_bits_of_the_reference(numbers, kind):
    """Every code with scales of all kinds, small and large, negative too, and zeros 0 to 16."""
    scheme = QuantScheme(numbers, 128, zeros=numbers == "int4")
    scales = torch.randn(64, 1) * 10.0 ** torch.randint(-4, 2, (64, 1))
    scales = scales.clamp(-60, 60) if numbers != "e2m1" else scales.clamp(-0.5, 0.5)
    codes = torch.randint(0, 256, (64, scheme.bytes_of(128)), dtype=torch.uint8)
    every = torch.arange(256, dtype=torch.uint8).view(-1, scheme.bytes_of(128))
    codes[: len(every)] = every
    codes &= 0xFE if numbers == "e4m3" else 0xFF
    zero = (torch.arange(64) % 17).to(torch.uint8)[:, None] if scheme.zeros else None
    weight = QuantizedWeight(scheme, 128, codes, scales.to(kind).float(), zero=zero)
    small = tile(weight)
    assert small.form == str(kind).removeprefix("torch.")
    assert not small.wide
    got = assembled(small, weight.scale, None if zero is None else zero)
    assert torch.equal(got, decode(weight).to(torch.bfloat16))


def test_the_assembly_of_mxfp4_reaches_the_least_and_the_largest_scales():
    for scale in (0, 1, 2, 100, 127, 128):
        codes = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(16, 1)
        weight = QuantizedWeight(
            QuantScheme("e2m1", 32, "e8m0"), 128, codes, torch.full((64, 4), scale, dtype=torch.uint8)
        )  # fmt: skip
        small = tile(weight)
        assert torch.equal(ready(small), decode(weight).to(torch.bfloat16).double())


def test_the_assembly_multiplies_numbers_in_e2m1_and_scales_in_e4m3_without_rounding():
    """All pairs of them, negative scales too: the bits of the reference but for 2 ** 8, which the sums make up for."""
    every = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(16, 1)
    for code in [code for code in range(256) if code & 0x7F != 0x7F]:  # no NaN
        scale = torch.full((64, 8), code, dtype=torch.uint8)
        weight = factor_apart(QuantizedWeight(TWO_LEVELS[0], 128, every, scale, torch.ones(64, 1)))
        small = tile(weight)
        assert not small.wide
        level = scale[:, :1].view(torch.float8_e4m3fn).float()
        assert float(level.abs().max()) * (FOLDED["e2m1"] / OF_SUMS) < torch.finfo(torch.bfloat16).max
        assert small.form == ("levels" if code < 0x80 else "bytes")
        got = ready(small) if code < 0x80 else assembled(small, level, None).double() * OF_SUMS
        assert torch.equal(got, decode(weight).double())


@pytest.mark.parametrize("scheme", TWO_LEVELS, ids=str)
def test_a_factor_that_goes_to_the_sums_leaves_weights_that_16_bits_hold(scheme):
    """And makes them what they were; without one, and of lines that are padding, nothing changes."""
    weight = made(70, 256, scheme)
    weight.factor[3] = 0.0
    weight.codes[3] = 0
    left = factor_apart(weight)
    numbers = decode(left)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(numbers.to(dtype).float(), numbers)
    torch.testing.assert_close(numbers * left.factor, decode(weight), rtol=2**-22, atol=0)
    assert equal(untile(tile(left)), without_zero_scales(left))
    plain = made(70, 256, QuantScheme("int4", 128))
    assert factor_apart(plain) is plain


def test_following_can_fail():
    """Other shifts give other numbers."""
    weight = made(64, 128, QuantScheme("int4", 128))
    small = tile(weight)
    wrong = re.sub("0x000f000f", "0x00070007", decoding._MOVE_INT4_1.value)
    right = follow(decoding._MOVE_INT4_1, pairs(small.words[0, 0, 0]))
    assert not torch.equal(follow(wrong, pairs(small.words[0, 0, 0])), right)


# -------------------------------------------------------------------------------------------------------- the kernels


DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]


def picking(rows, k, start, dtype):
    """Rows that each have a single 1: products are weights, whatever the order of sums."""
    x = torch.zeros(rows, k, device=DEVICE, dtype=dtype)
    columns = torch.arange(start, min(start + rows, k))
    x[columns - start, columns] = 1
    return x


def picked(weight, dtype, splits):
    """All weights, by products of 64 rows."""
    k = weight.shape[1]
    launch, found = QuantizedLaunch(64, splits, 2, 4), []
    for start in range(0, k, 64):
        got = quantized_gemm(picking(64, k, start, dtype), weight, launch=launch, gpu=gpu_traits(DEVICE))
        found.append(got.float().sum(0)[: min(64, k - start)])
    return torch.cat(found).T


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", few_of(CODINGS, *range(0, 6, 2)), ids=str)
@pytest.mark.parametrize("kind", [SCALES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in SCALES[1:])])
def test_each_weight_has_the_bits_of_the_reference(scheme, kind):
    """Lines, columns and groups that fill no tile; as a product has them, and decoded into memory."""
    if scheme.scales != "float32" and kind != torch.float32:
        pytest.skip("its scales are of one kind")
    for lines, k, splits in ((64, 256, 2), (70, 134, 1)):
        weight = tile(made(lines, k, scheme, kind))
        for dtype in DTYPES if kind == torch.float32 else DTYPES[:1]:
            want = decode(untile(weight)).to(dtype)
            assert torch.equal(picked(weight, dtype, splits), want.float())
            assert torch.equal(decode_tiles(weight, 0, lines, dtype, gpu_traits(DEVICE)), want)
            assert torch.equal(decode_tiles(weight, 64, lines, dtype, gpu_traits(DEVICE)), want[64:]) or lines == 64
        parted = decode_tiles(weight, 0, lines, dtype, gpu_traits(DEVICE), parted=True)
        assert torch.equal(parted, torch.cat([want[::2], want[1::2]]))


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", TWO_LEVELS, ids=str)
def test_weights_of_halves_have_the_bits_of_the_reference_in_bfloat16(scheme):
    """As a product has them, and decoded into memory, by both ways to decode: the other one rounds here."""
    for lines, k, splits in ((64, 256, 2), (70, 134, 1)):
        by_rows = made(lines, k, scheme)
        by_rows = replace(by_rows, factor=by_rows.factor * (1e-3 if scheme.scales == "times" else 1e3))
        by_rows.scale[1, 1] = 0
        weight = tile(by_rows, torch.bfloat16)
        assert weight.form == "halves"
        want = decode(by_rows).to(torch.bfloat16)
        assert torch.equal(picked(weight, DTYPES[0], splits).to(torch.bfloat16), want)
        whole = decode_tiles(weight, 0, lines, DTYPES[0], gpu_traits(DEVICE))
        assert torch.equal(whole.to(torch.bfloat16), want)


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", TWO_LEVELS, ids=str)
def test_weights_without_their_factor_are_exact_and_sums_get_it(scheme):
    """Each by itself, whatever the dtype and the splits; what is decoded into memory has none."""
    for lines, k, splits in ((64, 256, 2), (70, 134, 1)):
        by_rows = factor_apart(made(lines, k, scheme))
        weight = tile(by_rows)
        for dtype in DTYPES:
            want = decode(by_rows) * by_rows.factor
            assert torch.equal(picked(weight, dtype, splits), want if splits > 1 else want.to(dtype).float())
            assert torch.equal(decode_tiles(weight, 0, lines, dtype, gpu_traits(DEVICE)).float(), decode(by_rows))


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", TWO_LEVELS, ids=str)
def test_products_whose_sums_get_a_factor_equal_the_reference(scheme):
    """With a bias, which gets none; of a gate, whose gates and ups have their own; of lines that fill no tile."""
    x, bias = torch.randn(19, 256, device=DEVICE, dtype=DTYPES[0]), torch.randn(72, device=DEVICE, dtype=DTYPES[0])
    weight, both = tile(factor_apart(made(72, 256, scheme))), made(36, 256, scheme, experts=(2,))
    x, gpu, most = x / float(decode(both).std() * 16), gpu_traits(DEVICE), 1e-2 if ON_GPU else 1e-5
    for launch in (QuantizedLaunch(64, 1, 2, 4), QuantizedLaunch(128, 2, 2, 4)):
        got = quantized_gemm(x, weight, bias, launch=launch, gpu=gpu).float().sum(0)
        want = quantized_gemm_reference(x, weight, bias)[0]
        assert float((got - want).norm() / want.norm()) < most
    gated = tile(factor_apart(in_turn(both)))
    got = quantized_gated(x, gated, "silu", bias, launch=QuantizedLaunch(64, 1, 2, 4), gpu=gpu).float()
    want = quantized_gated_reference(x, tile(in_turn(both)), "silu", bias).float()
    assert float((got - want).norm() / want.norm()) < most


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", [CODINGS[1], CODINGS[7], CODINGS[9]], ids=str)
def test_products_equal_the_reference(scheme):
    x, bias = torch.randn(19, 256, device=DEVICE, dtype=DTYPES[0]), torch.randn(72, device=DEVICE, dtype=DTYPES[0])
    weight = tile(made(72, 256, scheme))
    for launch in (QuantizedLaunch(64, 1, 2, 4), QuantizedLaunch(128, 2, 2, 4)):
        got = quantized_gemm(x, weight, bias, launch=launch, gpu=gpu_traits(DEVICE)).float().sum(0)
        want = quantized_gemm_reference(x, weight, bias)[0]
        assert float((got - want).norm() / want.norm()) < (1e-2 if ON_GPU else 1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("rows", [1, 65, 130])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_gated_product_is_that_of_the_halves(rows, kind):
    """With rows in more than one block, and a bias."""
    weight = tile(in_turn(made(37, 96, QuantScheme("int4", 32, zeros=True), experts=(2,))))
    x, bias = torch.randn(rows, 96, device=DEVICE, dtype=DTYPES[0]), torch.randn(74, device=DEVICE, dtype=DTYPES[0])
    got = quantized_gated(x, weight, kind, bias, launch=QuantizedLaunch(64, 1, 2, 4), gpu=gpu_traits(DEVICE)).float()
    want = quantized_gated_reference(x, weight, kind, bias).float()
    assert float((got - want).norm() / want.norm()) < (1e-2 if ON_GPU else 1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scheme", [QuantScheme("e4m3", 128), *TWO_LEVELS], ids=str)
def test_many_rows_take_the_library_block_by_block(scheme, biased, monkeypatch):
    """Of a line's product and of a gate: as of one block, in their places, the last block smaller."""
    monkeypatch.setattr(packed, "MAX_ROWS", 16)
    monkeypatch.setattr(packed, "_BLOCK_OF_GPU", 64 * 128)
    lines, k, gpu = 2 * 69, 128, gpu_traits(DEVICE)
    both = tile(factor_apart(in_turn(made(lines // 2, k, scheme, experts=(2,)))))
    plain, dtype = tile(factor_apart(made(lines, k, scheme))), DTYPES[0]
    x, bias = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in ((17, k), (lines,)))
    x /= decode(untile(both)).std() * k**0.5
    given = bias if biased else None
    seen = []
    real = packed.decode_tiles
    monkeypatch.setattr(packed, "decode_tiles", lambda *args, **more: seen.append(args[1:3]) or real(*args, **more))
    for got, want in (
        (TiledLinear(plain, given, gpu)(x), quantized_gemm_reference(x, plain, given)[0]),
        (TiledGated(both, given, "silu", gpu)(x), quantized_gated_reference(x, both, "silu", given)),
    ):
        assert got.shape == want.shape
        error = (got.float() - want.float()).norm(dim=0) / want.float().norm(dim=0)
        assert float(error.max()) < (1e-2 if ON_GPU else 1e-5)
    assert seen == 2 * [(0, 64), (64, 128), (128, 138)]


@on_gpu_or_interpreted
@pytest.mark.parametrize("scheme", [QuantScheme("e4m3", 128), QuantScheme("e2m1", 16, "times")], ids=str)
def test_lines_below_others_are_one_product_with_the_bits_of_both(scheme):
    """Where k is not cut; none is made where lines do not end with a tile or tiles are of another kind."""
    torch.manual_seed(4)
    gpu, dtype = gpu_traits(DEVICE), DTYPES[0]
    first, second, odd = (tile(made(lines, 256, scheme)) for lines in (128, 37, 130))
    one, other = (TiledLinear(each, None, gpu, whole=True) for each in (first, second))
    both = one_below_the_other(one, other)
    x = torch.randn(5, 256, device=DEVICE, dtype=dtype)
    assert both.weight.shape == (165, 256)
    assert torch.equal(both(x), torch.cat([one(x), other(x)], -1))
    assert one_below_the_other(TiledLinear(odd, None, gpu), other) is None
    assert one_below_the_other(one, TiledLinear(second, torch.zeros(37, device=DEVICE, dtype=dtype), gpu)) is None
    assert one_below_the_other(one, TiledLinear(tile(made(64, 256, QuantScheme("int4", 128))), None, gpu)) is None


def test_a_shared_expert_goes_with_the_others_only_where_it_is_like_them():
    scheme, gpu = QuantScheme("e4m3", 128), GpuTraits(132, True, 227 << 10, True)
    gate_up, down = tile(in_turn(made(64, 128, scheme, experts=(3, 2)))), tile(made(128, 64, scheme, experts=(3,)))
    routed = TiledExperts(torch.add, Experts(gate_up, down, None, None, Activation.SILU))

    def shared(inner=64, kind="silu", bias=None, second=scheme):
        both = tile(in_turn(made(inner, 128, scheme, experts=(2,))))
        return TiledGated(both, bias, kind, gpu), TiledLinear(tile(made(128, inner, second)), None, gpu)

    gated, last = shared()
    assert routed.beside(gated, last).experts.shared == (gated.weight, last.weight)
    unlike = [shared(inner=128), shared(kind="gelu_tanh"), shared(bias=torch.zeros(128))]
    for each in (*unlike, shared(second=QuantScheme("e4m3", 0))):
        assert routed.beside(*each) is None
    assert routed.beside(gated, torch.add) is None


def test_lines_of_one_factor_are_one_product():
    """A fused weight has a run for each tensor of the checkpoint; lines in turn have one of gates and one of ups."""
    weight = made(192, 128, QuantScheme("e2m1", 16, "times"))
    weight.factor[:128], weight.factor[128:] = 0.5, 0.25
    (one,) = packed._decoded_together(tile(factor_apart(weight)), parted=False)
    assert one.runs == ((slice(0, 128), 0.5), (slice(128, 192), 0.25))
    weight.factor[:96], weight.factor[96:] = 0.5, 0.25
    (one,) = packed._decoded_together(tile(factor_apart(in_turn(weight.halves()))), parted=True)
    assert one.runs == ((slice(0, 96), 0.5), (slice(96, 192), 0.25))
    (one,) = packed._decoded_together(tile(made(192, 128, QuantScheme("int4", 128))), parted=True)
    assert one.runs == ((slice(0, 192), 1.0),)


@on_gpu_or_interpreted
def test_a_row_has_the_same_bits_in_any_company():
    """In the interpreter nearly: its products are numpy's, whose bits may depend on the number of rows."""
    weight = tile(made(64, 256, QuantScheme("e4m3", 128)))
    x, gpu = torch.randn(70, 256, device=DEVICE, dtype=DTYPES[0]), gpu_traits(DEVICE)
    launch = QuantizedLaunch(64, 2, 2, 4)
    whole = quantized_gemm(x, weight, launch=launch, gpu=gpu)
    for rows in (1, 2, 17, 65):
        got = quantized_gemm(x[:rows], weight, launch=launch, gpu=gpu)
        if ON_GPU:
            assert torch.equal(got, whole[:, :rows])
        else:
            torch.testing.assert_close(got, whole[:, :rows], rtol=1e-4, atol=1e-4)
