"""Where requests end, and what of their text is shown: stops in token order, stop strings, streams."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.oracles import stop_index
from support.tiny_models import EOS, Pair, save_tokenizer
from treetop import SamplingParams
from treetop.scheduler.stops import first_stop
from treetop.text.text import IncrementalDetokenizer
from treetop.text.tokenizer import Tokenizer

SHAPE = (4, 4, 24)


@pytest.fixture(scope="module")
def served(strong_pair):
    """An engine, a prompt, and forty of its sampled tokens without any stop."""
    llm = build(strong_pair, SHAPE)
    prompt = strong_pair.prompts([9])[0]
    for seed in range(100):
        reference = tokens(llm.generate([prompt], sampled(seed, 40, temperature=1.3, whole=True)))[0]
        if EOS in reference[6:20] and EOS not in reference[:6] and len(set(reference)) > 6:
            return llm, prompt, seed, reference
    raise AssertionError("no seed gives an output with varied tokens and an EOS inside")


@given(
    new_ids=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    stop_ids=st.sets(st.integers(0, 5), max_size=3),
    limit=st.integers(1, 8),
)
@settings(max_examples=400, deadline=None)
def test_the_earliest_stop_in_token_order_wins(new_ids, stop_ids, limit):
    """Stop ids and the limit: the first token that meets any of them ends it, a stop before a limit."""
    assert first_stop(new_ids, stop_ids, limit) == stop_index(new_ids, stop_ids, limit)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 11, 39])
def test_max_tokens_cuts_an_accepted_chain_anywhere(served, max_tokens):
    """Exactly max_tokens tokens come out, the first of the untruncated output."""
    llm, prompt, seed, reference = served
    (output,) = llm.generate([prompt], sampled(seed, max_tokens, temperature=1.3, whole=True))
    assert output.token_ids == reference[:max_tokens]
    assert output.finish_reason == "length"


def test_a_stop_token_cuts_the_rest_of_an_accepted_chain(served):
    """Each token of the output as the stop token ends it at its first place, also in the middle of a round."""
    llm, prompt, seed, reference = served
    cut_inside = 0
    for token in sorted(set(reference)):
        (output,) = llm.generate([prompt], sampled(seed, 40, temperature=1.3, stop_token_ids=(token,), whole=True))
        assert output.token_ids == reference[: reference.index(token) + 1]
        assert output.finish_reason == "stop"
        produced = 1 + sum(a + 1 for a in output.metrics.accept_lens)
        cut_inside += produced > len(output.token_ids)
    assert cut_inside > 0, "no stop fell inside an accepted chain"
    llm.scheduler.check_integrity()


def test_the_end_of_sequence_token_ends_a_request_unless_ignored(served):
    """EOS stops and is part of the output; with ignore_eos it is a token like any other."""
    llm, prompt, seed, reference = served
    (output,) = llm.generate([prompt], SamplingParams(temperature=1.3, seed=seed, max_tokens=40))
    assert output.token_ids == reference[: reference.index(EOS) + 1]
    assert output.finish_reason == "stop"


def test_a_stop_at_the_last_allowed_token_counts_as_a_stop(served):
    """When a stop and a limit fall on one token the reason is the stop."""
    llm, prompt, seed, reference = served
    at = reference.index(EOS)
    (output,) = llm.generate([prompt], SamplingParams(temperature=1.3, seed=seed, max_tokens=at + 1))
    assert (output.finish_reason, len(output.token_ids)) == ("stop", at + 1)
    (output,) = llm.generate([prompt], SamplingParams(temperature=1.3, seed=seed, max_tokens=at))
    assert (output.finish_reason, len(output.token_ids)) == ("length", at)


def test_the_first_token_can_end_a_request(served):
    """A stop on the token that the prefill samples ends the request before any round."""
    llm, prompt, seed, reference = served
    (output,) = llm.generate([prompt], sampled(seed, 40, temperature=1.3, stop_token_ids=(reference[0],), whole=True))
    assert output.token_ids == reference[:1]
    assert output.metrics.target_forwards == 0


def test_end_of_sequence_ids_of_the_generation_config_count_too(weak_pair, tmp_path):
    """`generation_config.json` may name more EOS ids than `config.json`; each of them ends a request."""
    shutil.copytree(weak_pair.target, tmp_path / "target")
    llm = build(weak_pair, None)
    prompt = weak_pair.prompts([7])[0]
    (reference,) = tokens(llm.generate([prompt], greedy(10, whole=True)))
    last = next(t for t in reversed(reference) if t != EOS)
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, last]}))
    other = build(Pair(tmp_path / "target", weak_pair.head), SHAPE)
    (output,) = other.generate([prompt], SamplingParams(max_tokens=10))
    first = min(reference.index(token) for token in {EOS, last} & set(reference))
    assert output.token_ids == reference[: first + 1]
    assert output.finish_reason == "stop"


# ---------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def text_served(weak_pair):
    llm = build(weak_pair, SHAPE)
    prompts = ["def f(x):", "a", "for i in range(9)", "~~~"]
    return llm, prompts


PARAMS = [greedy(60), sampled(1, 60), sampled(2, 60, temperature=2.0), sampled(3, 60, temperature=3.0)]


def streamed(llm, prompts, params):
    """Each prompt's pieces of text and its output."""
    pieces, outputs = [[] for _ in prompts], [None] * len(prompts)
    for delta in llm.stream(prompts, params):
        assert outputs[delta.index] is None, "a piece came after the end"
        pieces[delta.index].append(delta.text)
        outputs[delta.index] = delta.output
    return pieces, outputs


