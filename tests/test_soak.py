"""The form `engine` of `scripts/soak.py`, short and on the CPU: nothing leaks, fires or changes, and it can tell."""

import importlib
import sys
from pathlib import Path

import pytest

from support.engines import build
from support.grids import few_of
from treetop_debug.faults import fault

ROUNDS = 300
SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("soaks.engine")
    for name in [each for each in sys.modules if each.partition(".")[0] == "soaks"]:
        del sys.modules[name]


def small(pair, **options):
    """Four rows in a pool of one context and a little, so that requests are retracted."""
    tight = {"context_length": 96, "max_running_requests": 4, "max_total_tokens": 120, "chunked_prefill_size": 24}
    return build(pair, (4, 5, 16), **{"page_size": 4, "check_level": 2, **tight, **options})


def fresh(pair):
    return small(pair, max_total_tokens=None, graphs="off", check_level=1, disable_radix_cache=True)


@pytest.mark.parametrize(
    "options",
    [
        {"graphs": "sim", "check_level": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"disable_radix_cache": True}, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_short_soak_ends_clean(script, strong_pair, options):
    """Float64, 300 rounds: requests finish, are aborted and retracted; a fresh engine gives their tokens.

    Who asks for little while rounds run meets less in them: it goes on until all of that has happened.
    """
    llm = small(strong_pair, **options)
    soak = script.Soak(llm, seed=3, sample=20)

    def lacks(done) -> bool:
        return min(done.aborted, llm.scheduler.num_retractions, done.largest_batch - 1, done.finished // 20) == 0

    summary = soak.run(ROUNDS, lacks)
    soak.compare(fresh(strong_pair))
    assert summary.failures == []
    assert summary.rounds >= ROUNDS
    assert summary.finished + summary.aborted == summary.arrived
    assert min(summary.aborted, summary.retractions, summary.idle_checks) > 0
    assert (summary.compared, summary.ties, summary.unequal) == (20, 0, 0)
    assert summary.largest_batch > 1


@pytest.mark.parametrize(
    ("name", "words"), few_of([("unaligned-allocation", "InvariantError"), ("in-place-compaction", "otherwise")], 0)
)
def test_a_soak_sees_a_leak_and_a_wrong_token(script, strong_pair, name, words):
    """Two bugs put back at level 0, where no guard looks."""
    with fault(name):
        soak = script.Soak(small(strong_pair, check_level=0), seed=3, sample=20)
        summary = soak.run(ROUNDS)
    soak.compare(fresh(strong_pair))
    assert any(words in failure for failure in summary.failures), summary.failures


def test_a_soak_sees_a_probe(script, strong_pair):
    """A draft state that is not finite ends the soak with the probe's words."""
    llm = small(strong_pair)
    soak = script.Soak(llm, seed=3, sample=20)
    tell = llm.engine.observer

    def spoil(*args):
        tell(*args)
        llm.engine.runner.state.draft.hidden.fill_(float("nan"))

    llm.engine.observer = spoil
    assert "detect_nan" in soak.run(ROUNDS).failures[0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_soak(script, strong_pair):
    """Arrivals, aborts and what is compared follow the seed."""
    runs = []
    for _ in range(2):
        soak = script.Soak(small(strong_pair), seed=5, sample=8)
        summary = soak.run(60)
        runs.append((summary.finished, summary.aborted, summary.tokens, [each.ids for each in soak.sample]))
    assert runs[0] == runs[1]
