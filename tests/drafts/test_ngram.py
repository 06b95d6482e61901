"""Drafts looked up in the request's own text: the places found, the trees, and that no output changes."""

import math
import random

import pytest
import torch

from support.engines import accept_lens, build, greedy, sampled, submit, tokens
from support.fake_recorder import FakeRecorder
from support.lookups import lookup
from support.oracles import float32, grow, select
from treetop import LLM
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.ngram import PLACES, NgramLookup, NgramSpec
from treetop.drafts.protocol import Nodes
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.tree.row_text import continued, ending, longest_matches
from treetop.types.errors import ConfigError

COMPARED, SCANNED = 24, 8
SHAPES = [(1, 4, 5), (3, 3, 9), (4, 5, 16)]


def places_of(ids) -> list[tuple[int, int]]:
    """(length of the match, place), longest first, then latest, in plain Python: of the latest that agree so far."""
    found = []
    for place in range(len(ids) - 1):
        length = 0
        while length < min(COMPARED, place + 1) and ids[place - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length:
            found.append((length, place))
    some = sorted(found, key=lambda each: (min(each[0], SCANNED), each[1]), reverse=True)[:PLACES]
    return sorted(some, reverse=True)


def following(ids, place, steps) -> list[int]:
    """The text after a place, which begins again there when it ends."""
    rest = ids[place + 1 :]
    return [rest[i % len(rest)] for i in range(steps)]


def proposals_in(ids, vocab, k, steps):
    """For `oracles.grow`: what the places that agree with a node's path say, by their matches."""
    known = [(length, following(ids, place, steps)) for length, place in places_of(ids)]

    def proposals(node):
        depth, weights = len(node.path), {}
        agreeing = [(n + depth, text) for n, text in known if tuple(text[:depth]) == node.path]
        longest = max((n for n, _ in agreeing), default=0)
        for n, text in agreeing:
            weights[text[depth]] = weights.get(text[depth], 0.0) + 4.0 ** (n - longest)
        total = sum(weights.values())
        order = {text[depth]: -i for i, (_, text) in reversed(list(enumerate(agreeing)))}
        trusted = longest / (longest + 1)
        best = sorted(weights, key=lambda t: (-float32(weights[t]), -order[t]))
        said = [(t, math.log(weights[t] / total * trusted)) for t in best]
        fillers = [(t, -30.0 - t) for t in range(min(k + PLACES, vocab)) if t not in weights]
        return [(t, float32(min(p, 0.0))) for t, p in (said + fillers)[:k]]

    return proposals


@pytest.mark.parametrize("seed", range(20))
def test_places_and_what_followed_are_those_of_a_slow_search(seed):
    rng = random.Random(seed)
    width, alphabet = rng.choice([5, 20, 60]), rng.choice([1, 2, 5])
    rows = [[rng.randrange(alphabet) for _ in range(rng.randint(2, width - 1))] for _ in range(3)]
    text = torch.randint(0, alphabet, (3, width), dtype=torch.int32)  # past its end a row holds anything
    for i, ids in enumerate(rows):
        text[i, : len(ids)] = torch.tensor(ids)
    end = torch.tensor([len(ids) - 1 for ids in rows])
    place, length = longest_matches(text, ending(text, end, COMPARED), end, PLACES)
    after = continued(text, end, place, 6)
    for i, ids in enumerate(rows):
        want = places_of(ids)
        got = [(n, p) for n, p in zip(length[i].tolist(), place[i].tolist(), strict=True) if n]
        assert got == want
        assert after[i, : len(want)].tolist() == [following(ids, p, 6) for _, p in want]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_tree_is_that_of_a_slow_search(strong_pair, shape):
    """Token by token and score by score, over a prompt that repeats itself with variations."""
    k, steps, size = shape
    llm, trees = lookup(strong_pair, shape, chunked_prefill_size=7), []
    llm.engine.observer = lambda plan, tree, accepted: trees.append(tree)
    piece, vocab = strong_pair.prompts([6])[0], strong_pair.config["vocab_size"]
    prompt = [*piece, *piece[:3], 6, *piece, *piece[2:], 9, *piece[:5]]
    (output,) = llm.generate([prompt], greedy(10))
    ids = [*prompt, output.token_ids[0]]
    root, born, _ = grow(ids[-1], k, steps, proposals_in(ids, vocab, k, steps))
    nodes = select(root, born, size)
    assert trees[0].tokens[0].tolist() == [node.token for node in nodes]
    want = torch.tensor([node.score for node in nodes])
    torch.testing.assert_close(trees[0].logprob[0].cpu(), want, rtol=1e-5, atol=1e-5)
    for tree in trees:
        for parent in range(size):
            of = [int(t) for t, p in zip(tree.tokens[0, 1:], tree.parent[0, 1:], strict=True) if p == parent]
            assert len(of) == len(set(of)), "two siblings are one token"


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": "sim", "check_level": 3},
        {"check_level": 2, "overlap": True},
        {"disable_radix_cache": True},
        {"max_total_tokens": 200, "context_length": 90, "max_running_requests": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 4, 5), (4, 3, 12)])
