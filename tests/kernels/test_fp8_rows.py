"""Activations in e4m3: the references against `compressed-tensors` and scalars, kernels against the references.

Tests of the kernels run on a GPU or in the interpreted session.
"""

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from support.fp8 import VALUES, rounded
from support.interpreted import DEVICE, ON_GPU, on_gpu_or_interpreted
from support.operation_cases import coded_weight, e4m3_rows
from treetop.kernels.fused import add_rms_norm
from treetop.kernels.gemm.fp8_rows import (
    Activations,
    Fp8Launch,
    by_group,
    choose_fp8,
    fp8_rows,
    fp8_rows_reference,
    quantize_rows,
    quantize_rows_reference,
)
from treetop.kernels.gemm.quantized_weight import QuantScheme, decode
from treetop.kernels.gemm.quantizing_norm import add_rms_norm_codes, norms_codes
from treetop.kernels.kv import FP8
from treetop.kernels.triton_guard import GpuTraits, gpu_traits

HOPPER = GpuTraits(132, True, 227 << 10, True)
WAYS = [Activations(), Activations(64), Activations(64, powers=True), Activations(fixed=True)]
FIXED = torch.tensor([0.25])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(6)


def hard_rows(k=200, dtype=torch.float32):
    """Zeros, huge and tiny numbers, an outlier, ties between codes, NaN and infinity."""
    x = torch.randn(12, k)
    x[1] = 0
    x[2] *= 1e36
    x[3] *= 1e-38
    x[4, 7] = 1e4
    x[5] = torch.arange(k) / 16 - 3
    x[6, : k // 2] = 0
    x[7, 3] = math.nan
    x[8, 5] = math.inf
    x[9] = -448.0
    return x.to(dtype)


def fixed_of(how):
    return FIXED if how.fixed else None


def numbers(codes):
    return codes.view(FP8).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_compressed_tensors(dtype):
    """By token and by a fixed scale, of rows that have one: computed in float32, whatever the dtype of x."""
    x = hard_rows(dtype=dtype)
    found = quantize_rows_reference(x, Activations())
    args = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x.float()[None], args, None)
    assert torch.equal(found.scale.isnan(), scale[0].isnan())
    finite = found.scale[:, 0].isfinite()
    assert int(finite.sum()) == 10
    assert torch.equal(found.scale[finite], scale[0][finite])
    want = quantize(x.float()[None], scale, zero, args, dtype=FP8)[0]
    assert torch.equal(numbers(found.codes)[finite], want.float()[finite])
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    found = quantize_rows_reference(x, Activations(fixed=True), FIXED)
    want = quantize(x.float(), FIXED, torch.zeros(1), args, dtype=FP8).float()
    torch.testing.assert_close(numbers(found.codes), want, rtol=0, atol=0, equal_nan=True)
    assert found.scale.tolist() == [[0.25]] * 12


@pytest.mark.parametrize("powers", [False, True])
def test_a_group_has_the_scale_of_its_largest_number(powers):
    """Number by number; the last group has fewer columns."""
    x = hard_rows()[:7]
    found = quantize_rows_reference(x, Activations(64, powers=powers))
    assert found.scale.shape == (7, 4)
    for row in range(7):
        for group in range(4):
            own = x[row, 64 * group : 64 * group + 64]
            scale = np.float32(own.abs().max().item()) / np.float32(448) or np.finfo(np.float32).eps
            scale = 2.0 ** math.ceil(math.log2(scale)) if powers else float(scale)
            scale = max(scale, 2.0**-126) if powers else scale
            assert float(found.scale[row, group]) == scale
            want = rounded((own / torch.tensor(scale, dtype=torch.float32)).double())
            assert torch.equal(numbers(found.codes)[row, 64 * group : 64 * group + 64].double(), want)


def test_powers_of_two_stay_what_they_are():
    x = torch.tensor([[448.0], [449.0], [224.0], [0.0]])
    assert quantize_rows_reference(x, Activations(powers=True)).scale.flatten().tolist() == [1.0, 2.0, 0.5, 2.0**-23]


@pytest.mark.parametrize("group", [0, 64])
def test_a_product_is_the_exact_sum_times_both_scales(group):
    """In Python's integers; the sums lie so far apart that float32 would lose most of them."""
    weight = coded_weight(5, 200, QuantScheme("e4m3", group), "cpu")
    x = e4m3_rows(3, 200, weight.scale.shape[1])
    x = type(x)(x.codes.cpu(), x.scale.cpu())
    bias = torch.randn(5)
    got = fp8_rows_reference(x, weight, bias, dtype=torch.float64)[0]
    codes, lines = ((numbers(each).double() * 512).long().tolist() for each in (x.codes, weight.codes))
    for row in range(3):
        for line in range(5):
            total = float(bias[line])
            for of in range(weight.scale.shape[1]):
                span = range(of * group, min(200, (of + 1) * group)) if group else range(200)
                whole = sum(codes[row][j] * lines[line][j] for j in span)
                total += whole / 2**18 * (float(x.scale[row, of]) * float(weight.scale[line, of]))
            assert float(got[row, line]) == pytest.approx(total, rel=1e-15, abs=1e-300)
    wide = (numbers(x.codes).double() * x.scale.double().repeat_interleave(group or 200, 1)[:, :200]) @ decode(
        weight
    ).double().T
    torch.testing.assert_close(got, wide + bias.double(), rtol=1e-6, atol=1e-6 * float(wide.abs().max()))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(how):
    """Whatever its companions are, NaN and infinity too; and their rows are NaN, or with a fixed scale 448 of those."""
    x, weight = hard_rows(), coded_weight(40, 200, QuantScheme("e4m3", how.group), "cpu")

    def product(rows):
        return fp8_rows_reference(quantize_rows_reference(rows, how, fixed_of(how)), weight)[0]

    whole = product(x)
    for rows in ([0], [4, 1], [9, 3, 2, 5, 6], list(range(11, -1, -1))):
        got = product(x[rows])
        assert torch.equal(got.view(torch.int32), whole[rows].view(torch.int32)) or got.isnan().any()
        torch.testing.assert_close(got, whole[rows], rtol=0, atol=0, equal_nan=True)
    assert whole[7].isnan().all()
    assert whole[8].isnan().all() != how.fixed
    assert not whole[[0, 1, 3, 4, 5, 6, 9, 10, 11]].isnan().any()
    assert not whole[1].any()


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (100, 77), (4096, 14336)])
def test_launches_fit_and_cut_k_for_few_rows_alone(shape):
    for rows in (1, 16, 64, 65, 8192):
        for group in (0, 32, 128):
            found = choose_fp8(shape, group, False, rows, HOPPER)
            assert found.splits == 1 or rows <= 64
            assert choose_fp8(shape, group, False, rows, HOPPER, whole=True).splits == 1
            assert choose_fp8(shape, group, True, rows, HOPPER).splits == 1
            assert found.num_stages * (found.block_n + min(rows, 128)) * (group or 128) <= HOPPER.shared_bytes
    assert choose_fp8((4096, 4096), 0, False, 1, HOPPER).splits > 1


