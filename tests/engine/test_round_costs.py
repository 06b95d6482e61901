"""What rounds cost, measured at start: kept for the next start, never another engine's, and without a trace."""

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.engines import build
from treetop.engine.startup import round_costs
from treetop.engine.startup.round_costs import read, smoothed, write
from treetop.types.costs import CatchUpCost, CostTable, RoundCost
from treetop.types.errors import CheckError, ConfigError
from treetop.types.layout import PLAIN, SpecShape
from treetop_debug.patching import Patch, replaced

TREE = SpecShape(2, 3, 6)
AUTO = {"speculative_policy": "auto", "max_running_requests": 2, "context_length": 64}


def engine(pair, **options):
    return build(pair, (2, 3, 6), **{**AUTO, **options}).engine


def test_a_start_measures_every_shape_and_the_next_one_reads_it(strong_pair, monkeypatch):
    """By buckets of rows; the second engine of the same kind measures nothing, one with another shape does."""
    measured = []
    real = round_costs.measure
    monkeypatch.setattr(round_costs, "measure", lambda *args: measured.append(args) or real(*args))
    first, second = engine(strong_pair), engine(strong_pair)
    assert len(measured) == 1
    assert first.costs == second.costs
    assert {(each.rows, each.shape) for each in first.costs.rounds} == {
        (rows, shape) for rows in (1, 2) for shape in first.layout.shapes
    }
    assert all(each.seconds > 0 and each.seconds_per_token >= 0 for each in first.costs.rounds)
    assert [each.rows for each in first.costs.catch_ups] == [1, 2]
    assert engine(strong_pair, speculative_shapes="1,1,2 3,2,6").costs.made_for != first.costs.made_for
    assert len(measured) == 2


def test_measuring_leaves_no_trace(strong_pair, monkeypatch, tmp_path):
    """Rows, proposals and null pages are as an engine has them that never measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = engine(strong_pair)
    state, size = made.runner.state, made.layout.page_size
    tables = [*state.record.tables.values(), *state.deferred.tables, *(t.data for t in state.page_tables.values())]
    assert not any(bool(table.any()) for table in tables)
    assert not any(bool(pool.data[:, :size].any()) for pool in made.runner.pools.values())


def test_an_engine_of_one_shape_measures_nothing(strong_pair):
    made = build(strong_pair, (2, 3, 6), max_running_requests=2).engine
    assert made.costs is None
    assert made.runner.state.deferred is None


def test_the_costs_of_another_model_are_caught(strong_pair, weak_pair, monkeypatch, tmp_path):
    """A fault: one file for all engines. Level 1 sees whose the table is; without it the wrong one is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def one_for_all(real):
        return lambda made_for: real("costs")

    with replaced((Patch("treetop.engine.startup.round_costs:cost_file", one_for_all),)):
        other = engine(strong_pair)
        assert engine(strong_pair).costs == other.costs
        with pytest.raises(CheckError, match="round costs: those at hand are of another engine"):
            engine(weak_pair)
        assert engine(weak_pair, check_level=0).costs == other.costs, "it does harm where no guard looks"


def test_costs_are_of_a_card_its_driver_and_our_kernels_not_of_a_host(strong_pair, monkeypatch):
    """A table of another card, or of other kernels, is another's; one of another host with this card is not."""
    made = engine(strong_pair)
    plan = replace(made._plan, place=replace(made._plan.place, device=torch.device("cuda")))
    found = []
    for card, host in (("a", "one"), ("a", "two"), ("b", "two")):
        monkeypatch.setattr(round_costs.probed_products, "identity", lambda device, card=card: card)
        monkeypatch.setattr(os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        found.append(round_costs.identity(plan, made.runner))
    assert found[0] == found[1] != found[2]
    assert made.costs is not None
    with pytest.raises(CheckError, match="those at hand are of another engine"):
        round_costs.check_made_for(replace(made.costs, made_for=found[0]), found[2])


def test_a_file_that_is_none_of_ours_counts_as_none(tmp_path):
    table = CostTable("x", (RoundCost(1, TREE, 0.5, 0.0),), (CatchUpCost(1, 0.1),))
    write(tmp_path / "new" / "a.json", table)
    assert read(tmp_path / "new" / "a.json") == table
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "b.json").write_text("{")
    assert read(tmp_path / "b.json") is None
    for other in (
        "[]",
        '{"rounds": 3}',
        '{"made_for": "x", "catch_ups": [], "rounds": [{"rows": 1, "shape": {"topk": 0}}]}',
    ):
        (tmp_path / "b.json").write_text(other)
        assert read(tmp_path / "b.json") is None
    assert read(tmp_path / "c.json") is None
    write(tmp_path / "b.json" / "d.json", table)  # no folder: the next start measures


