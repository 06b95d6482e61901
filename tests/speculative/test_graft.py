"""Grafts: continuations of the text beside a head's candidates in one table, and no token depends on them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import accept_lens, build, greedy, sampled, tokens
from support.grids import few_of
from support.oracles import float32
from support.refusing import refused
from support.round_ops import Buffers, identity, random_calibration, random_children, random_tables, shapes, sown_growth
from treetop import ConfigError, EngineConfig
from treetop.doctor.conformance import RandomShapes
from treetop.kernels.tree.graft import LONGEST, SHORTEST, graft, trust
from treetop.kernels.tree.grow import grow_reference, start_reference
from treetop.kernels.tree.select import select_reference
from treetop.kernels.tree.tree import ancestor_mask

GRAFT = {"speculative_ngram_graft": 3}
ALPHABET = 40


def line_of(ids, steps):
    """By a slow search: what followed the longest match of the text's end, and how long the match is."""
    found = (0, 0)
    for place in range(len(ids) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and ids[place - length] == ids[len(ids) - 1 - length]:
            length += 1
        found = max(found, (length, place))
    length, place = found
    rest = ids[place + 1 :]
    return length, [rest[i % len(rest)] for i in range(steps)] if length else []


@given(shape=shapes(1), count=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_line_joins_the_heads_candidates_as_far_as_they_say_the_same(shape, count, seed):
    """Parents, depths and scores by linked nodes; the tree has no orphan, no two siblings alike, and the best nodes."""
    rng, rows = random.Random(seed), 3
    count = min(count, shape.num_steps)
    texts = [[rng.randrange(4) for _ in range(rng.randint(2, 30))] for _ in range(rows)]
    text = torch.full((6, 40), 77, dtype=torch.int32)
    listed = torch.tensor(rng.sample(range(5), rows))
    tables = random_tables(rng, 6, 8)
    for row, ids in zip(listed.tolist(), texts, strict=True):
        text[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        tables.committed[row], tables.root[row] = len(ids) - 1, ids[-1]
    growth = sown_growth(shape, rows, random_calibration(rng, shape.num_steps, 6), count)
    tree, places, _ = Buffers.make().of(rows, shape)
    frontier = start_reference(tables, listed, growth, tree, places, identity(shape))
    for level in range(shape.num_steps - 1):
        children = random_children(rng, rows, shape.topk, 8)
        children.tokens.copy_(torch.tensor([[rng.sample(range(6), shape.topk)] * shape.topk for _ in range(rows)]))
        frontier = grow_reference(growth, level, frontier, children)
    before = growth.scores.clone()
    graft(growth.head, growth.graft, text, listed, places.committed)
    select_reference(growth, tree, places)

    k, n = shape.topk, shape.num_candidates
    for row, ids in enumerate(texts):
        length, line = line_of(ids, shape.num_steps)
        worth, score = [], 0.0
        for i in range(len(line)):
            score += float(trust(torch.tensor(length + i)).log())
            worth.append(score)
        ups = [-1, *range(k), *growth.parents[row, k + 1 :].tolist()]
        at, shared, want = -1, 0, before[row].tolist()
        while length >= SHORTEST and shared < shape.num_steps:
            groups = [g for g in range(1 + (shape.num_steps - 1) * k) if ups[g] == at]
            below = [g * k + r for g in groups for r in range(k)]
            same = [flat for flat in below if int(growth.tokens[row, flat]) == line[shared]]
            if not same:
                break
            at = same[0]
            want[at] = max(want[at], float32(worth[shared]))
            shared += 1
        torch.testing.assert_close(growth.scores[row], torch.tensor(want), rtol=1e-5, atol=1e-6)
        left = list(range(shared, shape.num_steps))[:count] if length >= SHORTEST else []
        assert growth.graft.tokens[row, : len(left)].tolist() == [line[i] for i in left]
        assert growth.graft.depth[row, : len(left)].tolist() == [i + 1 for i in left]
        assert growth.graft.parents[row].tolist()[: len(left)] == [at, *range(n, n + count)][: len(left)]
        assert bool((growth.graft.scores[row, len(left) :] == float("-inf")).all())

    assert torch.equal(tree.depth[:, 1:], tree.depth.gather(1, tree.parent)[:, 1:] + 1)
    assert bool((tree.parent[:, 1:] < torch.arange(1, shape.num_draft_tokens)).all())
    assert torch.equal(tree.mask, ancestor_mask(tree.parent, shape.num_steps))
    everything = torch.cat([growth.scores, growth.graft.scores], dim=1)
    best = everything.sort(dim=1, descending=True).values[:, : shape.num_draft_tokens - 1]
    torch.testing.assert_close(tree.logprob[:, 1:].sort(dim=1, descending=True).values, best)


def ranks_of(outputs):
    return {rank for output in outputs for ranks in output.metrics.accept_ranks for rank in ranks}


WAYS = [
    ((1, 4, 5), {}),
    ((4, 3, 12), {"graphs": "sim", "check_level": 3}),
    ((1, 4, 5), {"overlap": True, "check_level": 2, "page_size": 2}),
    ((4, 3, 12), {"max_total_tokens": 260, "context_length": 120, "max_running_requests": 3}),
    ((4, 3, 12), {}),
    ((1, 4, 5), {"graphs": "sim", "check_level": 3}),
    ((4, 3, 12), {"overlap": True, "check_level": 2, "page_size": 2}),
    ((1, 4, 5), {"max_total_tokens": 260, "context_length": 120, "max_running_requests": 3}),
]


@pytest.mark.parametrize(("shape", "options"), few_of(WAYS, 0, 1, 2, 3))
def test_tokens_are_those_of_plain_decoding(strong_pair, shape, options):
    """Float64, greedy and drawn: ragged batches, chunks, prefixes from the cache; grafted drafts are accepted."""
    base = strong_pair.prompts([24, 5, 9])
    prompts = [*base, base[0] + [8], base[0][:16] + base[1], base[1] * 3]
    params = [greedy(40), sampled(1, 40), greedy(36), sampled(2, 40, top_p=0.9), greedy(40), sampled(7, 40)]
    llm = build(strong_pair, shape, chunked_prefill_size=8, **GRAFT, **options)
    want = tokens(build(strong_pair, None, context_length=120).generate(prompts, params))
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert tokens(outputs) == want
        llm.scheduler.check_integrity()
    assert [list(map(len, each.metrics.accept_ranks)) for each in outputs] == [[*each] for each in accept_lens(outputs)]
    assert -1 in ranks_of(outputs), "no grafted draft was accepted, so nothing was tested"


@pytest.mark.parametrize("options", [{}, {"graphs": "sim", "check_level": 3, "overlap": True}], ids=str)
def test_with_shapes_that_switch_and_a_calibration_that_learns(strong_pair, options):
    """Plain rounds write the text too, and what the head's proposals teach has nothing of the grafts."""
    prompts, params = strong_pair.prompts([24, 5, 9]), [greedy(40), sampled(1, 40), greedy(40)]
    more = {"speculative_policy": "auto", "speculative_max_deferred": 4, "speculative_calibration": "learn"}
    llm = build(strong_pair, (3, 3, 9), **GRAFT, **more, **options)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(build(strong_pair, None).generate(prompts, params))
    calibration = llm.engine.runner.state.calibration
    assert bool((calibration.chosen.sum(dim=2) <= calibration.seen[:, :, 0] + 1e-3).all())


def test_rows_without_a_match_have_the_heads_trees(strong_pair):
    """A first round after a prompt without repetition, beside one of an engine without grafts."""
    prompt, trees = list(range(2, 11)), []
    for more in ({}, GRAFT):
        llm = build(strong_pair, (3, 3, 9), **more)
        llm.engine.observer = lambda plan, tree, accepted: trees.append(tree)
        llm.generate([prompt], greedy(2))
    ids = [*prompt, int(trees[0].tokens[0, 0])]
    assert line_of(ids, 3)[0] < SHORTEST
    for name in ("tokens", "parent", "depth", "mask", "logprob"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft": None}, "--speculative-ngram-graft grafts on the trees of a draft head"),
        ({"draft": None, "speculative_algorithm": "NGRAM"}, "--speculative-ngram-graft grafts on the trees"),
        ({"simulate_acceptance": "builtin:nestling"}, "--speculative-ngram-graft proposes from right tokens"),
        ({"speculative_ngram_graft": -1}, "--speculative-ngram-graft must"),
    ],
)
def test_what_a_graft_does_not_go_with_is_refused(options, words):
    refused(ConfigError, lambda: EngineConfig.of(None, **{**GRAFT, **options}), words)
