"""What launches of products with packed weights took on an H200, and that those that are chosen are fast ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.operation_cases import coded_weight
from treetop.kernels.gemm import quantized_gemm as plain
from treetop.kernels.gemm import quantized_gluon as gluon
from treetop.kernels.gemm.quantized_gemm import (
    MAX_ROWS,
    QuantizedLaunch,
    choose_product,
    choose_quantized,
    splits_of,
    up_to,
)
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.tiles import BLOCK, NUMBERS, TILE, tile
from treetop.kernels.triton_guard import GpuTraits

KEPT = json.loads((Path(__file__).parents[2] / "benchmarks/quantized_launches.json").read_text(encoding="utf-8"))
"""By product, format and rows: us of the best launch, and of the rule's where that is another."""
HOPPER = GpuTraits(132, True, 227 << 10, True)
KINDS = {"fp8-channel": "e4m3", "w4a16": "folded", "nvfp4": "levels", "mxfp4": "e8m0", "nvfp4-bits": "halves"}
"""Of each format that was measured."""
MODELS = {"llama-3.1-8b", "qwen3-8b", "qwen3-32b", "glm-4.5-air", "gpt-oss-120b", "qwen3-next"}
TABLES = plain.TABLE, gluon.TABLE


def entries(path):
    return json.loads(path.read_text(encoding="utf-8"))["entries"]


def cells():
    """A product, kind, the class of rows, and by how much the rule is slower than the best."""
    found = {}
    for name, formats in KEPT.items():
        for each, counts in formats.items():
            for rows, us in counts.items():
                over = us[1] / us[0] if isinstance(us, list) else 1.0
                found.setdefault((name, KINDS[each], max(16, int(rows))), []).append(over)
    return found


def test_products_of_each_model_were_measured_in_each_format():
    assert {name.split()[0] for name in KEPT} == MODELS
    for name, formats in KEPT.items():
        assert set(formats) == set(KINDS), name
        for each, counts in formats.items():
            assert {"1", "16", "64", "128", "256", "512", "1024"} <= set(counts), (name, each)


def test_a_launch_that_is_slower_than_the_best_has_an_entry():
    """1 and 16 rows share one, so it is there where both are slower."""
    named = {(each["name"], each["kind"], each["rows"]) for path in TABLES for each in entries(path)}
    slow = {cell for cell, over in cells().items() if min(over) > 1.03}
    assert slow
    assert slow <= named


def test_an_entry_is_worth_it():
    """But for kinds that are no format's today (W4A16 with zeros or scales in float16, NVFP4 whose scales are no
    halves), measured before scales lay ready, and those of many rows that the kernel in Gluon does not serve."""
    over = cells()
    for path in TABLES:
        for each in entries(path):
            if path == plain.TABLE and each["rows"] == MAX_ROWS:
                assert each["gated"]
            elif each["kind"] in KINDS.values():
                assert max(over[each["name"], each["kind"], each["rows"]]) > 1.03, each


SCHEMES = {
    "e4m3": QuantScheme("e4m3", 0),
    "folded": QuantScheme("int4", 128),
    "levels": QuantScheme("e2m1", 16, "e4m3"),
    "e8m0": QuantScheme("e2m1", 32, "e8m0"),
    "halves": QuantScheme("e2m1", 16, "times"),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_engines_take_an_entry_as_it_is(kind):
    """Of up to 64 rows and of more, for the most rows of its class and for fewer. Under `bits` k is not cut."""
    weight, found = weight_of(kind), [(plain.load_table(), False), (gluon.load_table(), True)]
    for (name, *shape, rows), launch, by_gluon in (
        (*each, by) for table, by in found for each in table.entries.items()
    ):
        if name == kind:
            (lines, k, gated), fewest = shape[:3], next((one for one in (513, 257, 129, 65, 33, 17) if one <= rows), 1)
            for count in (rows, fewest):
                made, by = replace(weight, shape=(lines, k)), by_gluon or rows <= 64
                assert choose_product(made, gated, count, HOPPER, kind == "halves", by) == launch, (shape, count)


def weight_of(kind):
    """Of the kind, with scales that let it be."""
    weight = coded_weight(128, 256, SCHEMES[kind], torch.device("cpu"))
    if weight.scheme.scales == "float32":
        weight = replace(weight, scale=torch.full_like(weight.scale, 2.0**-8))
    elif weight.factor is not None:
        weight = replace(weight, factor=weight.factor * 2.0**-12)
    made = tile(weight, torch.bfloat16)
    assert made.kind == kind
    return made


def test_entries_of_few_rows_can_run_and_have_the_splits_of_the_rule():
    for (kind, lines, k, gated, rows), launch in plain.load_table().entries.items():
        assert isinstance(launch, QuantizedLaunch)
        assert up_to(rows) == rows
        assert launch.block_n % TILE == 0
        assert launch.splits == (1 if gated or kind == "halves" else splits_of(lines, k, HOPPER))
        codes = launch.block_n * BLOCK // (1 if NUMBERS[kind] == "e4m3" else 2)
        stage = 2 * BLOCK * min(128, max(16, rows)) + codes
        assert launch.num_stages * stage <= HOPPER.shared_bytes
        assert choose_quantized(kind, (lines, k), gated, rows, HOPPER) == launch


def test_halves_have_blocks_of_half_a_tile_where_programs_are_fewer_than_multiprocessors():
    """k is not cut. Of 17 to 32 rows only where these are no more than multiprocessors, too."""
    half, whole = QuantizedLaunch(TILE // 2, 1, 4, 2), QuantizedLaunch(TILE, 1, 3, 2)
    for lines, rows, launch in ((132 * TILE, 16, half), (133 * TILE, 16, whole), (66 * TILE, 32, half)):
        assert choose_quantized("halves", (lines, 1024), False, rows, HOPPER, True) == launch
    for kind, lines, gated, rows in (
        ("halves", 67 * TILE, False, 32),
        ("halves", 64, True, 16),
        ("levels", 64, False, 16),
    ):
        assert choose_quantized(kind, (lines, 1024), gated, rows, HOPPER, True).block_n == TILE


def test_k_is_cut_so_that_blocks_of_many_rows_leave_no_multiprocessor_idle():
    """5,120 lines in four would be 160 blocks of 256 rows on 132 multiprocessors; in three they are 120."""
    shapes = {(5120, 25600): 3, (4096, 14336): 4, (28672, 4096): 1, (2880, 4096): 4, (5120, 2880): 3, (64, 128): 1}
    assert {shape: splits_of(*shape, HOPPER) for shape in shapes} == shapes
    for lines in (64, 2048, 5120, 10240):
        for blocks in range(1, 40):
            splits = splits_of(lines, blocks * BLOCK, HOPPER)
            assert (splits - 1) * -(-blocks // splits) < blocks
