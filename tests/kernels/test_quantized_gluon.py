"""Which products with packed weights are the kernel's in Gluon, and how it cuts them. It runs on a GPU alone."""

from dataclasses import replace

import pytest
import torch

from support.operation_cases import coded_weight
from treetop.kernels.gemm import quantized_gemm as plain
from treetop.kernels.gemm import quantized_gluon as kernel
from treetop.kernels.gemm.quantized_gemm import MAX_ROWS, QuantizedLaunch, choose_product, choose_quantized
from treetop.kernels.gemm.quantized_gluon import (
    FEWEST_ROWS,
    ROWS,
    GluonLaunch,
    choose,
    joined,
    load_table,
    why_not,
)
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.tiles import BLOCK, NUMBERS, in_turn, tile
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable
from treetop.weights import packed
from treetop.weights.packed import TiledGated, TiledLinear

HOPPER = GpuTraits(132, True, 227 << 10, True)
SHAPES = [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (151936, 5120), (64, 128), (200, 1000)]
BY_ROW = QuantScheme("e4m3", 0)


@pytest.fixture(autouse=True)
def gluon(monkeypatch):
    """As if this Triton had it, and no interpreter."""
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: None)


def weight(scheme=BY_ROW, lines=256, k=512):
    return replace(tile(coded_weight(lines, k, scheme, torch.device("cpu"))), wide=False)


