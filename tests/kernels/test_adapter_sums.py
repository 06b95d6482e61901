"""What adapters add in a product's own launch: the sums of launches of their own, and nobody else's row."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.interpreted import DEVICE, on_gpu_or_interpreted
from support.operation_cases import adapter_case
from treetop.kernels.fused import gate_mul_reference
from treetop.kernels.gemm.adapter_rows import expand_reference, shrink_reference, tile_rows
from treetop.kernels.gemm.adapter_sums import MOST_ROWS, sums_of
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, compress, decompress, lossless_gemm
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, gated_rows, skinny_gemm
from treetop.kernels.profile import TIES
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.adapted import ActivatesAdapted, AddsAdapters
from treetop.weights.format import MAIN
from treetop.weights.linear import NoSplitKLinear, SkinnyLinear
from treetop.weights.plain import UNQUANTIZED

GPU = gpu_traits(DEVICE)
WIDE, EXACT = (
    (torch.bfloat16, 1e-2) if DEVICE.type == "cuda" else (torch.float32, 1e-5)
)  # the interpreter knows no bfloat16


def made(rows, n, k, ends, rank, *, slots=4, dtype=torch.float16):
    """x [rows, n, k], a weight that has its size, and adapters, each of some rows; some rows have none."""
    torch.manual_seed(rows)
    with DEVICE:
        _, x, factors, tiles = adapter_case(rows, n, k, ends, rank, slots, 1)
        weight = torch.randn(ends[-1], k) * k**-0.5
    tiles.slots.copy_(torch.arange(rows) % slots if rows > 1 else 1)
    tile_rows(tiles, slots, GPU)
    factors = replace(factors, a=factors.a.to(dtype), b=factors.b.to(dtype))
    return x.to(dtype), weight, factors, tiles


def wanted(x, weight, factors, tiles):
    """In float32, of the same rounded numbers: [rows, n, out]."""
    inner = shrink_reference(x.float(), replace(factors, a=factors.a.float()), tiles)
    inner = inner.to(factors.b.dtype).float()
    parts = (x.float() @ weight.float().T)[None]
    return expand_reference(parts, inner, replace(factors, b=factors.b.float()), tiles)[0]


def near(got, want, share=2e-3):
    torch.testing.assert_close(got.float(), want, rtol=0, atol=share * float(want.abs().max()))


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("rows", "n", "ends", "rank", "slots", "splits", "rows_left"),
    [
        (1, 1, (40,), 1, 2, 1, False),
        (9, 3, (64, 96, 200), 8, 4, 2, False),
        (32, 1, (72, 130), 16, 9, 1, True),
        (5, 4, (96,), 70, 4, 2, True),
    ],
)
def test_parts_have_what_adapters_add(rows, n, ends, rank, slots, splits, rows_left):
    """Adapters side by side and one at a time, blocks of outputs of several joined products, tokens of one row."""
    x, weight, factors, tiles = made(rows, n, 128, ends, rank, slots=slots)
    weight, flat = weight.to(x.dtype), x.flatten(0, 1)
    launch = RowsLaunch(32, 64, splits, 1, 4, rows_left=rows_left)
    got = skinny_gemm(flat, weight, launch, GPU, sums=sums_of(x, factors, tiles, GPU))
    near(got.float().sum(0).view(rows, n, -1), wanted(x, weight, factors, tiles))
    none = (tiles.slots == 0).repeat_interleave(n)
    plain = skinny_gemm(flat, weight, launch, GPU)
    assert torch.equal(got[:, none], plain[:, none])
    assert not torch.equal(got[:, ~none], plain[:, ~none])


@on_gpu_or_interpreted
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("ends", [(80, 160), (160,)])
def test_gates_and_ups_have_it_before_they_are_activated(kind, ends):
    """Of two modules, and of one that has both."""
    x, weight, factors, tiles = made(9, 2, 128, ends, 8)
    weight, flat = weight.to(x.dtype), x.flatten(0, 1)
    launch = RowsLaunch(32, 64, 1, 1, 4)
    got = gated_rows(flat, weight, launch, GPU, kind, sums=sums_of(x, factors, tiles, GPU))
    near(got.view(9, 2, -1), gate_mul_reference(wanted(x, weight, factors, tiles), kind), 4e-3)
    none = (tiles.slots == 0).repeat_interleave(2)
    assert torch.equal(got[none], gated_rows(flat, weight, launch, GPU, kind)[none])


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("gated", "ends", "splits"), [(False, (100, 192), 2), (True, (128, 256), 1), (True, (256,), 1)]
)
def test_weights_in_12_bits_have_it_too(gated, ends, splits):
    """Tiles of gates and ups lie in turn; a weight's rows have scales that adapters have not."""
    x, weight, factors, tiles = made(13, 2, 256, ends, 16, dtype=WIDE)
    small = compress(weight.cpu().bfloat16(), gated)
    names = ("words", "scale", "starts", "lines", "columns", "values")
    small = replace(small, **{name: getattr(small, name).to(DEVICE) for name in names})
    launch, flat = LosslessLaunch(128 if gated else 64, 1 if gated else 2, 1, 4, 64), x.flatten(0, 1)
    got = lossless_gemm(flat, small, launch, GPU, sums=sums_of(x, factors, tiles, GPU))
    want = wanted(x, decompress(small), factors, tiles)
    whole = gate_mul_reference(want, "silu") if gated else want
    near((got if gated else got.float().sum(0)).view(whole.shape), whole, EXACT)
    none = (tiles.slots == 0).repeat_interleave(2)
    plain = lossless_gemm(flat, small, launch, GPU)
    assert torch.equal(got[..., none, :], plain[..., none, :])


