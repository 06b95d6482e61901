"""Profiles without a model: chances give the chains that they were made of, raw ranking what was measured of trees."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from treetop.speculative.profile import profile_names, read_profile


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("acceptance_profiles")
    sys.modules.pop("acceptance_profiles", None)


def chain_length(chances, steps):
    length, reached = 1.0, 1.0
    for depth in range(steps):
        reached *= chances[min(depth, len(chances) - 1)]
        length += reached
    return length


def test_chances_of_every_profile_give_its_chains(bench):
    for profile in (read_profile(f"builtin:{name}") for name in profile_names()):
        chains = {shape.num_steps: length for shape, length in profile.measured.items() if shape.topk == 1}
        assert len(chains) >= 3
        for chances in (profile.chances, bench.chances_by_depth(chains)):
            found = [chain_length(chances, steps) for steps in chains]
            assert found == pytest.approx(list(chains.values()), abs=2e-3)


@pytest.mark.parametrize("chains", [{3: 2.643, 5: 3.03, 7: 3.385}, {1: 2.0}, {3: 2.5, 5: 2.4}])
def test_chains_that_no_chances_below_1_give_are_refused_by_name(bench, chains):
    with pytest.raises(ValueError, match=rf"a chain of {max(chains)} steps.*Measure on more prompts"):
        bench.chances_by_depth(chains)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi-k2", "qwen3-235b-a22b"])
def test_raw_ranking_gives_what_was_measured_and_calibration_mends_it(bench, name, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 12)
    profile = read_profile(f"builtin:{name}")
    chain, tree = profile.measured[bench.CHAIN], profile.measured[bench.TREE]
    assert bench.accept_length(profile, bench.CHAIN, False) == pytest.approx(chain, rel=0.03)
    assert bench.accept_length(profile, bench.TREE, False) == pytest.approx(tree, rel=0.03)
    assert tree < chain < bench.accept_length(profile, bench.TREE, True)


@pytest.mark.slow
def test_no_scale_changes_a_chain_or_a_calibrated_tree(bench, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 12)
    profile = read_profile("builtin:llama-3.1-8b")

    def lengths(scale):
        cases = (bench.CHAIN, False), (bench.TREE, False), (bench.TREE, True)
        return [bench.accept_length(replace(profile, scale=scale), *case) for case in cases]

    (chain, raw, learned), (other_chain, other_raw, other_learned) = lengths(1.0), lengths(0.4)
    assert chain == other_chain
    assert other_raw < other_chain < raw
    assert learned == pytest.approx(other_learned, rel=0.03)


@pytest.mark.slow
def test_a_fit_finds_the_scale_that_it_was_drawn_with(bench, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 8)
    profile = replace(read_profile("builtin:qwen3-30b-a3b"), scale=0.6)
    tree = bench.accept_length(profile, bench.TREE, False)
    found = bench.fitted(replace(profile, scale=1.0, measured={**profile.measured, bench.TREE: tree}))
    assert found.scale == pytest.approx(0.6, rel=0.03)
    assert found.share == profile.share
