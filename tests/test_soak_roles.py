"""The soak of `scripts/soak.py roles`, short, with ranks as threads: nothing leaks or changes, and it can tell."""

import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from support.addresses import addresses
from treetop import LLM
from treetop_debug.faults import fault
from treetop_debug.patching import Patch, replaced

SCRIPTS = Path(__file__).parent.parent / "scripts"
OPTIONS = {"speculative": "3,2,6", "ranks": 2, "device": "cpu", "dtype": "float64", "graphs": "sim", "check_level": 2}
SIZES = {"page_size": 4, "context_length": 96, "slot_bytes": 1 << 17}


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("soaks.roles")
    sys.path.remove(str(SCRIPTS))
    for name in [each for each in sys.modules if each.partition(".")[0] == "soaks"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(script, tmp_path_factory):
    return script.save_tiny(tmp_path_factory.mktemp("glm"))


def soak(script, model, rounds, seed=4, spoil=lambda run: None, sample=30, **changes):
    """A summary. spoil: is told of the soak before it compares. sample: finished requests that are compared."""
    config = script.config_of(Namespace(**{**OPTIONS, **SIZES, **changes}), model)
    fresh = LLM(**script.alone(config))
    with script.both_groups(config, addresses(config.ep_size), threads=True) as groups:
        run = script.SoakRoles(*groups, lambda rng: script.random_params(rng, fresh), seed)
        summary = run.run(rounds)
    spoil(run)
    run.compare(fresh, sample)
    fresh.close()
    return summary


@pytest.mark.parametrize(
    ("rounds", "idle", "changes"),
    [
        (60, 0, {"check_level": 3}),
        pytest.param(3000, 0.3, {}, marks=pytest.mark.slow),
        pytest.param(1000, 0.3, {"ranks": 4, "speculative": "3,1,4"}, marks=pytest.mark.slow),
    ],
)
def test_groups_with_roles_run_long_and_clean(script, model, rounds, idle, changes):
    """Ranks without rows, in a share `idle` of many rounds; aborts; what was finished equals a fresh engine's.

    Of few rounds that share is for threads to say: there is one at least.
    """
    done = soak(script, model, rounds, **changes)
    assert done.failures == []
    assert done.rounds >= rounds
    assert done.finished + done.aborted == done.arrived
    assert done.idle_rounds >= idle * done.rounds
    assert min(done.idle_rounds, done.aborted, done.handed_over, done.imports, done.compared) > 0
    assert (done.ties, done.unequal) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20, 1500])
@pytest.mark.parametrize("name", ["glm-5", "qwen3-next"])
def test_groups_of_other_layers_run_long_and_clean(script, tmp_path, name, rounds):
    """GLM-5.2's kind, past the few keys that its indexers choose, and states that go to another worker."""
    done = soak(script, script.save_tiny(tmp_path, name), rounds)
    assert done.failures == []
    assert min(done.handed_over, done.compared) > 0
    assert (done.ties, done.unequal) == (0, 0)


def _lose(real):
    """A slot that was offered is not free again."""

    def free(machine, index):
        slot = machine.slots[index]
        if slot.state == "offered" and slot.export is not None:
            slot.export.slots.discard(index)
        else:
            real(machine, index)

    return free


def test_it_sees_a_lost_slot_a_lost_page_and_a_wrong_token(script, model):
    with replaced([Patch("treetop.disaggregation.prefill:PrefillMachine._free", _lose)]):
        assert any("are offered, and of no export" in each for each in soak(script, model, 40, sample=1).failures)
    with fault("unaligned-allocation"):
        assert any("+ leased" in each for each in soak(script, model, 20, sample=1, check_level=0).failures)

    def spoil(run):
        run.finished[0].ids[-1] ^= 1

    every = 10_000
    assert any("otherwise" in each for each in soak(script, model, 20, spoil=spoil, sample=every).failures)
