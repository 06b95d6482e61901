"""What is known of a head at a start: what was learned of the pair, what its folder says, or a default."""

import json
import shutil
from dataclasses import replace

import pytest

from support.engines import build
from support.shape_loads import DrawnHead
from treetop.checkpoints.fingerprint import fingerprint
from treetop.distributed.open import core_of
from treetop.engine.startup.kept_head import FILE, head_file
from treetop.llm import LLM
from treetop.scheduler.acceptance import AcceptanceEstimate
from treetop.scheduler.acceptance_probs import head_of
from treetop.scheduler.policy import AdaptiveShape
from treetop.speculative.profile import read_profile
from treetop.types.changes import UpdateWeights
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.costs import HeadAcceptance
from treetop.types.errors import CheckpointError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingParams

AUTO = {
    "speculative_policy": "auto",
    "speculative_calibration": "off",
    "max_running_requests": 1,
    "context_length": 256,
    "device": "cpu",
}
CHAIN, TREE = SpecShape(1, 5, 6), SpecShape(4, 5, 16)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_embedded_head_says_in_its_folder_what_its_profile_says():
    llm = LLM(BUILTIN_MODEL, BUILTIN_DRAFT, **AUTO, speculative_shapes="1,1,2")
    profile, policy = read_profile("builtin:nestling"), llm.scheduler.policy
    assert llm.engine.experience.head.acceptance == HeadAcceptance(profile.chances, profile.share)
    assert isinstance(policy, AdaptiveShape)
    assert f"of a head as {FILE} of its folder says" in policy.expectation()
    llm.close()


def test_what_is_learned_in_service_is_what_the_next_start_begins_with(weak_pair, caplog):
    """Rounds of a head that accepts next to nothing; only the cache folder is written to."""
    files = sorted(weak_pair.head.iterdir())
    options = {**AUTO, "speculative_shapes": "2,1,3", "max_running_requests": 2}
    llm = LLM(str(weak_pair.target), str(weak_pair.head), **options)
    before, policy = llm.engine.experience.head.acceptance, llm.scheduler.policy
    assert before == HeadAcceptance()
    assert isinstance(policy, AdaptiveShape)
    went_on, note = list[bool](), policy.note

    def counted(plan, result, *took):
        went_on.extend(len(row.tokens) > 1 for row in result.rows if isinstance(plan, RoundPlan))
        note(plan, result, *took)

    policy.choose, policy.note = (lambda *batch: SpecShape(1, 2, 3)), counted
    llm.generate([[number] for number in range(8)], SamplingParams(max_tokens=60, ignore_eos=True))
    llm.close()
    with caplog.at_level("INFO", logger="treetop"):
        llm = LLM(str(weak_pair.target), str(weak_pair.head), **options)
    after = llm.engine.experience.head.acceptance
    llm.close()
    assert "expects, of a head as it was here" in caplog.text
    seen = 2 * 64
    assert after.best[0] == pytest.approx((sum(went_on[:seen]) + 64 * 0.76) / (seen + 64), abs=0.02)
    assert after != before
    assert sorted(weak_pair.head.iterdir()) == files


def test_other_weights_are_another_head(strong_pair, weak_pair):
    """After weights were replaced the policy begins with what is known of the new pair."""
    made = build(strong_pair, (2, 3, 6), **{**AUTO, "context_length": 64}).engine
    made.experience.head.keep(HeadAcceptance((0.9,), 0.3))
    core = core_of(made, made)
    policy = core.scheduler.policy
    assert isinstance(policy, AdaptiveShape)
    policy.regret_budget, policy.shape = 0.0, made.layout.shapes[-1]
    core.prepare(UpdateWeights(str(strong_pair.target), str(strong_pair.head)))()
    assert made.experience.head.acceptance == HeadAcceptance((0.9,), 0.3)
    assert policy.learned().best == pytest.approx((0.9,) * 3)
    assert (policy.shape, policy.regret_budget) == (PLAIN, 3.0)


def test_a_file_in_the_folder_is_read_checked_and_no_part_of_the_pair(strong_pair, tmp_path):
    """A profile of acceptance is such a file; one that is none is refused by name; the pair stays the same pair."""
    folder = tmp_path / "head"
    shutil.copytree(strong_pair.head, folder)
    pair = replace(strong_pair, head=folder)
    before = fingerprint(folder)

    def start():
        return build(pair, (1, 1, 2), **{**AUTO, "context_length": 64, "speculative_shapes": "1,1,2"}).engine.experience

    (folder / FILE).write_text(json.dumps({"source": "here", "chances": [0.4, 0.3], "share": 0.2, "tail": 7}))
    assert fingerprint(folder) == before
    made = start()
    assert made.head.acceptance == HeadAcceptance((0.4, 0.3), 0.2)
    assert made.head.file == head_file(made.head.pair)
    made.head.keep(HeadAcceptance((0.6,), 0.4))
    assert start().head.acceptance == HeadAcceptance((0.6,), 0.4), "what was seen goes before what is said"
    made.head.file.write_text('{"chances": [2]}')
    assert start().head.acceptance == HeadAcceptance((0.4, 0.3), 0.2), "a file that is none of ours counts as none"
    made.head.file.unlink()
    for wrong in ([], {"chances": [], "share": 0.2}, {"chances": [1.5], "share": 0.2}, {"chances": [0.5]}):
        (folder / FILE).write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=FILE):
            start()


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("true", [HeadAcceptance((0.9, 0.5, 0.3), 0.45), HeadAcceptance((0.3, 0.2), 0.45)])
def test_rounds_show_the_chances_by_depth(shape, true):
    """By what is accepted alone, of a head that was thought to be another; of depths that few paths get to, about."""
    known, rows = AcceptanceEstimate([shape], HeadAcceptance()), DrawnHead(true)
    for _ in range(1000):
        paths = [rows.path(shape) for _ in range(8)]
        known.note(shape, [len(path) for path in paths], paths)
    found = known.learned()
    assert found.at(0) == pytest.approx(true.at(0), abs=0.03)
    assert found.at(1) == pytest.approx(true.at(1), abs=0.06)


def test_counts_show_the_chances_by_depth_and_rank():
    """A calibration's counts of all classes; depths that were never seen are as they were thought to be."""
    seen = [[[1000.0, 1000.0], [0.0, 0.0]], [[1000.0, 1000.0], [0.0, 0.0]], [[0.0, 0.0]] * 2]
    chosen = [[[500.0, 200.0], [0.0, 0.0]], [[300.0, 200.0], [0.0, 0.0]], [[0.0, 0.0]] * 2]
    found = head_of((seen, chosen), HeadAcceptance((0.8, 0.7), 0.45))
    assert found.best[0] == pytest.approx(0.4, abs=0.02)
    assert found.best[1] == pytest.approx(0.7)
    assert found.share == pytest.approx(0.2 / 0.6, abs=0.02)
