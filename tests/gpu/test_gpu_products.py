"""Products of few rows on an NVIDIA GPU, by pointers, by tiles and with compressed weights, against references."""

import pytest
import torch

from treetop.kernels.gemm.lossless_weights import (
    LosslessLaunch,
    compress,
    decompress,
    lossless_gemm,
    lossless_gemm_reference,
)
from treetop.kernels.gemm.skinny_gemm import (
    RowsLaunch,
    choose_launch,
    gated_rows,
    gated_rows_reference,
    load_table,
    skinny_gemm,
    skinny_gemm_reference,
)
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.linear import SkinnyGated, SkinnyLinear
from treetop.weights.lossless import offers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
ROWS = [1, 15, 16, 31, 64, 100, 128, 129, 150, 192, 193, 256]


def inputs(rows, n, k, dtype=torch.bfloat16):
    generator = torch.Generator(GPU).manual_seed(rows)
    x = torch.randn(rows, k, device=GPU, dtype=dtype, generator=generator)
    return x, torch.randn(n, k, device=GPU, dtype=dtype, generator=generator) * k**-0.5


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and not gpu_traits(GPU).can_overlap,
    reason="products with compressed weights need compute capability 9.0",
)


# Where no kernel of ours serves, (rows, n, k), on a GPU that the committed table was measured on. By hand, so that a
# table that has lost an entry is not taken for one that says so.
VENDORS_ARE_FASTER = {(256, 6144, 4096), (256, 28672, 4096)}
WHOLE_WEIGHTS_ARE_FASTER = {(32, 6144, 4096), (32, 4096, 14336), (32, 28672, 4096)}


def assert_chosen(launch, size, unserved, gpu):
    """A launch is chosen for every size but the listed ones. Elsewhere a rule decides, of which nothing is measured."""
    if load_table().holds_for(gpu):
        assert (launch is None) == (size in unserved), size
    elif launch is None:
        pytest.skip("nothing was measured on a GPU like this one")


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
        got = skinny_gemm(x, weight, launch, gpu)
    assert_near(got, skinny_gemm_reference(x, weight, splits))


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
    assert_chosen(launch, (rows, n, k), VENDORS_ARE_FASTER, gpu)
    if launch is None:
        return
    x, weight = inputs(rows, n, k)
    if gated:
        assert_near(gated_rows(x, weight, launch, gpu), gated_rows_reference(x, weight))
    else:
        assert_near(skinny_gemm(x, weight, launch, gpu).float().sum(0), skinny_gemm_reference(x, weight, 1)[0])


@needs_hopper
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32])
@pytest.mark.parametrize(("block_n", "splits"), [(64, 1), (64, 4), (128, 2), (256, 2)])
def test_compressed_weights_give_the_parts_of_a_product(rows, block_n, splits):
    """Outliers of one tile in several steps; each call but the first starts while the one before it runs."""
    gpu = gpu_traits(GPU)
    x, weight = inputs(rows, 512, 4096)
    weight[:60, 5] *= 1e-9
    weight[70] = 0
    small = compress(weight, False)
    assert torch.equal(decompress(small).view(torch.int16), weight.view(torch.int16))
    for _ in range(3):
        got = lossless_gemm(x, small, LosslessLaunch(block_n, splits, 3, 4, block_n // 4), gpu)
    assert_near(got.float().sum(0), lossless_gemm_reference(x, small))


@needs_hopper
@pytest.mark.parametrize(("block_n", "splits", "warps"), [(64, 1, 4), (256, 1, 8), (64, 4, 4), (128, 2, 8)])
def test_every_compressed_weight_counts_bit_for_bit(block_n, splits, warps):
    """Rows with a single one take columns out of the weight; a tile has as many outliers as it may, in two columns."""
    gpu, k = gpu_traits(GPU), 1024
    _, weight = inputs(16, 512, k)
    weight[: k // 16 - 8, 4:6] *= 1e-9  # others are outliers by themselves
    small = compress(weight, False)
    assert 112 <= small.crowd[64] <= k // 8
    ones = torch.eye(k, dtype=torch.bfloat16, device=GPU)
    for rows in ones.split(32):
        got = lossless_gemm(rows, small, LosslessLaunch(block_n, splits, 3, warps, block_n // 4), gpu)
        assert torch.equal(got.float().sum(0), rows.float() @ weight.float().T)


@needs_hopper
@pytest.mark.parametrize("rows", [1, 16, 32])
def test_compressed_gates_equal_their_reference(rows):
    """Row 0 sees outliers alone: they are all of its gates and ups."""
    x, weight = inputs(rows, 2 * 192, 1024)
    weight[:, 3:4] *= 1e-6
    x[0] = torch.nn.functional.one_hot(torch.tensor(3, device=GPU), 1024)
    got = lossless_gemm(x, compress(weight, True), LosslessLaunch(128, 1, 3, 4, 32), gpu_traits(GPU)).float()
    want = gated_rows_reference(x, weight).float()
    assert_near(got, want)
    torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=0)


def test_layers_take_compressed_weights_for_few_rows_and_whole_ones_for_more(monkeypatch):
    """The same to rounding, whichever kernel it is."""
    gpu = gpu_traits(GPU)
    if not load_table().holds_for(gpu):
        pytest.skip("products with compressed weights are not measured here")
    taken: list[int] = []
    monkeypatch.setattr(
        "treetop.weights.linear.lossless_gemm", lambda x, *args: taken.append(len(x)) or lossless_gemm(x, *args)
    )
    for kind, n in ((SkinnyLinear, 8192), (SkinnyGated, 16384)):
        x, weight = inputs(64, n, 4096)
        plain, both = kind(weight, gpu), kind(weight, gpu, compressed=True)
        assert set(both._weight._compressed.launches) == {1, 4, 8, 16}
        for rows in (1, 16, 33, 64):
            assert_near(both(x[:rows]), plain(x[:rows]))
    assert taken == [1, 16, 1, 16]


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True), (128256, 4096, False)]
)
def test_the_compressed_launches_that_a_llama_8b_gets_are_right(rows, n, k, gated):
    gpu = gpu_traits(GPU)
    if not load_table().holds_for(gpu):
        pytest.skip("products with compressed weights are not measured here")
    found = offers(n, k, gated, gpu)
    assert (rows not in found) == ((rows, n, k) in WHOLE_WEIGHTS_ARE_FASTER)
    if rows not in found:
        return
    x, weight = inputs(rows, n, k)
    small, launch = compress(weight, gated), found[rows].launch
    assert small.crowd[launch.block_n] <= found[rows].most_outliers
    got, want = lossless_gemm(x, small, launch, gpu).float(), skinny_gemm_reference(x, weight, 1)[0]
    assert_near(got if gated else got.sum(0), gated_rows_reference(x, weight) if gated else want)