def test_its_tokens_are_those_of_plain_decoding(strong_pair, shape, options):
    """Ragged batches, prompts that share prefixes, greedy and sampled; drafts are accepted."""
    base = strong_pair.prompts([24, 5, 9])
    prompts = [*base, base[0] + [8], base[0][:16] + base[1]]
    params = [greedy(40), sampled(1, 30), greedy(36), sampled(2, 24, top_p=0.9), greedy(30)]
    llm = lookup(strong_pair, shape, chunked_prefill_size=8, **options)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(build(strong_pair, None).generate(prompts, params))
    assert sum(map(sum, accept_lens(outputs))) > 20
    llm.scheduler.check_integrity()


@pytest.mark.slow
def test_repetitive_text_is_accepted_in_long_runs():
    """The embedded model on a sentence that comes again and again: a round gives well over 1.5 tokens."""
    llm = LLM(speculative_algorithm="NGRAM", context_length=512)
    prompt = "Once upon a time there was a little cat. " * 8
    (output,) = llm.generate([prompt], greedy(96))
    lens = output.metrics.accept_lens
    assert 1 + sum(lens) / len(lens) > 2.0
    assert output.token_ids == LLM(draft=None, context_length=512).generate([prompt], greedy(96))[0].token_ids


def test_a_prefix_hit_brings_its_text(strong_pair):
    """The row's history is the request's ids, whether they were processed or came out of the prefix cache."""
    llm = lookup(strong_pair, (1, 4, 5), max_running_requests=1)
    shared = strong_pair.prompts([33])[0]
    llm.generate([shared], greedy(4))
    prompt = [*shared[:32], 7, 8, *shared[:6]]
    (request,) = submit(llm, [prompt], greedy(30))
    plan = llm.scheduler.plan()
    assert sum(len(chunk.token_ids) for chunk in plan.chunks) < len(prompt), "no hit"
    llm.scheduler.commit(plan, llm.engine.step(plan))
    row = llm.engine.runner.state.text.tokens[plan.rows[0]]
    assert row[: request.num_ids].tolist() == list(request.ids)


def test_a_row_proposes_nothing_of_the_request_before(strong_pair):
    """One row after another request, and the same row fresh: the same rounds."""
    first, second = strong_pair.prompts([40, 12])
    used = lookup(strong_pair, (3, 3, 9), max_running_requests=1, disable_radix_cache=True)
    used.generate([first], greedy(60))
    fresh = lookup(strong_pair, (3, 3, 9), max_running_requests=1, disable_radix_cache=True)
    assert accept_lens(used.generate([second], greedy(50))) == accept_lens(fresh.generate([second], greedy(50)))


def test_captured_rounds_are_the_eager_ones(strong_pair):
    params, prompts = [greedy(30), sampled(3, 20), greedy(22)], strong_pair.prompts([9, 20, 5])
    eager = lookup(strong_pair, (4, 3, 12), graphs="off").generate(prompts, params)
    llm, recorder = lookup(strong_pair, (4, 3, 12), max_running_requests=4), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    outputs = llm.generate(prompts, params)
    assert (tokens(outputs), accept_lens(outputs)) == (tokens(eager), accept_lens(eager))
    assert recorder.replayed


def test_a_vocabulary_smaller_than_the_places_has_enough_tokens():
    """Every node has k children that differ, whatever was found."""
    lookup_ = NgramLookup(NgramSpec(vocab_size=4, num_steps=2), LoadContext(torch.float32, torch.device("cpu"), 8))
    state = torch.zeros(3, PLACES, 3, dtype=torch.int32)
    state[1, 0], state[2, :4, 0] = torch.tensor([5, 3, 1]), 1
    state[2, :4, 1] = torch.tensor([2, 2, 0, 1])
    got = lookup_.propose(Nodes(torch.zeros(3, dtype=torch.int64), state.flatten(1), 0), 4)
    assert [sorted(row) for row in got.tokens.tolist()] == [[0, 1, 2, 3]] * 3
    assert got.tokens[:, 0].tolist() == [0, 3, 2]
    assert bool((got.logprob <= 0).all())
    assert bool(got.logprob.isfinite().all())


def test_a_head_beside_a_lookup_is_refused(strong_pair):
    with pytest.raises(ConfigError, match="NGRAM"):
        build(strong_pair, (1, 3, 4), speculative_algorithm="NGRAM")