@on_gpu_or_interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_has_the_same_bits_whoever_is_beside_it():
    """Slots that others have, and the place of its own among them."""
    x, weight, factors, tiles = made(24, 1, 128, (96, 160), 8, slots=20)
    weight = weight.to(x.dtype)
    launch = RowsLaunch(32, 64, 1, 1, 4)

    def result(slots):
        tiles.slots.copy_(slots)
        tile_rows(tiles, 20, GPU)
        return skinny_gemm(x[:, 0].contiguous(), weight, launch, GPU, sums=sums_of(x, factors, tiles, GPU))

    before = tiles.slots.clone()
    before[7] = 11
    got, others = result(before), before.roll(5)
    others[7] = 11
    for slots in (others, torch.where(before == 11, 11, 0), 11 + 0 * before, before.clamp(min=11)):
        assert torch.equal(result(slots)[:, 7], got[:, 7])
    assert not torch.equal(result(0 * before)[:, 7], got[:, 7])
    factors.b[11] = torch.inf
    without, plain = before != 11, skinny_gemm(x[:, 0].contiguous(), weight, launch, GPU)
    assert torch.equal(result(torch.where(without, 0, 11))[:, without], plain[:, without]), "a base row is what it was"


@on_gpu_or_interpreted
def test_products_on_a_gpu_take_adapters_as_long_as_they_have_few_rows():
    """Those that may cut k; of more rows they say so. Gates and ups with a bias have launches of their own."""
    x, weight, factors, tiles = made(8, 2, 128, (64, 128), 8)
    gpu, weight = replace(GPU, shared_bytes=max(GPU.shared_bytes, 99 << 10)), weight.to(x.dtype)
    want, many = wanted(x, weight, factors, tiles), x.repeat(1, MOST_ROWS // 16 + 1, 1)
    linear = SkinnyLinear(weight, gpu)
    assert isinstance(linear, AddsAdapters)
    near(linear.adapted(x, factors, tiles).float().sum(0), want, 4e-3)
    assert linear.adapted(many, factors, tiles) is None
    context = SimpleNamespace(ops=SimpleNamespace(gpu_for=lambda op: gpu, profile=TIES), copies=False)
    both = UNQUANTIZED.beside_adapters({MAIN: weight}, None, "silu", context)
    assert isinstance(both, ActivatesAdapted)
    near(both.adapted_gates(x, factors, tiles), gate_mul_reference(want, "silu"), 4e-3)
    assert both.adapted_gates(many, factors, tiles) is None
    near(both.parts(x)[0], x.float() @ weight.float().T, 4e-3)
    biased = UNQUANTIZED.beside_adapters({MAIN: weight}, torch.ones(128, device=DEVICE), "silu", context)
    for other in (biased, NoSplitKLinear):
        assert not hasattr(other, "adapted_gates")
    assert not hasattr(NoSplitKLinear, "adapted")
