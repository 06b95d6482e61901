"""`return_draft_trees`: the trees that rounds verified come with their tokens, for whoever asks and nobody else."""

from dataclasses import replace

import pytest

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.grids import few_of
from treetop import LLM, StructuredOutput
from treetop.outputs import RequestOutput
from treetop.types.errors import InputError
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingParams

SHAPE = (3, 3, 9)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine finds masks late, and rounds would go on without drafts."""
    monkeypatch.setattr("treetop.scheduler.scheduler._PATIENCE_S", 60.0)


def asking(params: SamplingParams) -> SamplingParams:
    return replace(params, return_draft_trees=True)


def check_against_tokens(output: RequestOutput, shape=SHAPE) -> None:
    """The trees' paths and the depths both spell the output: the first token, then each round's."""
    spelled, depths = [output.token_ids[0]], [0]
    for tree, accept_len in zip(output.trees, output.metrics.accept_lens, strict=True):
        assert len(tree.tokens) == len(tree.parents) == len(tree.logprobs) == shape[2]
        assert all(parent < node for node, parent in enumerate(tree.parents) if node)
        assert all(tree.parents[node] == up for up, node in zip(tree.path, tree.path[1:], strict=False))
        assert len(tree.path) == accept_len + 1
        assert tree.tokens[0] == spelled[-1], "the root is the token before"
        spelled += [*(tree.tokens[node] for node in tree.path[1:]), tree.bonus]
        depths += [*range(1, accept_len + 1), 0]
    count = len(output.token_ids)
    assert tuple(spelled[:count]) == output.token_ids
    assert tuple(depths[:count]) == output.draft_depths


@pytest.mark.parametrize("options", few_of([{"overlap": False}, {"overlap": True, "graphs": "sim"}], 1))
def test_trees_spell_the_output_and_change_none(strong_pair, options):
    """In a mixed batch of which two ask, in overlapped rounds too: their trees, and no others."""
    prompts, asked = strong_pair.prompts([5, 9, 17, 30]), [greedy(24), sampled(3, 24), greedy(24), greedy(24)]
    llm = build(strong_pair, SHAPE, max_running_requests=3, **options)
    plain = llm.generate(prompts, asked)
    outputs = llm.generate(prompts, [asking(asked[0]), asking(asked[1]), *asked[2:]])
    assert tokens(outputs) == tokens(plain)
    for output in outputs[:2]:
        check_against_tokens(output)
        assert any(any(tree.path[1:]) for tree in output.trees)
    assert not any(output.trees for output in (*outputs[2:], *plain))
    assert [each.draft_depths for each in plain] == [each.draft_depths for each in outputs]


def test_a_tree_goes_on_behind_what_a_structure_forces(weak_pair):
    """All that must come is drafted, as deep as a tree may be, and behind it the head's own proposals."""
    llm, text = build(weak_pair, SHAPE, overlap=False), "abcde("
    held = StructuredOutput("regex", r"abcde\([a-k]{8}")
    (output,) = llm.generate(weak_pair.prompts([9]), asking(SamplingParams(max_tokens=12, structured_output=held)))
    llm.close()
    assert output.text[:6] == text
    deep, short = output.trees[:2]
    assert output.metrics.accept_lens[0] == len(deep.path) - 1 == 3
    only = short.tokens.index(output.token_ids[5])
    assert short.parents[only] == 0, "the last that is forced"
    assert short.parents.count(only) == 3, "the head's own"


def test_a_told_tree_is_the_one_that_the_engine_has_verified(strong_pair):
    """As its observer sees it, log-probabilities to the bit; rounds of others copy none."""
    llm, seen = build(strong_pair, SHAPE, overlap=False), []
    llm.engine.observer = lambda plan, tree, accepted: seen.append((plan, tree, accepted))
    output = llm.generate(strong_pair.prompts([9]), asking(greedy(12)))[0]
    llm.engine.observer = None
    assert len(output.trees) == len(seen) > 2
    for told, (plan, tree, accepted) in zip(output.trees, seen, strict=True):
        assert plan.told_trees == plan.rows
        assert list(told.tokens) == tree.tokens[0].tolist()
        assert list(told.parents) == tree.parent[0].tolist()
        assert list(told.logprobs) == tree.logprob[0].tolist()
        assert list(told.path) == accepted.path[0, : len(told.path)].tolist()
        assert told.bonus == int(accepted.bonus[0])


def test_a_round_of_whom_nobody_asks_copies_no_trees(strong_pair):
    """Also beside requests that have asked and have ended."""
    llm, copied = build(strong_pair, SHAPE, overlap=False), []
    post = llm.engine._staging.post

    def noted(slot, results, record, *behind):
        copied.append(results.trees is not None)
        return post(slot, results, record, *behind)

    llm.engine._staging.post = noted
    submit(llm, strong_pair.prompts([5, 9]), [asking(greedy(6)), greedy(40)])
    steps = [*pump(llm)]
    told = [plan.told_trees if isinstance(plan, RoundPlan) else () for plan, _ in steps]
    assert copied == [bool(rows) for rows in told]
    assert [len(rows) for rows in told] == [sum(each.tree is not None for each in updates) for _, updates in steps]
    assert {True, False} == set(copied[2:])


def test_a_round_without_drafts_has_no_tree_and_an_engine_without_refuses(strong_pair):
    """So has one of a request that accepts no draft."""
    output = build(strong_pair, SHAPE).generate(
        strong_pair.prompts([5]), replace(asking(greedy(8)), speculative=False)
    )[0]
    assert output.trees == ()
    assert set(output.draft_depths) == {0}
    plain = build(strong_pair, None)
    with pytest.raises(InputError, match="return_draft_trees: this engine drafts no trees"):
        plain.generate(strong_pair.prompts([5]), asking(greedy(8)))


def test_a_held_request_is_told_the_tree_that_was_verified():
    """Its host has changed what the draft had grown: what the structure forces stands in the tree."""
    held = StructuredOutput(
        "json_schema", '{"properties": {"forced name": {"enum": [1, 2]}}, "required": ["forced name"]}'
    )
    llm = LLM()
    output = llm.generate("A list:", SamplingParams(max_tokens=12, structured_output=held, return_draft_trees=True))[0]
    shape = llm.config.shape
    check_against_tokens(output, (shape.topk, shape.num_steps, shape.num_draft_tokens))
    assert max(output.metrics.accept_lens) > 0


def test_trees_of_a_lookup_are_told_too(strong_pair):
    """It has no head."""
    llm = build(strong_pair, None, speculative_algorithm="NGRAM")
    output, shape = llm.generate([[1, 2, 3, 4, 5] * 6], asking(greedy(24)))[0], llm.config.shape
    check_against_tokens(output, (shape.topk, shape.num_steps, shape.num_draft_tokens))
