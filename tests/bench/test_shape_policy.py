"""The policy in modelled time, on production trees: it comes near the best shape, and loses little where none pays."""

import importlib
import sys
from pathlib import Path

import pytest

from support.grids import few_of


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("shape_policy")
    for name in ("shape_policy", "acceptance_profiles"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "rows"), few_of([("builtin:llama-3.1-8b", 2), ("builtin:kimi-k2", 16)], 0))
def test_it_comes_near_the_best_fixed_shape(bench, name, rows, monkeypatch):
    monkeypatch.setattr(bench, "_PROBED", 64)
    (found,) = bench.figures(name, [rows], 260, learns=True)
    assert found.best_speed > 1.2
    assert found.over_best > 0.9
    assert sum(found.shapes.values()) == 260 - bench.FIRST


def test_a_head_that_is_never_right_costs_little(bench, monkeypatch):
    monkeypatch.setattr(bench, "_PROBED", 16)
    (found,) = bench.figures(bench.NEVER, [8], 300, learns=True)
    assert found.best == "0,1,1"
    assert found.best_speed == 1.0
    assert found.auto_speed > 0.97


def test_rounds_are_those_of_production(bench):
    """Shapes share one calibration, which every tree that runs teaches."""
    load = bench.Load(bench.drawn("builtin:llama-3.1-8b"), 64, learns=True)
    for _ in range(60):
        load.round()
    assert float(load._calibration.nodes[0, 0]) > 0
    assert len({shape for shape, *_ in load.rounds}) > 1
    assert load.speed(0) > 0.9
