"""Products of few rows on an NVIDIA GPU, by pointers and by tiles, against their references."""

import pytest
import torch

from treetop.kernels.few_rows import (
    RowsLaunch,
    choose_launch,
    few_rows,
    few_rows_reference,
    gated_rows,
    gated_rows_reference,
)
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
ROWS = [1, 15, 16, 31, 64, 100, 128, 129, 150, 192, 193, 256]


def inputs(rows, n, k, dtype=torch.bfloat16):
    generator = torch.Generator(GPU).manual_seed(rows)
    x = torch.randn(rows, k, device=GPU, dtype=dtype, generator=generator)
    return x, torch.randn(n, k, device=GPU, dtype=dtype, generator=generator) * k**-0.5


def assert_near(got, want):
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert error < 1e-2, f"relative error {error:.1e}"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rows_left", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_parts_add_up_to_the_product(rows, tiled, rows_left, splits):
    """Every row class, the second block of rows, outputs that do not fill their block, weights asked for ahead."""
    gpu = gpu_traits(GPU)
    if tiled and not gpu.can_overlap:
        pytest.skip("tiles need compute capability 9.0")
    x, weight = inputs(rows, 200, 512)
    launch = RowsLaunch(64, 64, splits, 3, 4, 2, tiled, rows_left)
    for _ in range(3):  # later calls start while the one before them runs
        got = few_rows(x, weight, launch, gpu)
    assert_near(got, few_rows_reference(x, weight, splits))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tiled", [False, True])
def test_gated_products_equal_their_reference(rows, tiled):
    gpu = gpu_traits(GPU)
    if tiled and not gpu.can_overlap:
        pytest.skip("tiles need compute capability 9.0")
    x, weight = inputs(rows, 2 * 192, 512)
    assert_near(gated_rows(x, weight, RowsLaunch(64, 64, 1, 3, 4, 1, tiled), gpu), gated_rows_reference(x, weight))


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 192, 256])
@pytest.mark.parametrize(("n", "k", "gated"), [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True)])
def test_the_launches_that_a_llama_8b_gets_are_right(rows, n, k, gated):
    """What `choose_launch` gives on this GPU, from the table or not."""
    gpu = gpu_traits(GPU)
    launch = choose_launch(rows, n, k, gated, gpu)
    if launch is None:
        pytest.skip("the vendor's product serves")
    x, weight = inputs(rows, n, k)
    if gated:
        assert_near(gated_rows(x, weight, launch, gpu), gated_rows_reference(x, weight))
    else:
        assert_near(few_rows(x, weight, launch, gpu).float().sum(0), few_rows_reference(x, weight, 1)[0])
