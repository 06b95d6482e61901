"""What launches of products with packed weights took on an H200, and that those that are chosen are fast ones."""

import json
from pathlib import Path

from treetop.kernels.gemm import quantized_gemm as plain
from treetop.kernels.gemm import quantized_gluon as gluon
from treetop.kernels.gemm.quantized_gemm import MAX_ROWS, QuantizedLaunch, choose_quantized, splits_of, up_to
from treetop.kernels.gemm.tiles import BLOCK, TILE
from treetop.kernels.triton_guard import GpuTraits

KEPT = json.loads((Path(__file__).parents[2] / "benchmarks/quantized_launches.json").read_text(encoding="utf-8"))
"""By product, format and rows: us of the best launch, and of the rule's where that is another."""
HOPPER = GpuTraits(132, True, 227 << 10, True)
NUMBERS = {"fp8-channel": "e4m3", "w4a16": "int4", "nvfp4": "e2m1", "mxfp4": "e2m1"}
MODELS = {"llama-3.1-8b", "qwen3-8b", "qwen3-32b"}


def entries(path):
    return json.loads(path.read_text(encoding="utf-8"))["entries"]


def cells():
    """A product, numbers, the class of rows, and by how much each format's rule is slower than the best."""
    found = {}
    for name, formats in KEPT.items():
        for each, counts in formats.items():
            for rows, us in counts.items():
                over = us[1] / us[0] if isinstance(us, list) else 1.0
                found.setdefault((name, NUMBERS[each], max(16, int(rows))), []).append(over)
    return found


def test_products_of_each_model_were_measured_in_each_format():
    assert {name.split()[0] for name in KEPT} == MODELS
    for name, formats in KEPT.items():
        assert set(formats) == set(NUMBERS), name
        for counts in formats.values():
            assert {"256", "512", "1024"} <= set(counts), name


def test_a_launch_that_is_slower_than_the_best_has_an_entry():
    """Formats of the same numbers share one, 1 and 16 rows too, so it is there where all of them are slower."""
    named = {(each["name"], each["numbers"], each["rows"]) for path in TABLES for each in entries(path)}
    slow = {cell for cell, over in cells().items() if min(over) > 1.03}
    assert slow
    assert slow <= named


TABLES = plain.TABLE, gluon.TABLE


def test_an_entry_is_worth_it():
    """But for those that the kernel in Gluon does not serve, which were measured before."""
    over = cells()
    for path in TABLES:
        for each in entries(path):
            if path == plain.TABLE and each["rows"] == MAX_ROWS:
                assert each["gated"]
            else:
                assert max(over[each["name"], each["numbers"], each["rows"]]) > 1.03, each


def test_entries_of_few_rows_can_run_and_have_the_splits_of_the_rule():
    for (numbers, lines, k, gated, rows), launch in plain.load_table().entries.items():
        assert isinstance(launch, QuantizedLaunch)
        assert up_to(rows) == rows
        assert launch.block_n % TILE == 0
        assert launch.splits == (1 if gated else splits_of(lines, k, HOPPER))
        codes = launch.block_n * BLOCK // (1 if numbers == "e4m3" else 2)
        stage = 2 * BLOCK * min(128, max(16, rows)) + codes
        assert launch.num_stages * stage <= HOPPER.shared_bytes
        assert choose_quantized(numbers, (lines, k), gated, rows, HOPPER) == launch


def test_k_is_cut_so_that_blocks_of_many_rows_leave_no_multiprocessor_idle():
    """5,120 lines in four would be 160 blocks of 256 rows on 132 multiprocessors; in three they are 120."""
    shapes = {(5120, 25600): 3, (4096, 14336): 4, (28672, 4096): 1, (2880, 4096): 4, (5120, 2880): 3, (64, 128): 1}
    assert {shape: splits_of(*shape, HOPPER) for shape in shapes} == shapes
    for lines in (64, 2048, 5120, 10240):
        for blocks in range(1, 40):
            splits = splits_of(lines, blocks * BLOCK, HOPPER)
            assert (splits - 1) * -(-blocks // splits) < blocks