ROUND = {
    "rows": 1,
    "shape": {"num_steps": 0, "topk": 1, "num_draft_tokens": 1},
    "seconds": 1.0,
    "seconds_per_token": 0.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": []},
        *({"rounds": [{**ROUND, "seconds": value}]} for value in (-1.0, 0.0, math.inf, math.nan, 10**400)),
        *({"rounds": [{**ROUND, "rows": value}]} for value in (0, -1, math.inf, 10**400)),
        *({"rounds": [{**ROUND, "seconds_per_token": value}]} for value in (-1.0, math.inf, math.nan)),
        {"catch_ups": [{"rows": 0, "seconds": 1.0}]},
        {"catch_ups": [{"rows": 1, "seconds": 0.0}]},
    ],
)
def test_numbers_that_are_no_costs_count_as_none(changes, tmp_path):
    """A policy would divide by them."""
    whole = {"made_for": "x", "rounds": [ROUND], "catch_ups": []}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    assert read(tmp_path / "a.json") is not None
    (tmp_path / "a.json").write_text(json.dumps({**whole, **changes}))
    assert read(tmp_path / "a.json") is None


def test_what_is_no_file_of_json_counts_as_none(tmp_path):
    """Deep, not UTF-8, a folder, and a pipe, which nobody waits for."""
    (tmp_path / "deep").write_text("[" * 200_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert [read(tmp_path / name) for name in ("deep", "bytes", "folder", "pipe")] == [None] * 4


def test_a_table_without_an_engines_shapes_is_measured_anew(strong_pair, monkeypatch, tmp_path):
    """It says that it is of this engine, and costs of one shape are missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = engine(strong_pair)
    (file,) = tmp_path.rglob("*.json")
    for short in ({"rounds": tuple(each for each in first.costs.rounds if each.shape == PLAIN)}, {"catch_ups": ()}):
        write(file, replace(first.costs, **short))
        assert engine(strong_pair).costs.shapes == first.costs.shapes
        assert len(read(file).catch_ups) == len(first.costs.catch_ups)


def test_a_smaller_round_takes_no_longer_than_a_larger_one():
    """What was late, for the machine had other work, is brought back; larger rounds stay as they are."""
    times = {(1, PLAIN): 9.0, (2, PLAIN): 2.0, (1, TREE): 3.0, (2, TREE): 8.0}
    costs = smoothed([RoundCost(rows, shape, seconds, 0.0) for (rows, shape), seconds in times.items()])
    assert [each.seconds for each in costs] == [2.0, 2.0, 3.0, 8.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_shapes": "5,4"}, "a shape is S,k,T"),
        ({"speculative_shapes": "0,1,1"}, "there is no tree among them"),
        ({"speculative_shapes": "2,1,5"}, "no chain has"),
        ({"speculative_shapes": "1,1,2", "speculative_policy": "fixed"}, "is for --speculative-policy auto"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_are_refused(strong_pair, options, words):
    with pytest.raises(ConfigError, match=words):
        engine(strong_pair, **options)


def test_a_policy_without_a_draft_is_refused(strong_pair):
    with pytest.raises(ConfigError, match="--speculative-policy auto needs a draft"):
        build(strong_pair, None, speculative_policy="auto")