def test_the_pieces_of_a_stream_make_up_the_text(text_served):
    """Concatenated pieces equal `.text`, which is the decoded tokens; broken UTF-8 included."""
    llm, prompts = text_served
    pieces, outputs = streamed(llm, prompts, PARAMS)
    for piece, output in zip(pieces, outputs, strict=True):
        assert "".join(piece) == output.text
        assert output.text == llm.tokenizer.decode(output.token_ids)
    assert tokens(outputs) == tokens(llm.generate(prompts, PARAMS))


def test_stop_strings_end_the_request_and_are_never_shown(text_served):
    """For stop strings cut out of the text itself: the text ends before the earliest one, in pieces and whole."""
    llm, prompts = text_served
    free = llm.generate(prompts, PARAMS)
    checked = 0
    for prompt, params, output in zip(prompts, PARAMS, free, strict=True):
        for at in (3, 9, 20, 33):
            stops = (output.text[at : at + 3], output.text[at + 5 : at + 6], "never there")
            if not all(stops) or "\ufffd" in "".join(stops):
                continue
            each = SamplingParams(
                temperature=params.temperature, seed=params.seed, max_tokens=60, ignore_eos=True, stop=stops
            )
            (piece,), (stopped,) = streamed(llm, [prompt], [each])
            found = [output.text.find(stop) for stop in stops if stop in output.text]
            assert stopped.finish_reason == "stop"
            assert stopped.text == output.text[: min(found)]
            assert "".join(piece) == stopped.text
            assert stopped.token_ids == output.token_ids[: len(stopped.token_ids)]
            assert any(stop in llm.tokenizer.decode(stopped.token_ids) for stop in stops)
            assert not any(stop in llm.tokenizer.decode(stopped.token_ids[:-1]) for stop in stops)
            checked += 1
    assert checked >= 6


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """Tokens: bytes of two- and three-byte characters, letters, and words made of the same letters."""
    folder = tmp_path_factory.mktemp("words")
    spelled = [b"\x00", b"\x01", b"\x02", b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"\xe6", b"\xbc"]
    spelled += [b"\xa2", b"\xe6\xbc\xa2", b" ", b"\n", b"\xf0\x9f", b"\x98\x80"]
    save_tokenizer(folder, len(spelled), lambda token: spelled[token])
    return Tokenizer(folder), len(spelled)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_text_in_pieces_equals_text_at_once_for_any_ids(word_tokenizer, data):
    """Whatever the ids, the stop strings and the grouping of ids into steps: no stop shows, pieces join to the text."""
    tokenizer, size = word_tokenizer
    ids = data.draw(st.lists(st.integers(3, size - 1), min_size=1, max_size=14))
    stops = tuple(data.draw(st.lists(st.sampled_from(["ab", "aab", "b a", "é", "漢", "aa", "\n"]), max_size=2)))
    groups, at = [], 0
    while at < len(ids):
        width = data.draw(st.integers(1, 4))
        groups.append(ids[at : at + width])
        at += width
    shown = IncrementalDetokenizer(tokenizer.stream(), stops)
    pieces, emitted = [], []
    for group in groups:
        found = shown.feed(group)
        emitted += group if found is None else group[: found + 1]
        pieces.append(shown.piece())
        assert not any(stop in "".join(pieces) for stop in stops)
        if found is not None:
            break
    pieces.append(shown.finish())
    text = tokenizer.decode(emitted)
    found = [text.find(stop) for stop in stops if stop in text]
    whole = text[: min(found)] if found else text
    assert shown.full() == whole
    assert "".join(pieces) == whole
    stopped = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stops)), len(ids))
    assert len(emitted) == stopped, "the request did not end at the token that completes the first stop string"


def test_text_is_shown_as_soon_as_no_stop_string_can_begin_in_it(word_tokenizer):
    """Text that cannot be the beginning of a stop string is not held back."""
    tokenizer, _ = word_tokenizer
    shown = IncrementalDetokenizer(tokenizer.stream(), ("aab",))
    a, b, space = 4, 5, 15
    pieces = []
    for token in (b, a, a, a, space, a):
        assert shown.feed([token]) is None
        pieces.append(shown.piece())
    assert pieces == ["b", "", "", "a", "aa ", ""]
    assert shown.finish() == "a"


def test_a_retracted_request_is_given_each_token_once(weak_pair):
    """Retraction neither repeats a token in the updates nor loses one, so that a client's text stays right."""
    llm = build(weak_pair, (2, 3, 6), context_length=128, max_total_tokens=150, page_size=4)
    requests = submit(llm, weak_pair.prompts([20, 20, 20]), greedy(60, whole=True))
    given = {request.request_id: [] for request in requests}
    for _, updates in pump(llm):
        for update in updates:
            given[update.request_id] += update.new_ids
    assert llm.scheduler.num_retractions > 0
    assert [given[request.request_id] for request in requests] == [request.output_ids for request in requests]
    assert all(len(ids) == 60 for ids in given.values())