def fits(launch, numbers, k):
    """Whether a launch's slots and the rest lie in shared memory, and each split has a block."""
    blocks, codes = -(-k // BLOCK), launch.block_n * BLOCK // (1 if numbers == "e4m3" else 2)
    used = launch.code_slots * codes + launch.row_slots * launch.block_m * 128
    room = (HOPPER.shared_bytes + 1024) // launch.beside - 1024
    together = not launch.joined or launch.row_slots == 2 * launch.code_slots
    return (
        together
        and used + ((34 if launch.num_warps > 8 else 10) << 10) <= room
        and min(launch.code_slots, launch.row_slots // 2) >= 2
        and (launch.splits - 1) * -(-blocks // launch.splits) < blocks
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("numbers", ["e4m3", "int4", "e2m1"])
@pytest.mark.parametrize("measured", [True, False])
def test_slots_fit_and_every_split_has_a_block(numbers, shape, measured, monkeypatch):
    """Of up to `MAX_ROWS` rows all have the same splits, so one row's sums are cut alike; of more at most as many."""
    if not measured:
        monkeypatch.setattr(kernel, "load_table", lambda: TunedTable(132, "", {}))
    choose = kernel.choose.__wrapped__
    for gated, uncut in ((False, False), (False, True), (True, False)):
        splits, seen = choose_quantized(numbers, shape, gated, 64, HOPPER, uncut).splits, set()
        for rows in (1, FEWEST_ROWS - 1, FEWEST_ROWS, 128, 129, MAX_ROWS, MAX_ROWS + 1, 512, 1024, 8192):
            launch = choose(numbers, shape, gated, rows, splits, MAX_ROWS, HOPPER)
            if launch is None:
                assert rows < FEWEST_ROWS
                continue
            assert fits(launch, numbers, shape[1])
            if rows <= MAX_ROWS:
                seen.add(launch.splits)
            assert launch.splits <= splits
        assert len(seen) == 1


def test_what_was_measured_can_run_and_has_the_splits_of_few_rows():
    for (kind, lines, k, gated, cut, rows), launch in load_table().entries.items():
        assert fits(launch, NUMBERS[kind], k)
        splits = choose_quantized(kind, (lines, k), gated, rows, HOPPER, not cut).splits
        assert cut == (splits > 1)
        assert launch.splits == splits if rows <= MAX_ROWS else launch.splits <= splits
        assert rows in ROWS
        assert launch.block_n >= 16 * launch.num_warps
        assert launch.max_registers() * 32 * (launch.num_warps + 4) * launch.beside <= 65536


@pytest.mark.parametrize(
    ("numbers", "tiles", "rows", "block"),
    [
        ("e4m3", 139, 256, (256, 128)),
        ("int4", 139, 256, (256, 128)),
        ("e4m3", 139, 128, (128, 128)),
        ("e4m3", 278, 128, (128, 256)),  # of the other each has two
        ("e4m3", 139, 64, (64, 64)),
        ("e4m3", 278, 64, (64, 128)),  # of 417 at a time of the other some have two
    ],
)
def test_a_block_is_chosen_by_what_a_multiprocessor_has_to_do(numbers, tiles, rows, block):
    """tiles: of 128 lines, of which 139 multiprocessors have one or two, or half of one of 256."""
    launch = choose(numbers, (tiles * 128, 4096), False, rows, 1, MAX_ROWS, replace(HOPPER, num_sms=139))
    assert (launch.block_m, launch.block_n) == block


def test_few_rows_have_the_launch_that_was_measured_for_as_many_or_none(monkeypatch):
    launch = kernel.launch_of("e4m3", 4096, (64, 128), 1, HOPPER, beside=2)
    table = TunedTable(132, "", {("e4m3", 512, 4096, False, False, rows): launch for rows in (64, 256)})
    monkeypatch.setattr(kernel, "load_table", lambda: table)
    counts = 32, 40, 64, 100, 200, 257
    found = [choose.__wrapped__("e4m3", (512, 4096), False, rows, 1, MAX_ROWS, HOPPER) for rows in counts]
    assert [each == launch for each in found] == [False, True, True, False, True, False]
    assert found[0] is None
    assert None not in found[1:]


def test_more_rows_are_cut_where_that_takes_less_with_the_parts(monkeypatch):
    """512 rows of Qwen3-32B's `down` are 80 blocks of 256, one for some of 132 multiprocessors: cut in three each has
    two of a third. Parts of 8,192 rows would be too large.
    """
    monkeypatch.setattr(kernel, "load_table", lambda: TunedTable(132, "", {}))
    cuts = [
        choose.__wrapped__("e4m3", shape, False, rows, 3, MAX_ROWS, HOPPER).splits
        for shape, rows in (((5120, 25600), 512), ((4096, 14336), 1024), ((5120, 25600), 8192))
    ]
    assert cuts == [3, 1, 1]


def test_joined_slots_are_as_many_as_there_is_room_for():
    launch = kernel.launch_of("int4", 4096, (128, 128), 1, HOPPER)
    assert (launch.row_slots, launch.code_slots) == (11, 5)
    assert joined(launch) == replace(launch, row_slots=10, code_slots=5, joined=True)
    assert joined(joined(launch)) == joined(launch)
    assert joined(replace(launch, row_slots=5)).code_slots == 2


@pytest.mark.parametrize(("lines", "rows", "block"), [(6144, 128, 64), (6400, 128, 128), (6144, 129, 128)])
def test_nvfp4_whose_k_is_not_cut_has_blocks_of_64_rows_where_most_multiprocessors_had_none(lines, rows, block):
    """Of 128, and of 17 to 32 where blocks of half a tile are too many. Where k is cut there are programs enough."""
    few = [choose.__wrapped__("halves", (6144, 1024), False, each, 1, MAX_ROWS, HOPPER) for each in (16, 17, 32)]
    assert [each and each.block_m for each in few] == [None, 64, 64]
    assert choose.__wrapped__("halves", (4096, 1024), False, 32, 1, MAX_ROWS, HOPPER) is None
    launch = choose.__wrapped__("halves", (lines, 1024), False, rows, 1, MAX_ROWS, HOPPER)
    assert launch.block_m == block
    assert choose.__wrapped__("halves", (lines, 1024), False, rows, 2, MAX_ROWS, HOPPER).block_m >= 128


def test_fp8_in_groups_is_the_plain_kernel_s_up_to_64_rows():
    made = weight(QuantScheme("e4m3", 128))
    found = [isinstance(choose_product(made, False, rows, HOPPER, False, True), GluonLaunch) for rows in (64, 65)]
    assert found == [False, True]


def test_up_to_64_rows_the_plain_kernel_serves_where_it_was_measured(monkeypatch):
    measured = QuantizedLaunch(64, 1, 4, 4)
    table = TunedTable(132, "", {("e4m3", 256, 512, False, 64): measured})
    monkeypatch.setattr(plain, "load_table", lambda: table)
    plain.choose_quantized.cache_clear()
    found = [choose_product(weight(), False, rows, HOPPER, False, True) for rows in (32, 33, 64, 65)]
    plain.choose_quantized.cache_clear()
    assert found[1] == found[2] == measured
    assert isinstance(found[3], GluonLaunch)


@pytest.mark.parametrize(
    ("scheme", "dtype", "gpu", "why"),
    [
        (BY_ROW, torch.bfloat16, HOPPER, None),
        (QuantScheme("e4m3", 128), torch.bfloat16, HOPPER, None),
        (QuantScheme("int4", 128), torch.bfloat16, HOPPER, None),
        (QuantScheme("e2m1", 32, "e8m0"), torch.bfloat16, HOPPER, None),
        (QuantScheme("e2m1", 16, "times"), torch.bfloat16, HOPPER, None),
        (BY_ROW, torch.float16, HOPPER, "not decoded in bfloat16"),
        (QuantScheme("int4", 32), torch.bfloat16, HOPPER, "groups of 32"),
        (QuantScheme("e2m1", 16, "over"), torch.bfloat16, HOPPER, "divided by a factor"),
        (BY_ROW, torch.bfloat16, replace(HOPPER, has_tensor_memory=True), "9.0 alone"),
        (BY_ROW, torch.bfloat16, replace(HOPPER, shared_bytes=99 << 10), "9.0 alone"),
        (BY_ROW, torch.bfloat16, replace(HOPPER, can_overlap=False), "9.0 alone"),
    ],
    ids=str,
)
def test_what_is_not_its_own_is_told(scheme, dtype, gpu, why):
    told = why_not(weight(scheme), dtype, gpu)
    assert told is None if why is None else why in told


def test_weights_that_it_cannot_read_are_told(monkeypatch):
    made = weight(QuantScheme("int4", 128))
    assert "zeros" in why_not(replace(made, zero=made.scale), torch.bfloat16, HOPPER)
    assert "bfloat16" in why_not(replace(made, wide=True), torch.bfloat16, HOPPER)
    assert "multiple of 8" in why_not(replace(made, shape=(256, 508)), torch.bfloat16, HOPPER)
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: "no Gluon here")
    assert why_not(made, torch.bfloat16, HOPPER) == "no Gluon here"


def test_few_rows_and_what_is_not_its_own_stay_with_plain_triton():
    made = weight()
    assert isinstance(choose_product(made, False, FEWEST_ROWS, HOPPER, False, True), GluonLaunch)
    assert isinstance(choose_product(made, False, FEWEST_ROWS - 1, HOPPER, False, True), QuantizedLaunch)
    assert isinstance(choose_product(made, False, FEWEST_ROWS, HOPPER, False, False), QuantizedLaunch)
    assert choose_product(made, False, MAX_ROWS, HOPPER, True, True).splits == 1


def test_a_stage_is_left_out_where_a_second_program_then_has_room():
    """Of FP8 in blocks, whose scales lie in stages, of 33 to 64 rows without Gluon; of smaller stages not."""
    lines, k = 28672, 4096
    for scheme, rows, gpu, less in (
        (QuantScheme("e4m3", 128), 64, HOPPER, 1),
        (QuantScheme("e4m3", 128), 32, HOPPER, 0),
        (QuantScheme("e4m3", 128), 64, replace(HOPPER, has_tensor_memory=True), 0),
        (BY_ROW, 64, HOPPER, 0),
        (QuantScheme("int4", 128), 64, HOPPER, 0),
    ):
        made = replace(weight(scheme, 256, k), shape=(lines, k))
        of_numbers = choose_quantized(scheme.numbers, (lines, k), True, rows, gpu)
        chosen = choose_product(made, True, rows, gpu, False, False)
        assert chosen == replace(of_numbers, num_stages=of_numbers.num_stages - less), (scheme, rows)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_many_rows_go_to_it_and_to_the_library_where_it_is_not(gated, whole, monkeypatch):
    """As an engine's products do it; with `whole` the library has none."""
    taken = []

    def take(x, weight, *_, launch, gpu):
        taken.append(type(launch).__name__)
        return x.new_zeros((len(x), 128) if gated else (launch.splits, len(x), 256))

    monkeypatch.setattr(packed, "quantized_gated" if gated else "quantized_gemm", take)
    library = lambda self, rows: taken.append("library") or rows.new_zeros(len(rows), 128 if gated else 256)  # noqa: E731
    by_rows = coded_weight(256, 512, BY_ROW, torch.device("cpu"))
    for kind in (TiledLinear, TiledGated):
        monkeypatch.setattr(kind, "_by_library", library)
    if gated:
        made = TiledGated(tile(in_turn(by_rows.halves())), None, "silu", HOPPER, whole)
    else:
        made = TiledLinear(tile(by_rows), None, HOPPER, whole)
    multiply = made if gated else made.parts

    def asked():
        taken.clear()
        for rows, dtype in ((8, torch.bfloat16), (128, torch.bfloat16), (MAX_ROWS + 1, torch.bfloat16)):
            multiply(torch.zeros(rows, 512, dtype=dtype))
        multiply(torch.zeros(MAX_ROWS + 1, 512, dtype=torch.float16))
        return list(taken)

    plain, ours, rest = "QuantizedLaunch", "GluonLaunch", "QuantizedLaunch" if whole else "library"
    assert asked() == [plain, ours, ours, rest]
    made._by_gluon = False
    assert asked() == [plain, plain, rest, rest]


def test_why_many_rows_are_not_its_own_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: "this Triton has none")
    packed._tell.cache_clear()
    with caplog.at_level("INFO", "treetop.weights.packed"):
        for _ in range(2):
            TiledLinear(weight(), None, HOPPER)
    assert [each.getMessage() for each in caplog.records] == [
        "products of many rows with packed weights are not in Gluon: this Triton has none"
    ]
