"""The soak of `scripts/soak.py kills`, short: what is killed is started again, no answer changes, and it can tell."""

import asyncio
import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from treetop import LLM
from treetop.types.errors import EngineError

SCRIPTS = Path(__file__).parent.parent / "scripts"
OPTIONS = {"speculative": "3,2,6", "ranks": 2, "device": "cpu", "dtype": "float64", "graphs": "sim", "check_level": 2}
SIZES = {"page_size": 4, "context_length": 96, "slot_bytes": 1 << 17}
SOAK = {"seed": 1, "kind": "ep", "seconds": 20.0, "every": 5.0, "stopped_seconds": 2.0, "clients": 6}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("soaks.kills")
    for name in [each for each in sys.modules if each.partition(".")[0] == "soaks"]:
        del sys.modules[name]


@pytest.mark.slow
def test_workers_whose_ranks_are_killed_answer_as_one_engine_does(script, tmp_path):
    pytest.importorskip("nixl_cu12", reason="needs NIXL")
    args = Namespace(**OPTIONS, **SIZES, **SOAK)
    config = script.config_of(args, script.save_tiny(tmp_path))
    fresh = LLM(**script.alone(config))
    run = asyncio.run(script.soak(args, config, fresh))
    run.compare(fresh, 20)
    done = run.summary
    assert done.failures == []
    assert done.errors.keys() <= {script.ON_TRIAL}
    assert min(done.finished, done.met_a_strike, done.handed_over, done.compared) > 0
    assert (done.ties, done.unequal) == (0, 0)
    run.finished[0].ids[-1] ^= 1
    run.compare(fresh, len(run.finished))
    fresh.close()
    assert done.unequal == 1
    assert "otherwise" in done.failures[0]


def test_only_errors_that_kills_may_cost_are_no_failure(script):
    run = script.SoakKills({"decode": Namespace(url="http://127.0.0.1:1")}, Namespace(seed=0), lambda: None, 16)
    run._failed(f"an event says: {script.ON_TRIAL}: rank 1 has ended with exit code -9")
    assert run.summary.failures == []
    run._failed(f"HTTP 500: {EngineError('rank 1 has ended with exit code -9')}")
    assert run.summary.failures == ["a request failed: HTTP 500: rank 1 has ended with exit code -9"]
    assert dict(run._errors) == {script.ON_TRIAL: 1, "HTTP N: rank N has ended with exit code -N": 1}


def test_a_pause_is_that_of_the_worst_strike_before_its_end(script):
    def live(*strikes, events):
        met = [script.Strike(role, "a rank", how, at_s, up=at_s < 20) for role, how, at_s in strikes]
        return script.Live([1], None, [2], event_s=events, strikes=met)

    finished = [
        live(("prefill", "killed", 1.0), ("decode", "killed", 4.0), events=[0.5, 1.5, 3.0, 3.5, 9.0]),
        live(("prefill", "killed", 1.0), ("decode", "killed", 4.0), events=[0.5, 3.0, 4.5]),
        live(events=[0.5, 8.0]),
        live(("decode", "stopped", 9.0), events=[0.5, 8.0]),
        live(("prefill", "killed", 20.0), events=[27.5]),  # the decode worker was starting
    ]
    assert script.pauses(finished) == {
        "decode killed": {"median": 6.5, "longest": 7.5},
        "prefill killed": {"median": 2.0, "longest": 2.0},
    }
