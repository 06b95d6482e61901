"""Which rounds tell the policy what a calibration has counted."""

from itertools import cycle, islice

from treetop import LLM, SamplingParams
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.layout import PLAIN
from treetop.types.messages import RoundPlan


def test_rounds_with_drafts_tell_counts_and_of_plain_ones_the_first_of_eight(monkeypatch):
    options = {"speculative_policy": "auto", "speculative_calibration": "learn", "speculative_shapes": "2,1,3"}
    llm = LLM(BUILTIN_MODEL, BUILTIN_DRAFT, max_running_requests=2, **options)
    tree = next(shape for shape in llm.engine.layout.shapes if shape != PLAIN)
    turns, seen, collect = cycle([tree, *[PLAIN] * 11]), [], llm.engine.collect

    def collected(step):
        result = collect(step)
        if isinstance(step.plan, RoundPlan):
            seen.append((step.plan.shape == tree, result.proposals is not None))
        return result

    monkeypatch.setattr(llm.scheduler.policy, "choose", lambda *_: next(turns))
    monkeypatch.setattr(llm.engine, "collect", collected)
    llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True))
    told = cycle([(True, True), *[(False, False)] * 7, (False, True), *[(False, False)] * 3])
    assert len(seen) > 24
    assert seen == [*islice(told, len(seen))]
