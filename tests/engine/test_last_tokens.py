"""The last layer of a prefill and of a draft's extend goes on with the tokens alone whose states are read."""

from dataclasses import replace

import pytest
import torch

from support.engines import accept_lens, build, greedy, sampled, submit, tokens
from treetop.engine import model_runner
from treetop.models.target import LastTokens

SHAPE = (1, 3, 4)


def seen_by(module, name) -> list[tuple[int, ...]]:
    """Shapes of what a part of a layer is given from now on, without the width."""
    seen, real = [], getattr(module, name)
    setattr(module, name, lambda x, *others: seen.append(tuple(x.shape[:-1])) or real(x, *others))
    return seen


def test_a_prefill_leaves_out_what_nobody_reads(strong_pair, monkeypatch):
    """Of three chunks of one prompt none but the last is read; another layer has all tokens."""
    monkeypatch.setattr(model_runner, "FEW_TOKENS", 0)
    llm = build(strong_pair, SHAPE, chunked_prefill_size=16, context_length=128)
    target, drafter = llm.engine.runner.target, llm.engine.runner.drafter
    first, last, head = seen_by(target.layers[0], "mlp"), seen_by(target.layers[-1], "mlp"), seen_by(drafter, "mlp")
    submit(llm, strong_pair.prompts([40]), greedy(1))
    for _ in range(3):
        plan = llm.scheduler.plan()
        llm.scheduler.commit(plan, llm.engine.collect(llm.engine.launch(plan)))
    assert sum(n for _, n in first) == 40
    assert last == head == [(1, 1)] * 3


def test_an_extend_of_few_tokens_makes_all_states(strong_pair, monkeypatch):
    """A launch more, and no gain: up to so many tokens of all rows."""
    shapes = {}
    for few in (8, 7):
        monkeypatch.setattr(model_runner, "FEW_TOKENS", few)
        llm = build(strong_pair, SHAPE)
        head = seen_by(llm.engine.runner.drafter, "mlp")
        llm.generate(strong_pair.prompts([3, 3]), greedy(6))
        shapes[few] = {*head}
    assert (2, 4) in shapes[8]
    assert (2, 4) not in shapes[7]
    assert (2, 1) in shapes[7]


@pytest.mark.parametrize("shape", [SHAPE, (4, 3, 12)])
def test_nothing_else_changes(strong_pair, monkeypatch, shape):
    """Tokens, what is accepted and log-probabilities in float64, in ragged batches and chunks, with requests that ask
    for their prompts' log-probabilities between them.
    """
    prompts = strong_pair.prompts([5, 33, 17, 1, 9])
    params = [greedy(20), sampled(1, 16), greedy(9, whole=True), sampled(2, 12, logprobs=2)]
    params.append(replace(greedy(4), prompt_logprobs=1))
    found = []
    for whole in (False, True):
        monkeypatch.setattr(model_runner, "FEW_TOKENS", 10**9 if whole else 0)
        llm = build(strong_pair, shape, dtype="float64", chunked_prefill_size=16, page_size=4, context_length=96)
        llm.engine.runner.target._may_leave_early = not whole
        outputs = llm.generate(prompts, params)
        logprobs = torch.tensor([each.logprob for output in outputs for each in output.logprobs or ()])
        found.append((tokens(outputs), accept_lens(outputs), logprobs))
    (ours, accepted, told), (all_of, accepted_of_all, told_of_all) = found
    assert (ours, accepted) == (all_of, accepted_of_all)
    torch.testing.assert_close(told, told_of_all, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fault", ["columns", "lines"])
def test_the_wrong_token_shows(strong_pair, monkeypatch, fault):
    """Whatever the test above compares would be another, were it the token before or another line's."""
    prompts = strong_pair.prompts([33, 17, 9])
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(12)))
    real = model_runner.LastTokens

    def wrong(columns, ops):
        return real((columns - 1).clamp(min=0) if fault == "columns" else columns.flip(0), ops)

    monkeypatch.setattr("treetop.engine.prefill.LastTokens", wrong)
    assert tokens(build(strong_pair, None).generate(prompts, greedy(12))) != expected


def test_what_is_picked_of_parts_and_of_masks(strong_pair):
    """Of the first lines their columns, of each part of a sum; padding stays padding for experts."""
    ops = build(strong_pair, None).engine.runner.ops
    last = LastTokens(torch.tensor([2, 0]), ops)
    parts = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    assert torch.equal(last.of(parts[0]), torch.stack([parts[0, 0, 2], parts[0, 1, 0]])[:, None])
    assert torch.equal(last.of_parts(parts), torch.stack([last.of(part) for part in parts]))
    live = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert last.of_mask(live.flatten(), 4).tolist() == [True, False]
    assert last.of_mask(None, 4) is None
