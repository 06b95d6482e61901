"""Each past bug of the field is caught on a GPU too: Triton, and captured rounds where the guard lives in a replay.

Guards of level 1 and 2 and the books of the journal hold in captured rounds. The visibility decoder and the readback of
committed slots are host code inside the phases, so they look at eager rounds on the GPU; that the same faults show in
captured rounds is the dense oracle's to say. On a CPU GraphSim stands for the graphs, for that comparison alone: the
guards have `test_faults.py`.
"""

import pytest
import torch

from treetop.types.errors import TreetopError
from treetop_debug.faults import FAULTS, Fault
from treetop_debug.provoke import Provocation, looks_from_the_host

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLACES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
OF_THE_PHASES = [name for name, found in FAULTS.items() if looks_from_the_host(found)]
SOUND = Fault("sound", "nothing", (), "nothing", 1)


@pytest.fixture(scope="module", params=PLACES)
def provocation(request):
    with Provocation(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def gpu_provocation():
    with Provocation("cuda") as made:
        yield made


@needs_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_on_the_gpu_by_the_guard_that_is_named_for_it(gpu_provocation, name):
    """The words of the guard, in one line, and the context survives."""
    found = FAULTS[name]
    error = gpu_provocation.guarded(found).error
    assert isinstance(error, TreetopError), f"{name}: {error!r}"
    assert found.guard in str(error)
    assert "\n" not in str(error)
    assert torch.ones(3, device="cuda").sum().item() == 3


@needs_gpu
@pytest.mark.parametrize("two_group", [False, True], ids=["embedded pair", "two-group pair"])
def test_no_guard_fires_on_the_sound_engine_on_the_gpu(gpu_provocation, two_group):
    """The scenario runs to its end: captured at level 3, and eagerly at level 3 under the decoder."""
    sound = Fault("sound", "nothing", (), "nothing", 1, seed=0 if two_group else None)
    captured = gpu_provocation.run(sound, 3, place=gpu_provocation.options)
    assert captured.error is None
    eager = gpu_provocation.run(sound, 3, watched=True, place={**gpu_provocation.options, "graphs": "off"})
    assert eager.error is None
    assert captured.overwritten == eager.overwritten == 0
    assert len(captured.tokens) == len(eager.tokens) > 0


def test_the_sound_engine_differs_from_the_oracle_nowhere(provocation):
    """Else the next test would see nothing."""
    assert provocation.captured_difference(SOUND) is None


@pytest.mark.parametrize("name", OF_THE_PHASES)
def test_a_fault_that_only_eager_guards_see_differs_from_the_oracle_in_captured_rounds(provocation, name):
    """Without any guard, trees or tokens of replayed rounds are not what a dense computation gives."""
    assert provocation.captured_difference(FAULTS[name]) is not None


def test_the_faults_whose_guards_no_replay_runs_are_known():
    """Five of seventeen; all others are caught in captured rounds."""
    assert set(OF_THE_PHASES) == {
        "sgl-26628-missed",
        "sgl-26628-twice",
        "sgl-25015",
        "column-ancestors",
        "in-place-compaction",
    }
