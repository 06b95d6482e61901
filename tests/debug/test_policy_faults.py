"""Each fault of what decides which trees are verified: its guard says so, and without a guard it does harm."""

import pytest

from treetop_debug.policy_faults import POLICY_FAULTS
from treetop_debug.provoke import find_in_scene

HARM = {
    "deferred-token-skipped": "not what the head drafts",
    "costs-of-another-model": "believed to cost what another's took",
    "costs-of-another-card": "believed to cost what another's took",
    "head-of-another-pair": "a new head begins with chances (0.02,)",
    "calibration-of-another-pair": "a new head begins with temperatures",
    "calibration-of-another-row": "times instead of",
    "shape-buffer-without-k": "the engine stops: RuntimeError",
    "shape-buffer-without-rows": "the engine stops",
    "shape-graph-without-k": "not what the oracle gives: tree",
    "shape-graph-without-rows": "not what the oracle gives",
    "shape-proposals-stale": "not what the oracle gives: tree",
}


@pytest.mark.parametrize("name", POLICY_FAULTS)
def test_it_is_caught_and_does_harm_where_nobody_looks(name):
    found = find_in_scene(POLICY_FAULTS[name])
    assert found.caught is not None, "its guard said nothing"
    assert POLICY_FAULTS[name].guard in found.caught
    assert HARM[name] in (found.harm or ""), found.harm


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_FAULTS)
def test_without_it_the_scene_is_quiet(name, tmp_path):
    """At the level of its guard, and where none looks: what is called harm comes of the fault alone."""
    fault = POLICY_FAULTS[name]
    assert fault.scene(tmp_path / "guarded", fault.level or 0) == ""
    if not name.startswith("costs-of-another"):  # its engines measure, which takes the longest
        assert fault.scene(tmp_path / "quiet", -1) == ""