@on_gpu_or_interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", [Activations(), Activations(64), Activations(32, powers=True)], ids=str)
@pytest.mark.parametrize(("hidden", "parts"), [(192, 0), (256, 1), (320, 3)])
def test_a_norm_that_writes_codes_has_the_bits_of_two_launches(how, hidden, parts):
    """Rows of zeros, tiny and huge numbers and NaN; of a sum in parts, and of rows in two dimensions."""
    gpu, dtype = gpu_traits(DEVICE), torch.float32
    x = hard_rows(hidden, dtype).to(DEVICE).view(3, 4, hidden)
    delta = torch.randn(parts, 3, 4, hidden, device=DEVICE, dtype=dtype) * x[None] if parts else None
    weight = torch.rand(hidden, device=DEVICE, dtype=dtype) + 0.5
    total, normed = add_rms_norm(x, delta, weight, 1e-5, gpu)
    want = quantize_rows(normed.flatten(0, 1), how, gpu=gpu)
    made = add_rms_norm_codes(x, delta, weight, 1e-5, how, gpu)
    assert torch.equal(made[0].view(torch.int32), total.view(torch.int32))
    assert torch.equal(made[1].view(torch.int32), normed.view(torch.int32))
    assert torch.equal(made[2].codes, want.codes)
    assert torch.equal(made[2].scale.view(torch.int32), want.scale.view(torch.int32))
    assert made[2].scale.stride() == want.scale.stride()


def test_a_norm_writes_codes_of_groups_that_fill_a_row():
    assert norms_codes(Activations(), 4096)
    assert norms_codes(Activations(128), 4096)
    assert not norms_codes(Activations(128), 4000)
    assert not norms_codes(Activations(fixed=True), 4096)


@on_gpu_or_interpreted
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_kernel_gives_the_codes_of_the_reference(how):
    """Bit for bit, but that any NaN is one."""
    fixed = None if fixed_of(how) is None else FIXED.to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16 if ON_GPU else torch.float16):
        x = hard_rows().clamp(-6e4, 6e4).to(dtype).to(DEVICE)
        with np.errstate(invalid="ignore"):
            got = quantize_rows(x, how, fixed, 5, gpu=gpu_traits(DEVICE))
            assert got.scale.T.is_contiguous()
        want = quantize_rows_reference(x, how, fixed, 5)
        torch.testing.assert_close(got.scale, want.scale, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(numbers(got.codes), numbers(want.codes), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def close(got, want):
    assert float((got.float() - want.float()).norm() / want.float().norm()) < (2e-3 if ON_GPU else 1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("rows", [1, 21, 70])
def test_the_kernel_gives_the_products_of_the_reference(rows, group):
    """Lines, columns and groups that fill no block; k cut or not; with a bias."""
    weight = by_group(coded_weight(72, 328, QuantScheme("e4m3", group)))
    x, bias = e4m3_rows(rows, 328, weight.scale.shape[1]), torch.randn(72, device=DEVICE)
    x = type(x)(x.codes.to(DEVICE), x.scale.to(DEVICE))
    want = fp8_rows_reference(x, weight, bias)[0]
    for launch in (Fp8Launch(64, 1, 2, 4), Fp8Launch(128, 2, 2, 8)):
        got = fp8_rows(x, weight, bias, dtype=torch.float32, launch=launch, gpu=gpu_traits(DEVICE))
        assert got.shape == (launch.splits, rows, 72)
        close(got.sum(0), want)


@on_gpu_or_interpreted
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_kernel_gives_the_gate_of_the_reference(kind):
    weight, x = coded_weight(74, 96, QuantScheme("e4m3", 0)), e4m3_rows(18, 96, 1)
    x = type(x)(x.codes.to(DEVICE), x.scale.to(DEVICE) / 100)
    bias, launch = torch.randn(74, device=DEVICE), Fp8Launch(64, 1, 2, 4)
    got = fp8_rows(x, weight, bias, kind, dtype=torch.float32, launch=launch, gpu=gpu_traits(DEVICE))
    close(got, fp8_rows_reference(x, weight, bias, kind))


def test_the_specification_is_what_both_sides_convert_by():
    """Codes of PyTorch, by which references read and write e4m3, are the table's."""
    codes = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(numbers(codes).double(), VALUES)
