"""Bad words never come: exactly as if each token were chosen with them ruled out, with trees and without."""

import pytest

from support.engines import build, tokens
from treetop import LLM, SamplingParams
from treetop.scheduler.constrained import ConstraintState, constrained_by
from treetop.types.errors import InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest

SHAPE = (4, 5, 16)
PROMPTS = ["def f(x):", "ab cd", "x", "q w"]


@pytest.fixture(scope="module")
def plain(weak_pair) -> LLM:
    return build(weak_pair, None)


def params_of(words, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "bad_words": words, **changes})


def oracle(llm: LLM, output, words: list[tuple[int, ...]], count: int) -> tuple[int, ...]:
    """Greedy, by logits that are computed densely after each token; a word is ruled out where its beginning stands."""
    ids, found = list(output.prompt_token_ids), []
    for _ in range(count):
        logits = llm.next_logits(ids + found).clone()
        for word in words:
            before = len(word) - 1
            if len(found) >= before and tuple(found[len(found) - before :]) == word[:-1]:
                logits[word[-1]] = float("-inf")
        found.append(int(logits.argmax()))
    return tuple(found)


def spelled(llm: LLM, words) -> list[tuple[int, ...]]:
    """A word as it stands, and behind a space if that gives as many tokens of which the first is another."""
    found = []
    for word in words:
        plain, spaced = (tuple(llm.tokenizer.encode(each, special=False)) for each in (word, " " + word))
        found += [plain] + ([spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [])
    return found


def words_of(llm: LLM, length: int) -> list[str]:
    """Texts of so many tokens that the outputs hold where nothing is ruled out."""
    found = []
    for output in llm.generate(PROMPTS, params_of([])):
        for start in range(24 - length):
            ids = list(output.token_ids[start : start + length])
            text = llm.tokenizer.decode(ids)
            if text.strip() == text and llm.tokenizer.encode(text, special=False) == ids:
                found.append(text)
    assert found
    return found[:: -(-len(found) // 12)]


@pytest.mark.pairwise
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("options", [{}, {"overlap": False, "check_level": 3}], ids=str)
def test_greedy_tokens_are_those_of_the_oracle(weak_pair, plain, length, options):
    """Words of one token and of several; beside a request that has none."""
    words = words_of(plain, length)
    llm = build(weak_pair, SHAPE, **options)
    free = params_of([])
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], [*[params_of(words)] * len(PROMPTS), free])
    assert tokens(outputs[:-1]) == tokens(plain.generate(PROMPTS, params_of(words)))
    for output in outputs[:-1]:
        assert output.token_ids == oracle(plain, output, spelled(plain, words), 24)
    assert tokens(outputs[-1:]) == tokens(plain.generate(PROMPTS[:1], free))
    assert tokens(outputs[:-1]) != tokens(plain.generate(PROMPTS, free)), "nothing was ruled out"
    drafts = sum(sum(output.metrics.accept_lens) for output in outputs[:-1])
    assert drafts > 0


@pytest.mark.parametrize("length", [1, 2])
def test_sampled_trees_equal_plain_for_the_same_seeds(weak_pair, plain, length):
    words = words_of(plain, length)
    llm = build(weak_pair, SHAPE)
    asked = [params_of(words, temperature=0.7, seed=seed, frequency_penalty=0.3) for seed in range(4)]
    outputs = llm.generate(PROMPTS, asked)
    assert tokens(outputs) == tokens(plain.generate(PROMPTS, asked))
    for output in outputs:
        for word in spelled(plain, words):
            at = range(len(output.token_ids) - len(word) + 1)
            assert all(output.token_ids[i : i + len(word)] != word for i in at)


def test_other_restrictions_hold_beside_them(weak_pair, plain):
    """allowed_token_ids, min_tokens, and what is put back for want of pages."""
    words = words_of(plain, 2)
    allowed = sorted({token for word in spelled(plain, words) for token in word} | set(range(30, 90)))
    asked = params_of(words, allowed_token_ids=allowed, min_tokens=20, max_tokens=40)
    few = build(weak_pair, SHAPE, context_length=96, max_total_tokens=112, page_size=4)
    prompts = [list(plain.tokenizer.encode(each)) * 6 for each in PROMPTS]
    assert tokens(few.generate(prompts, asked)) == tokens(plain.generate(prompts, asked))
    few.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words": [""]}, "bad_words must not be empty"),
        ({"bad_words": [3]}, "bad_words must be text or a list of texts"),
        ({"bad_words": ["a"] * 129}, "bad_words may be 128 texts"),
        ({"bad_words": ["a" * 201]}, "bad_words may be 128 texts"),
        ({"bad_words": ["a\ud800"]}, "bad_words must be text"),
        ({"bad_words": ["q"], "allowed_token_ids": [85]}, "no token is left"),
    ],
)
def test_what_cannot_be_ruled_out_is_refused(plain, options, words):
    with pytest.raises(InputError, match=words):
        plain.generate(PROMPTS[0], SamplingParams(**options))


def test_an_engine_that_constrains_nothing_takes_words_of_no_token_alone(weak_pair):
    llm = build(weak_pair, None, disable_logits_processors=True)
    with pytest.raises(InputError, match="bad_words"):
        llm.generate("x", params_of(["q"]))


def test_only_the_outputs_own_tokens_begin_a_word():
    """Not the prompt's, as in vLLM; what a client has received before counts."""

    def held(received: tuple[int, ...] = ()) -> ConstraintState:
        words = ((5, 7), (6, 5, 8), (9,))
        asked = EngineRequest(RequestId(0), (5,), SamplingParams(), 0, received=received, bad_words=words)
        made = constrained_by(asked, frozenset(), frozenset(), 12, None)
        assert made is not None
        return made

    def ruled_out(constrained: ConstraintState) -> set[int]:
        return {token for token in range(12) if not constrained.allowed >> token & 1}

    row = held()
    assert ruled_out(row) == {9}
    for token, want in ((6, {9}), (5, {9, 7, 8}), (5, {9, 7}), (1, {9})):
        assert row.advance((token,))
        assert ruled_out(row) == want
    assert ruled_out(held((1, 6, 5))) == {9, 7, 8}
