"""A request may say `speculative: false`: each round gives it one token, the right one, beside any others."""

from dataclasses import replace

import pytest

from support.engines import accept_lens, build, greedy, pump, sampled, submit, tokens
from support.grids import few_of
from treetop import SamplingParams
from treetop.types.errors import InputError
from treetop.types.layout import PLAIN
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingMode

SHAPE = (3, 3, 9)


@pytest.fixture(autouse=True)
def _leaves_tokens_out(monkeypatch):
    """As extends of many tokens do: the draft's states of lines that nobody reads are not made."""
    monkeypatch.setattr("treetop.engine.model_runner.FEW_TOKENS", 0)


@pytest.mark.parametrize(("policy", "graphs"), few_of([("fixed", "off"), ("auto", "sim")], 1))
def test_no_draft_of_it_is_accepted_and_others_go_on(strong_pair, policy, graphs):
    """In a mixed batch, with windows of requests that come and go, with penalties, log-probabilities and draws."""
    prompts = strong_pair.prompts([5, 9, 17, 30])
    asked = [
        greedy(24, whole=True),
        sampled(3, 24, whole=True),
        replace(greedy(24, whole=True), frequency_penalty=0.5),
        replace(greedy(24, whole=True), logprobs=1),
    ]
    plain = tokens(build(strong_pair, None).generate(prompts, asked))
    llm = build(strong_pair, SHAPE, speculative_policy=policy, graphs=graphs, max_running_requests=3)
    for which in ({0, 2}, {1, 3}, set()):  # rows are used again by the other kind
        params = [replace(each, speculative=index not in which) for index, each in enumerate(asked)]
        outputs = llm.generate(prompts, params)
        assert tokens(outputs) == plain
        for index, lens in enumerate(accept_lens(outputs)):
            assert index not in which or set(lens) == {0}
            assert len(outputs[index].token_ids) == 24
            assert index not in which or not any(outputs[index].metrics.num_drafted)
            assert len(outputs[index].metrics.num_drafted) == len(lens)
        if policy == "fixed":
            assert all(any(lens) for index, lens in enumerate(accept_lens(outputs)) if index not in which)
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("options", [{}, {"disable_logits_processors": True}])
def test_its_batch_changes_no_logits(strong_pair, options):
    """A greedy batch stays one, also where nothing could change logits."""
    prompts = strong_pair.prompts([5, 9, 17])
    plain = tokens(build(strong_pair, None).generate(prompts, greedy(20)))
    llm = build(strong_pair, SHAPE, **options)
    submit(llm, prompts, [replace(greedy(20), speculative=index != 1) for index in range(3)])
    steps = [*pump(llm)]
    assert {plan.choice for plan, _ in steps} == {SamplingMode.GREEDY}
    assert any(plan.no_draft for plan, _ in steps if isinstance(plan, RoundPlan))
    params = [replace(greedy(20), speculative=index != 1) for index in range(3)]
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == plain
    assert [any(lens) for lens in accept_lens(outputs)] == [True, False, True]


def test_structures_and_refusals_hold_beside_each_other(strong_pair):
    """Rounds whose masks the host makes accept nothing of such a request either."""
    llm = build(strong_pair, SHAPE)
    prompts = strong_pair.prompts([5, 9])
    both = [replace(greedy(20), allowed_token_ids=(3, 4, 5, 6)), greedy(20)]
    expected = tokens(llm.generate(prompts, both))
    outputs = llm.generate(prompts, [replace(each, speculative=False) for each in both])
    assert tokens(outputs) == expected
    assert {n for lens in accept_lens(outputs) for n in lens} == {0}


def test_under_auto_a_batch_of_nothing_else_has_plain_rounds(strong_pair):
    llm = build(strong_pair, SHAPE, speculative_policy="auto")
    for speculative in ((False, False), (False, True)):
        submit(
            llm,
            strong_pair.prompts([5, 9]),
            [SamplingParams(max_tokens=30, speculative=each, ignore_eos=True) for each in speculative],
        )
        rounds = [plan for plan, _ in pump(llm) if isinstance(plan, RoundPlan)]
        assert any(speculative) or {plan.shape for plan in rounds} == {PLAIN}
        assert all(len(plan.no_draft) >= speculative.count(False) for plan in rounds if len(plan.rows) == 2)


def test_where_it_cannot_be_honoured_it_is_refused(strong_pair):
    for options, match in (
        ({"simulate_accept_length": 2}, "speculative: this engine withholds no drafts"),
        ({"simulate_acceptance": "builtin:kimi-k2"}, "speculative: this engine withholds no drafts"),
    ):
        llm = build(strong_pair, SHAPE, **options)
        with pytest.raises(InputError, match=match):
            llm.generate(strong_pair.prompts([5]), replace(greedy(4), speculative=False))


def test_log_probabilities_of_what_was_not_drawn_are_refused(strong_pair):
    """Where acceptance is simulated a token is emitted that the target did not draw; a prompt's are what they are."""
    for options in ({"simulate_accept_length": 2}, {"simulate_acceptance": "builtin:kimi-k2"}):
        llm = build(strong_pair, SHAPE, **options)
        with pytest.raises(InputError, match="logprobs: acceptance is simulated"):
            llm.generate(strong_pair.prompts([5]), replace(greedy(4), logprobs=0))
        (output,) = llm.generate(strong_pair.prompts([5]), replace(greedy(4), prompt_logprobs=0))
        assert len(output.prompt_logprobs) == 5
