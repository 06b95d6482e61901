"""Lookups beside a head, and in texts of earlier requests: what they propose, and that no output changes."""

import random

import pytest
import torch

from support.draft_rounds import assert_batches
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.grids import few_of, few_values
from support.lookups import lookup
from support.refusing import refused
from support.tiny_models import Pair, save_random_llama
from treetop import LLM
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.ngram import PLACES, NgramLookup, NgramSpec
from treetop.drafts.protocol import DraftProducts, DraftVocab, Nodes, Proposal
from treetop.drafts.with_lookup import WithLookup, WithLookupSpec
from treetop.kernels.tree.row_text import NOTHING, PastTexts, continued_in_past, ending, longest_matches
from treetop.types.errors import ConfigError
from treetop.types.requests import Whose

BESIDE = {"speculative_suffix_lookup": True}
SENTENCE = "Once upon a time there was a little cat. " * 6


def mean(outputs) -> float:
    lens = [length for row in accept_lens(outputs) for length in row]
    return 1 + sum(lens) / len(lens)


# ---------------------------------------------------------------------------------------------------- past texts


@pytest.mark.parametrize("seed", range(10))
def test_past_texts_are_the_last_tokens_that_were_kept(seed):
    """Longer and shorter than the ring, empty ones too; matches end and go on within a text."""
    rng, width = random.Random(seed), 14
    size = rng.choice([6, 20, 50])
    past = PastTexts(
        torch.full((size + 1,), NOTHING, dtype=torch.int32),
        torch.zeros(size + 1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    want, owners = [NOTHING] * size, [0] * size
    for _ in range(9):
        text = torch.tensor([rng.randrange(3) for _ in range(width)], dtype=torch.int32)
        length = rng.choice([0, 1, 2, 5, 9, width - 1])
        owner = rng.randrange(2)
        past.keep(text, torch.tensor([length]), torch.tensor([owner]))
        want += [*text[:length].tolist(), NOTHING] if length else []
        owners += [owner] * (length + 1) if length else []
    want, owners = want[-size:], owners[-size:]
    kept, whose = past.in_order
    assert (kept.tolist(), whose.tolist()) == ([want], [owners])

    own = torch.tensor([[rng.randrange(3) for _ in range(7)] for _ in range(2)], dtype=torch.int32)
    end = torch.tensor([6, 3])
    mine = whose == torch.tensor([[0], [1]])
    place, length = longest_matches(kept, ending(own, end, 5), torch.full_like(end, size), PLACES, mine)
    after = continued_in_past(kept, place, 4)
    for i, last in enumerate(end.tolist()):
        ids, found = own[i, : last + 1].tolist(), []
        for at in range(size):
            n = 0
            while n < min(5, at + 1, len(ids)) and want[at - n] == ids[last - n]:
                n += 1
            if n and owners[at] == i:
                found.append((n, at))
        found = sorted(found, reverse=True)[:PLACES]
        assert [(n, p) for n, p in zip(length[i].tolist(), place[i].tolist(), strict=True) if n] == found
        for row, (_, at) in zip(after[i].tolist(), found, strict=False):
            rest = [*want[at + 1 :], *[NOTHING] * 4]
            rest = rest[: rest.index(NOTHING)][:4]
            assert row == rest + [NOTHING] * (4 - len(rest))


@pytest.mark.parametrize("beside", few_of([False, True], 0))
def test_a_later_request_drafts_from_an_earlier_one(strong_pair, beside):
    """The same question again: its answer is known by then, unless nothing is kept. Tokens are plain decoding's."""
    (prompt, other), found = strong_pair.prompts([12, 9]), {}
    for kept in (0, 400):
        options = {"speculative_suffix_cache_tokens": kept, "max_running_requests": 1, "context_length": 160}
        if beside:
            llm = build(strong_pair, (1, 4, 5), **BESIDE, **options)
        else:
            llm = lookup(strong_pair, (1, 4, 5), **options)
        outputs = [llm.generate([each], [greedy(40)]) for each in (prompt, other, prompt)]
        found[kept] = [mean(each) for each in outputs]
        plain = build(strong_pair, None).generate([prompt, other], greedy(40))
        assert [tokens(each)[0] for each in outputs] == [*tokens(plain), tokens(plain)[0]]
    assert found[400][0] == found[0][0], "nothing is known yet"
    assert found[400][2] > max(found[0][2] + 0.5, 4.0)


@pytest.mark.slow
def test_nobody_drafts_from_a_text_of_another_salt(strong_pair):
    """As with the prefix cache: what one asked shows to no other, not by how fast an answer comes either."""
    prompt, found = strong_pair.prompts([12])[0], {}
    options = {"speculative_suffix_cache_tokens": 400, "max_running_requests": 1, "context_length": 160}
    for salts in (("", ""), ("a", "a"), ("a", "b"), ("a", "")):
        llm, outputs = lookup(strong_pair, (1, 4, 5), **options), []
        for salt in salts:
            asked = llm._llm.requests([prompt], [greedy(40)], whose=Whose(cache_salt=salt))
            outputs.append([each.output for each in llm._run(asked) if each.output is not None])
        found[salts] = [mean(each) for each in outputs]
    assert all(second > first + 0.5 for first, second in (found["", ""], found["a", "a"]))
    assert all(second == first for first, second in (found["a", "b"], found["a", ""]))


# ---------------------------------------------------------------------------------------------------- beside a head


class Says:
    """A drafter whose state is the token that it thinks half likely, and the next ones half of that each."""

    block = None
    products = DraftProducts()

    def __init__(self, vocab) -> None:
        self.vocab = DraftVocab(torch.zeros(vocab, dtype=torch.int64))

    def step(self, nodes, positions, attend, lines=None):
        return nodes.state

    def propose(self, nodes, k, inv_temp=None, lines=None):
        first = nodes.state[..., 0].long()
        tokens = (first[..., None] + torch.arange(k)) % len(self.vocab.offset)
        return Proposal(tokens, torch.log(0.5 ** torch.arange(1, k + 1)).expand(tokens.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_node_has_the_best_of_both(dtype):
    """By the weight that the longest match earns; states hold tokens of any size in every dtype."""
    vocab, k = 200_000, 3
    spec, place = WithLookupSpec(SizedOne(), NgramSpec(vocab, 2)), LoadContext(torch.float32, torch.device("cpu"), 8)
    both, text = WithLookup(spec, Says(vocab), place), NgramLookup(spec.lookup, place)
    places = torch.full((4, PLACES, 3), NOTHING, dtype=torch.int32)
    places[..., 0] = 0
    places[0, 0] = torch.tensor([24, 199_999, 7])
    places[1, :2] = torch.tensor([[8, 5, 1], [8, 131_071, NOTHING]])
    places[2, 0] = torch.tensor([9, NOTHING, NOTHING])  # a text that ended there
    state = torch.cat([torch.full((4, 1), 5.0, dtype=dtype), digits_of(places.flatten(1), dtype)], dim=1)
    root = torch.zeros(4, dtype=torch.int64)
    got = both.propose(Nodes(root, state, 0), k)
    said = {5: 0.5, 6: 0.25, 7: 0.125}
    for row, (length, read) in enumerate([(24, {199_999: 24 / 25}), (8, {5: 4 / 9, 131_071: 4 / 9}), (0, {}), (0, {})]):
        weight = length**2 / (length**2 + 64)
        want = {t: weight * read.get(t, 0) + (1 - weight) * said.get(t, 0) for t in {*said, *read}}
        best = sorted(want, key=lambda t: -want[t])[:k]
        assert got.tokens[row].tolist() == best
        torch.testing.assert_close(got.logprob[row].exp(), torch.tensor([want[t] for t in best]), rtol=1e-5, atol=0)
    nodes = Nodes(torch.tensor([199_999, 131_071, 5, 5]), state, 1)
    moved = both.step(nodes, root, None)
    want = text.step(Nodes(nodes.tokens, places.flatten(1), 1), root, None)
    assert moved[:, 1:].equal(digits_of(want, dtype))


class SizedOne:
    """What `WithLookup` asks of its drafter's spec."""

    state_size = 1


def digits_of(integers, dtype):
    return torch.tensor([[d for n in row for d in (n + 1).to_bytes(3, "little")] for row in integers.tolist()]).to(
        dtype
    )


@pytest.mark.parametrize("shape", few_values([(1, 4, 5), (4, 5, 16)], 0))
def test_beside_a_head_batches_stay_what_they_are(strong_pair, shape):
    """Captured or not, with prefix hits and retractions, greedy and sampled."""
    assert sum(assert_batches(strong_pair, shape, **BESIDE)) > 20


@pytest.mark.slow
def test_beside_a_language_model_too(tmp_path):
    """A drafter with a block, whose proposals are made in DRAFT."""
    target = save_random_llama(tmp_path / "target", seed=5, head_dim=16)
    draft = save_random_llama(tmp_path / "draft", seed=2, num_hidden_layers=1)
    assert sum(assert_batches(Pair(target, draft), (3, 3, 9), speculative_algorithm="STANDALONE", **BESIDE)) > 2


def test_what_was_deferred_is_looked_up_too(strong_pair):
    options = {"speculative_policy": "auto", "speculative_shapes": "4,1,5 3,3,9", **BESIDE}
    prompts, params = strong_pair.prompts([24, 5, 9]), [greedy(40), sampled(1, 30), greedy(36)]
    got = build(strong_pair, (3, 3, 9), **options).generate(prompts, params)
    assert tokens(got) == tokens(build(strong_pair, None).generate(prompts, params))


@pytest.mark.slow
def test_repetitive_text_is_accepted_in_longer_runs_than_by_a_head_alone():
    """The embedded pair on a sentence that comes again and again."""
    alone, both = (
        LLM(context_length=512, **options).generate([SENTENCE], greedy(60, whole=True))
        for options in ({}, {**BESIDE, "dtype": "float32"})
    )
    assert tokens(alone) == tokens(both)
    assert mean(both) > mean(alone)


def test_suffix_is_another_name(strong_pair):
    prompts = strong_pair.prompts([20])
    one, other = (
        lookup(strong_pair, (3, 3, 9), speculative_algorithm=name).generate(prompts, greedy(20))
        for name in ("NGRAM", "SUFFIX")
    )
    assert accept_lens(one) == accept_lens(other)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft": None, "speculative_suffix_lookup": True}, "--speculative-suffix-lookup"),
        ({"draft": None, "speculative_algorithm": "SUFFIX", **BESIDE}, "does so alone"),
        ({"speculative_algorithm": "SUFFIX"}, "SUFFIX looks drafts up"),
        ({"speculative_suffix_cache_tokens": 9}, "--speculative-suffix-cache-tokens is read by lookups"),
        ({"simulate_acceptance": "builtin:llama-3.1-8b", **BESIDE}, "lookup in text says nothing"),
    ],
)
def test_what_cannot_be_is_refused(strong_pair, options, says):
    given = {"model": str(strong_pair.target), "draft": str(strong_pair.head), **options}
    refused(ConfigError, lambda: LLM(**given), says)
