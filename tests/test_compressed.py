"""Weights in 12 bits: every bit comes back, what does not fit is left alone, and memory counts them."""

import pytest
import torch

from engines import build
from treetop.engine import build as building
from treetop.engine.build import compresses
from treetop.engine.memory import Memory
from treetop.kernels import few_rows
from treetop.kernels.compressed import BLOCK, MAX_ROWS, MOST_BYTES, TILE, compress, decompress, why_not_compressed
from treetop.kernels.few_rows import choose_compressed, is_compressed_for, load_table, row_class
from treetop.kernels.triton_guard import GpuTraits
from treetop.models.loader import Placement
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError

CPU = torch.device("cpu")
H200 = GpuTraits(132, True, 227 << 10)


def normal(n, k, seed=0):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5).bfloat16()


def assert_same_bits(got, want):
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 512), (384, 1280)])
def test_every_bit_comes_back(n, k, gated):
    weight = normal(n, k)
    assert_same_bits(decompress(compress(weight, gated)), weight)


def test_zeros_and_numbers_far_below_a_rows_largest_come_back():
    """Rows of zeros, zeros of both signs, subnormals, rows of any scale, rows whose largest number is far from all."""
    weight = normal(256, 512)
    weight[3] = 0
    weight[4, ::2], weight[5, 7] = 0, -0.0
    weight[9, :20], weight[10, 5] = 1e-20, 1e-40
    weight[100:102] *= 1e-30
    weight[102:104] *= 1e30
    weight[40:60, 500] = -1e-12
    small = compress(weight, False)
    assert int((small.lines >= 0).sum()) >= 41
    assert_same_bits(decompress(small), weight)


def test_outliers_are_as_few_as_the_format_promises():
    """Of normal weights one in some ten thousand: those 15 powers of two below the largest of their row."""
    small = compress(normal(1024, 4096), False)
    assert 0.5e-4 < int((small.lines >= 0).sum()) / (1024 * 4096) < 2e-4
    assert small.lines.shape[1] <= 64


def test_a_compressed_weight_takes_no_more_than_is_counted():
    for k in (128, 4096):
        small = compress(normal(128, k), False)
        taken = sum(each.nbytes for each in (small.words, small.scale, small.lines, small.columns, small.values))
        assert 1.5 * 128 * k <= taken <= MOST_BYTES * 128 * k


@pytest.mark.parametrize(
    "weight",
    [
        normal(128, 512).half(),
        normal(96, 512),
        normal(128, 320),
        torch.rand(128, 512).mul(40).sub(20).exp().bfloat16(),
        normal(128, 512).index_fill(1, torch.tensor([3]), float("nan")),
        normal(128, 512).index_fill(1, torch.tensor([3]), float("inf")),
    ],
    ids=["float16", "half a tile", "half a block", "all sizes", "nan", "inf"],
)
def test_what_does_not_fit_is_left_alone(weight):
    assert compress(weight, False) is None


def test_a_small_number_beside_a_giant_is_exact_or_left_alone():
    """Over its row's scale an outlier has to be a bfloat16 again."""
    weight = torch.full((64, 128), 1e38).bfloat16()
    weight[0, 0] = 1.6
    assert_same_bits(decompress(compress(weight, False)), weight)
    weight[0, 0] = 1e-30
    assert compress(weight, False) is None


def test_a_gated_weight_needs_whole_tiles_of_both_halves():
    assert compress(normal(192, 128), False) is not None
    assert compress(normal(192, 128), True) is None


# -------------------------------------------------------------------------------------------------- who gets them


def test_only_measured_gpus_and_bfloat16_have_them():
    assert "bfloat16" in why_not_compressed(CPU, torch.float16)
    assert "compute capability 9.0" in why_not_compressed(CPU, torch.bfloat16)
    other = GpuTraits(84, True, 227 << 10)
    assert choose_compressed(1, 28672, 4096, True, other) is None
    assert not is_compressed_for(28672, 4096, True, other)


def test_the_option_is_refused_where_it_cannot_be(strong_pair):
    with pytest.raises(ConfigError, match=r"--compress-weights: only bfloat16 .*--no-compress-weights"):
        build(strong_pair, compress_weights=True)
    with pytest.raises(ConfigError, match="--compress-weights must be bool or nothing"):
        build(strong_pair, compress_weights="yes")


def test_by_itself_it_is_on_while_half_of_memory_is_left(monkeypatch):
    monkeypatch.setattr(building, "why_not_compressed", lambda device, dtype: None)
    numbers = 8 << 30
    needed = int(2 * numbers * (2 + MOST_BYTES))
    for total, expected in ((needed, True), (needed - 2, False)):
        assert compresses(EngineConfig(), CPU, torch.bfloat16, numbers, Memory(total, 0)) is expected
    assert compresses(EngineConfig(compress_weights=True), CPU, torch.bfloat16, numbers, Memory(1, 0))
    assert not compresses(EngineConfig(compress_weights=False), CPU, torch.bfloat16, 1, Memory(1 << 40, 0))


def test_the_estimate_before_loading_counts_them(strong_pair):
    llm = build(strong_pair)
    layout, spec = llm.engine.layout, llm.engine.device.target.spec
    plain, both = (
        building._static_estimate(layout, spec, None, Placement(torch.bfloat16, CPU, 64, compressed=each))
        for each in (False, True)
    )
    assert both - plain == pytest.approx(MOST_BYTES * building._numbers(spec, None), abs=1)


def test_the_committed_launches_can_be_launched():
    """Whole blocks of outputs and of k, one split if gated, a Hopper GPU's memory, rows that the kernel takes."""
    table = load_table()
    assert len(table.compressed) > 10
    for (n, k, gated, rows), launch in table.compressed.items():
        assert rows <= MAX_ROWS
        assert n % launch.block_n == 0
        assert k % (launch.splits * BLOCK) == 0
        assert launch.splits == 1 or not gated
        assert launch.block_n % (2 * TILE if gated else TILE) == 0
        stage = 2 * (launch.block_n * BLOCK * 3 // 4 + rows * BLOCK)
        assert stage * launch.num_stages <= 227 << 10


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 200])
@pytest.mark.parametrize("shape", [(2048, 1024, True), (3072, 1536, False), (576, 512, False), (32000, 4096, False)])
def test_weights_that_were_not_measured_get_a_launch_for_up_to_16_rows(rows, shape):
    n, k, gated = shape
    launch = choose_compressed(rows, n, k, gated, H200)
    if shape not in {key[:3] for key in load_table().launches}:
        assert (launch is not None) == (rows <= 16)
    if launch is not None:
        assert n % launch.block_n == 0
        assert k % (launch.splits * BLOCK) == 0
        assert row_class(rows) <= MAX_ROWS
    assert few_rows.MAX_ROWS >= MAX_ROWS
