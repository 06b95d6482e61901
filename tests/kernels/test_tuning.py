"""Tables of measured launches and backends: every entry is what its class gets, and what lies between gets the nearest.

The nearest is found again here by walking outward in powers of two, without a distance.
"""

from dataclasses import replace
from itertools import product

import pytest

from treetop.attention import auto
from treetop.kernels.attention import attention_config as attention
from treetop.kernels.gemm import quantized_gemm, scaled_mm, skinny_gemm
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable, nearest, parted, read_table

MEASURED = GpuTraits(132, True, 227 << 10)
OTHERS = [replace(MEASURED, num_sms=84), replace(MEASURED, can_overlap=False)]
TABLES = {module.__name__: module.load_table for module in (auto, attention, quantized_gemm, scaled_mm, skinny_gemm)}


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_is_found_on_its_gpu_alone(name):
    table = TABLES[name]()
    assert len(table.entries) > 5
    for key, entry in table.entries.items():
        assert table.find(key, MEASURED) is entry
        assert all(table.find(key, gpu) is None for gpu in OTHERS)


def test_every_product_of_the_tables_gets_its_launch():
    for (n, k, gated, rows), entry in skinny_gemm.load_table().entries.items():
        launch, whole = entry["launch"], entry.get("whole", {}).get("launch")
        found = skinny_gemm.choose_launch(rows, n, k, gated, MEASURED)
        assert found == (launch and skinny_gemm.RowsLaunch(*launch))
        assert skinny_gemm.measured_no_split_k(rows, n, k, gated, MEASURED) == (
            whole and skinny_gemm.RowsLaunch(*whole)
        )
        few = skinny_gemm.choose_launch(rows * 3 // 4, n, k, gated, MEASURED)
        if rows in (64, 128) and found is not None:
            assert few == replace(found, tiled=False)
            assert skinny_gemm.choose_launch(rows * 3 // 4 + 1, n, k, gated, MEASURED) == found
    for (kind, lines, k, gated, rows), launch in quantized_gemm.load_table().entries.items():
        assert quantized_gemm.choose_quantized(kind, (lines, k), gated, rows // 2 + 1, MEASURED) == launch
        assert quantized_gemm.choose_quantized(kind, (lines, k), gated, rows, MEASURED) == launch
        assert quantized_gemm.choose_quantized(kind, (lines, k), gated, rows, MEASURED, whole=True).splits == 1
    for key, (rows,) in scaled_mm.load_table().entries.items():
        lines, k, group, gated = key
        assert scaled_mm.library_from((lines, k), group, gated, MEASURED) == rows


def steps(size):
    """`size`, and then a half, twice, a quarter, four times ..."""
    return [size, *(int(size * 2.0**power) for step in range(1, 25) for power in (-step, step))]


def test_a_class_of_attention_has_the_launch_of_the_nearest_keys():
    table = attention.load_table().entries
    for rest, keys in product({name.rsplit(" keys", 1)[0] for name in table}, [2**power for power in range(6, 22)]):
        there = (name for near in steps(keys) if (name := f"{rest} keys{near}") in table)
        assert nearest(f"{rest} keys{keys}", table, ("keys",)) == next(there)
    assert nearest("tail h1x1x1e1 rows1 n1 keys64", table, ("keys",)) is None


@pytest.mark.parametrize("calls", ["tail h8x4x128e2", "causal h8x4x128e2", "tail h4x8x128e2"])
def test_a_class_of_auto_is_answered_by_the_nearest_rows_and_queries_then_keys(calls):
    """Nothing in between is nearer: each way away is a number of halvings or doublings."""
    table = auto.load_table()
    alike = {
        name: sizes for name in table.entries for rest, sizes in [parted(name, auto.SIZES)] if rest == calls.split()
    }
    fewest = min((sizes["n"] for sizes in alike.values()), default=None)
    for rows, n, keys in product((1, 4, 8, 64, 256), (1, 4, 16, 512, 8192), (64, 2048, 16384, 1 << 20)):
        found = auto.nearest_measured(f"{calls} rows{rows} n{n} keys{keys}", table)
        if fewest is None or n < fewest:
            assert found is None
            continue

        def away(sizes, wanted=(rows, n, keys)):
            halvings = [abs(a.bit_length() - b.bit_length()) for a, b in zip(sizes.values(), wanted, strict=True)]
            return halvings[0] + halvings[1], halvings[2], *sizes.values()

        assert away(alike[found]) == min(map(away, alike.values()))


def test_sizes_are_told_from_words_that_end_in_a_number():
    assert parted("tail h8x4x128e2 rows1 n16 keys2048", ("n", "keys")) == (
        ["tail", "h8x4x128e2", "rows1"],
        {"n": 16, "keys": 2048},
    )


def test_a_table_that_is_not_there_is_empty_and_holds_for_no_gpu(tmp_path):
    table = read_table(tmp_path / "none.json", dict)
    assert table == TunedTable(0, "", {})
    assert not table.holds_for(MEASURED)
