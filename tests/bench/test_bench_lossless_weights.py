"""The benchmark of weights in 12 bits, without its times: what it plants, the limits it finds, what it writes."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from treetop.kernels.gemm import skinny_gemm as kernels
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, compress
from treetop.kernels.gemm.skinny_gemm import choose_launch, load_table, row_class
from treetop.kernels.triton_guard import GpuTraits
from treetop.weights.lossless import ROWS, offers

H200 = GpuTraits(132, True, 227 << 10)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script on a CPU, its table a copy, its weights smaller ones, which the table names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    names = "lossless_weights", "skinny_gemm", "frame"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module, tuner, frame = map(importlib.import_module, names)
    shapes = {"small": (8192, 256, False), "gates": (16384, 256, True)}
    entries = [
        {"name": name, "n": n, "k": k, "gated": gated, "rows": rows, "launch": None, "us": 1.0, "vendor_us": 1.0}
        for name, (n, k, gated) in shapes.items()
        for rows in (16, 32, 64)
    ]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"num_sms": 132, "machine": {"gpu": "H200"}, "entries": entries}))
    for each in (module, tuner):
        monkeypatch.setattr(each, "TABLE", table)
    for each in (module, tuner, frame):
        monkeypatch.setattr(each, "DEVICE", torch.device("cpu"))
        monkeypatch.setattr(each, "gpu_traits", lambda _: H200)
    monkeypatch.setattr(kernels, "TABLE", table)
    monkeypatch.setattr(module, "COLD_BYTES", 1)
    monkeypatch.setattr(module, "shapes_here", shapes, raising=False)
    caches = (load_table, offers, choose_launch)
    for each in caches:
        each.cache_clear()
    yield module
    for each in caches:
        each.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


def made_up(shape, rows, case, launches):
    """Us of 16 bits, and of 12: a step of outliers costs more the more rows there are; picks of 32 are the fastest."""
    crowd = case[1][0].crowd if launches else {}
    steps = [-(-crowd[each.block_n] // (each.splits * each.picks)) for each in launches]
    slow = [abs(each.picks - 32) / 100 + (each.block_n > 64) / 10 for each in launches]
    return 100.0, [80.0 + a + b * (1 + rows / 2) for a, b in zip(slow, steps, strict=True)]


def test_every_block_gets_as_many_outliers_as_are_measured(bench):
    for n, k, gated, count in (
        (512, 1024, False, 100),
        (512, 1024, True, 7),
        (256, 14336, False, 448),
        (128, 256, False, 0),
    ):
        small = compress(bench.full(n, k, count), gated)
        assert small.crowd[64] == count
        assert small.starts[-1] == count * n // 64


def test_each_distribution_is_what_it_says(bench):
    torch.manual_seed(0)
    crowds = {}
    for name, make in bench.DISTRIBUTIONS.items():
        weight = make(1024, 1024)
        assert weight.dtype == torch.bfloat16
        small = compress(weight, False)
        crowds[name] = None if small is None else small.crowd[64]
    assert crowds["uniform"] < 16
    assert 100 <= crowds["tile of 100"] < 130
    assert crowds["normal"] < crowds["scaled columns"] < crowds["tile of 100"]
    assert crowds["tile of 400"] is None, "more than a launch has steps for"
    assert crowds["normal"] < crowds["student-t"]
    assert crowds["huge value"] > crowds["normal"]


def test_limits_end_before_the_first_that_is_not_worth_it_and_never_grow_with_the_rows(bench):
    found = {
        1: [(0, 0.8), (64, 0.9), (128, 0.95), (256, 0.98)],
        4: [(0, 0.8), (64, 0.99), (128, 0.9)],
        8: [(0, 0.8), (64, 0.9), (128, 0.9)],
    }
    assert bench.limits_of(found) == {1: 128}
    found[4][1] = (64, 0.96)
    assert bench.limits_of(found) == {1: 128, 4: 128, 8: 128}
    assert bench.limits_of({16: [(0, 0.98)], 32: [(0, 0.5), (64, 0.5)]}) == {}


def test_a_measured_table_is_what_the_engine_then_takes(bench, monkeypatch, capsys):
    """The fastest launch for normal weights with the limits of each number of rows; nothing where it gains nothing."""
    monkeypatch.setattr(bench, "timed", made_up)
    bench.measure_table(bench.shapes_here)
    table = json.loads(bench.TABLE.read_text(encoding="utf-8"))
    assert [e["rows"] for e in table["entries"]] == [16, 32, 64] * 2
    assert ["compressed" in e for e in table["entries"]] == [True, False, False] * 2
    found = offers(*bench.shapes_here["small"], H200)
    launch = LosslessLaunch(64, 1, 3, 4, 32)
    assert {rows: offer.launch for rows, offer in found.items()} == dict.fromkeys((1, 4, 8, 16), launch)
    assert [found[rows].most_outliers for rows in (1, 4, 8, 16)] == [32, 32, 32, 32]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any("outliers_and_ratios" in line for line in lines)


def test_a_line_says_what_is_accepted_and_what_is_slower(bench, monkeypatch):
    """Refused weights are timed where a launch can; only an accepted one can be too slow."""
    monkeypatch.setattr(bench, "timed", made_up)
    bench.measure_table(bench.shapes_here)
    shape = bench.shapes_here["small"]
    lines = {
        name: list(bench.compare("small", shape, name, offers(*shape, H200)))
        for name in ("uniform", "normal", "tile of 100")
    }
    assert [line.rows for line in lines["uniform"]] == list(ROWS)
    assert [line.accepted for line in lines["uniform"]] == [row_class(rows) == 16 for rows in ROWS]
    assert not any(line.accepted for line in lines["tile of 100"])
    assert not any(line.slower for each in lines.values() for line in each)
    monkeypatch.setattr(bench, "timed", lambda *args: (70.0, made_up(*args)[1]))
    slow = list(bench.compare("small", shape, "uniform", offers(*shape, H200)))
    assert [line.slower for line in slow] == [True] * 4 + [False]
    assert slow[0].row().endswith("SLOWER")
    assert "-" in slow[4].row()
