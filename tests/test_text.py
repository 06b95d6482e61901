"""Text in and out: tokenizers of other families than the embedded model's, and what their files may hold."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, normalizers

from refusing import refused
from tiny_models import save_random_llama
from treetop import LLM, SamplingParams
from treetop.server.text import OutputText
from treetop.server.tokenizer import Tokenizer
from treetop.types.errors import InputError

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["\u2581", "a", "b", "\u2581\u2581", "\u2581hello", "\u2581wor", "ld", "\u00e9", "\u4e2d", "."]


def save_sentencepiece(folder: Path) -> dict[str, int]:
    """A `tokenizer.json` like Llama 2's: marks for spaces, of which decoding drops the first, and bytes for the rest.

    Returns the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {name: token for token, name in enumerate([*SPECIAL, *BYTES, *WORDS])}
    tokenizer = BpeTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *last])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocab


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / "model"
    save_random_llama(path, vocab_size=len(save_sentencepiece(path)))
    return path


def test_a_space_between_prompt_and_output_is_kept(folder):
    """Decoders of this family drop the space that a text begins with; an output is no beginning."""
    tokenizer = Tokenizer(folder)
    vocab = save_sentencepiece(folder)
    hello, wor, ld = (vocab[name] for name in ("\u2581hello", "\u2581wor", "ld"))
    stream = tokenizer.stream([hello])
    assert [stream.push(token) for token in (wor, ld, hello)] == [" wor", "ld", " hello"]
    assert [tokenizer.stream().push(token) for token in (wor,)] == ["wor"]


def test_a_character_in_bytes_shows_when_it_is_complete(folder):
    vocab = save_sentencepiece(folder)
    stream = Tokenizer(folder).stream([vocab["\u2581hello"]])
    given = [vocab[name] for name in ("<0xE4>", "<0xB8>", "<0xAD>", "a", "<0xE4>", "b")]
    assert [stream.push(token) for token in given] == ["", "", "\u4e2d", "a", "", "\ufffdb"]


@given(
    prompt=st.lists(st.integers(0, 269), max_size=9),
    ids=st.lists(st.integers(0, 269), min_size=1, max_size=40),
    stops=st.lists(st.sampled_from(["a", "\ufffd", " h", "ab"]), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_any_ids_give_text_whose_pieces_join_to_it(folder, prompt, ids, stops):
    """Also bytes that are no UTF-8, at which the library's own streams raise."""
    shown = OutputText(Tokenizer(folder).stream(prompt), stops)
    pieces = [shown.push([token]) for token in ids]
    pieces.append(shown.finish())
    assert "".join(pieces) == shown.full()
    assert not any(stop in shown.full() for stop in stops)


def test_requests_with_bytes_that_are_no_text_end_as_they_should(folder):
    """With stop strings, which read the text inside the scheduler, and beside a request without."""
    llm = LLM(folder)
    params = [
        SamplingParams(temperature=3, seed=seed, max_tokens=40, ignore_eos=True, stop=("never",) if seed % 2 else ())
        for seed in range(8)
    ]
    outputs = llm.generate(["hello"] * 8, params)
    assert [(output.finish_reason, output.error) for output in outputs] == [("length", None)] * 8


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    """What a training run left in `tokenizer.json` must not cut or fill a prompt."""
    save_sentencepiece(tmp_path)
    want = Tokenizer(tmp_path).encode("a b a b a b")
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    file["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file["padding"] = {
        "strategy": {"Fixed": 32}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    path.write_text(json.dumps(file))
    assert Tokenizer(tmp_path).encode("a b a b a b") == want


def test_a_prompt_whose_tokens_the_model_lacks_is_refused(tmp_path):
    """A tokenizer with more tokens than the model has embeddings: before any work, and nobody else is hurt."""
    vocab = save_sentencepiece(tmp_path)
    save_random_llama(tmp_path, vocab_size=len(vocab) - 1)
    llm = LLM(tmp_path)
    stream = llm.stream([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))
    next(stream)
    refused(InputError, lambda: llm.generate("a ."), f"token id {len(vocab) - 1}", "vocabulary")
    assert [delta.output for delta in stream][-1].finish_reason == "length"
