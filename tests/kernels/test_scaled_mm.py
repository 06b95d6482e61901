"""Products of many rows in FP8 by PyTorch's `scaled_mm`: its rules, which a stand-in knows, and the reference."""

import pytest
import torch

from support.operation_cases import coded_weight, e4m3_rows
from treetop.kernels.gemm import scaled_mm
from treetop.kernels.gemm.fp8_rows import (
    Activations,
    QuantizedRows,
    by_group,
    fp8_rows_reference,
    quantize_rows_reference,
)
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.scaled_mm import ROWS_OF_GROUPS, library_from, scaled_rows, why_not
from treetop.kernels.triton_guard import GpuTraits

CPU = torch.device("cpu")
HOPPER = GpuTraits(132, True, 227 << 10, True)


@pytest.fixture(autouse=True)
def of_cuda(monkeypatch):
    """A PyTorch of CUDA 13."""
    monkeypatch.setattr(scaled_mm, "cuda_version", lambda: (13, 0))


OTHERS = {
    "A100": GpuTraits(108, False, 163 << 10, True),
    "B200": GpuTraits(148, True, 227 << 10, True, True),
    "RTX 5090": GpuTraits(170, True, 99 << 10, True),
}


def by_rules(a, b, scale_a, recipe_a, scale_b, recipe_b, *, bias, output_dtype):
    """`scaled_mm` on compute capability 9.0: what it refuses, and what cuBLASLt reads without a check: scales of a
    group at multiples of 16 bytes. The product in float64."""
    kinds = torch.nn.functional.ScalingType
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert k % 16 == 0
    assert n % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert output_dtype == torch.bfloat16
    assert recipe_a == recipe_b
    if recipe_a == kinds.RowWise:
        assert scale_a.shape == (m, 1)
        assert scale_a.stride() == (1, 1)
        assert scale_b.shape == (1, n)
        assert scale_b.stride(1) == 1
        of_a, of_b = scale_a.expand(m, k), scale_b.T.expand(n, k)
    else:
        assert recipe_a == kinds.BlockWise1x128
        groups = -(-k // 128)
        for scale, rows in ((scale_a, m), (scale_b, n)):
            assert scale.shape == (rows, groups)
            assert scale.stride(0) == 1
            assert groups == 1 or scale.stride(1) == rows
            assert rows % 4 == 0
        assert bias is None
        of_a, of_b = (scale.repeat_interleave(128, 1)[:, :k] for scale in (scale_a, scale_b))
    total = (a.double() * of_a.double()) @ (b.T.double() * of_b.double()).T
    return (total if bias is None else total + bias.double()).to(output_dtype)


@pytest.mark.parametrize("rows", [1, 3, 4, 21])
@pytest.mark.parametrize(("group", "k"), [(0, 208), (128, 384), (128, 640), (128, 128)])
def test_operands_keep_to_the_librarys_rules_and_the_product_is_the_references(group, k, rows, monkeypatch):
    """Rows that are no multiple of four, and groups of k (3, 5) that are none."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", by_rules)
    torch.manual_seed(rows + k)
    weight = by_group(coded_weight(64, k, QuantScheme("e4m3", group), CPU))
    x = quantize_rows_reference(torch.randn(rows, k), Activations(group), multiple=ROWS_OF_GROUPS if group else 1)
    x = QuantizedRows(x.codes, x.scale.T.contiguous().T)  # as the kernel lays them
    bias = None if group else torch.randn(64, dtype=torch.bfloat16)
    assert why_not(weight, bias, torch.bfloat16, HOPPER) is None
    want = fp8_rows_reference(x, weight, bias, dtype=torch.bfloat16)[0]
    got = scaled_rows(x, weight, bias)
    assert len(got) == rows + (-rows % 4 if group else 0)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)  # a rounding apart


def test_filled_rows_are_zeros_and_change_no_other():
    x = torch.randn(5, 256)
    alone, filled = (quantize_rows_reference(x, Activations(128), multiple=each) for each in (1, 4))
    assert filled.codes.shape == (8, 256)
    assert not filled.codes[5:].any()
    assert torch.equal(filled.codes[:5], alone.codes)
    assert torch.equal(filled.scale[:5], alone.scale)


def test_torch_itself_takes_the_operands_of_whole_rows():
    """Its own `scaled_mm` on a CPU, which knows no groups."""
    weight, x = coded_weight(32, 160, QuantScheme("e4m3", 0), CPU), e4m3_rows(6, 160, 1)
    x = QuantizedRows(x.codes.cpu(), x.scale)
    want = fp8_rows_reference(x, weight)[0]
    got = scaled_rows(x, weight).float()
    assert float((got - want).norm() / want.norm()) < 4e-3


@pytest.mark.parametrize(
    ("lines", "k", "group", "bias", "why"),
    [
        (72, 256, 0, False, "not in sixteens"),
        (64, 200, 0, False, "not in sixteens"),
        (64, 256, 64, False, "groups of 64"),
        (64, 320, 128, False, "in rows of 320"),
        (64, 256, 128, True, "a bias"),
    ],
)
def test_what_the_library_cannot_is_left_to_the_kernel(lines, k, group, bias, why):
    found = why_not(
        coded_weight(lines, k, QuantScheme("e4m3", group), CPU),
        torch.zeros(lines) if bias else None,
        torch.bfloat16,
        HOPPER,
    )
    assert why in str(found)


def test_only_hopper_and_bfloat16_take_the_library():
    weight = coded_weight(64, 256, QuantScheme("e4m3", 0), CPU)
    assert all(why_not(weight, None, torch.bfloat16, gpu) is not None for gpu in OTHERS.values())
    assert "float16" in str(why_not(weight, None, torch.float16, HOPPER))


def test_the_table_says_from_which_rows(monkeypatch):
    """What was measured, or 1,024."""
    table = scaled_mm.TunedTable(132, "", {(64, 256, 0, False): (128,), (64, 256, 0, True): (None,)})
    monkeypatch.setattr(scaled_mm, "load_table", lambda: table)
    library_from.cache_clear()
    assert library_from((64, 256), 0, False, HOPPER) == 128
    assert library_from((64, 256), 0, True, HOPPER) is None
    assert library_from((64, 512), 0, False, HOPPER) == 1024
    library_from.cache_clear()


def test_a_cuda_without_scales_of_groups_takes_those_of_rows_alone(monkeypatch):
    monkeypatch.setattr(scaled_mm, "cuda_version", lambda: (12, 8))
    by_group, by_row = (coded_weight(64, 256, QuantScheme("e4m3", group), CPU) for group in (128, 0))
    assert "CUDA 12.9" in str(why_not(by_group, None, torch.bfloat16, HOPPER))
    assert why_not(by_row, None, torch.bfloat16, HOPPER) is None
