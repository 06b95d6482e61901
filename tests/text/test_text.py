"""Text in and out: tokenizers of other families than the embedded model's, and what their files may hold."""

import itertools
import json
import unicodedata
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from support.refusing import refused
from support.tiny_models import byte_characters, save_random_llama
from treetop import LLM, SamplingParams
from treetop.text.text import IncrementalDetokenizer
from treetop.text.token_bound import NFC_SHRINKS
from treetop.text.tokenizer import Tokenizer, TokenStream
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


BYTE_CHARACTERS = byte_characters()


def level_bytes(text: bytes) -> list[int]:
    """Ids of `save_byte_level`'s tokens, one a byte."""
    ids = {name: token for token, name in enumerate(sorted(BYTE_CHARACTERS))}
    return [ids[BYTE_CHARACTERS[byte]] for byte in text]


def spm_bytes(text: bytes) -> list[int]:
    """The same of `save_sentencepiece`'s."""
    return [len(SPECIAL) + byte for byte in text]


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("bytes") / "model")


@pytest.fixture(scope="module")
def special_folder(tmp_path_factory) -> Path:
    added = {"special": ["<|end|>", "<|\u00e9 \u0120|>"], "added": ["<think>", "\u0120\u0120"]}
    return save_byte_level(tmp_path_factory.mktemp("special") / "model", **added)


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
    assert [stream.push([token]) for token in (wor, ld, hello)] == [" wor", "ld", " hello"]
    assert [tokenizer.stream().push([token]) for token in (wor,)] == ["wor"]


def test_a_character_in_bytes_shows_when_it_is_complete(folder):
    vocab = save_sentencepiece(folder)
    stream = Tokenizer(folder).stream([vocab["\u2581hello"]])
    given = [vocab[name] for name in ("<0xE4>", "<0xB8>", "<0xAD>", "a", "<0xE4>", "b")]
    assert [stream.push([token]) for token in given] == ["", "", "\u4e2d", "a", "", "\ufffdb"]


def save_byte_level(folder: Path, *merged: bytes, normalizer=None, special=(), added=()) -> Path:
    """A `tokenizer.json` like Llama 3's: a token for each byte, and longer ones, made from their halves."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = {name: token for token, name in enumerate(sorted(BYTE_CHARACTERS))}, []

    def add(name: str) -> None:
        half = len(name) // 2
        if name not in vocab:
            add(name[:half])
            add(name[half:])
            vocab[name] = len(vocab)
            merges.append((name[:half], name[half:]))

    for each in merged:
        add("".join(BYTE_CHARACTERS[byte] for byte in each))
    tokenizer = BpeTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


CHARACTERS = st.sampled_from("ab. \u00e9\u4e2d\U0001f600")


@given(text=st.lists(CHARACTERS, min_size=1, max_size=12).map("".join), data=st.data())
@settings(max_examples=300, deadline=None)
def test_an_output_that_completes_its_prompts_character_shows_it_whole(folder, byte_folder, text, data):
    """Any text in bytes, cut anywhere: the prompt's whole characters and the output are the text."""
    text = "b" + text  # for one of the two drops a space at the beginning
    spelled = text.encode()
    cut = data.draw(st.integers(0, len(spelled)))
    whole = spelled[:cut].decode(errors="ignore")
    for tokenizer, ids in ((Tokenizer(folder), spm_bytes(spelled)), (Tokenizer(byte_folder), level_bytes(spelled))):
        stream = tokenizer.stream(ids[:cut])
        got = "".join(stream.push([token]) for token in ids[cut:]) + stream.flush()
        assert whole + got == text


@given(text=st.lists(CHARACTERS, min_size=1, max_size=9).map("".join), opened=st.sampled_from(["\u4e2d", "\U0001f600"]))
@settings(max_examples=200, deadline=None)
def test_bytes_that_a_prompt_left_open_stay_out_of_the_output(folder, byte_folder, text, opened):
    """The output begins with a character of its own: what the prompt began is not shown, whole or as a mark."""
    for count in range(1, len(opened.encode())):
        before, after = b"b" + opened.encode()[:count], text.encode()
        for tokenizer, spell in ((Tokenizer(folder), spm_bytes), (Tokenizer(byte_folder), level_bytes)):
            stream = tokenizer.stream(spell(before))
            assert "".join(stream.push([token]) for token in spell(after)) + stream.flush() == text


def test_a_mark_for_the_unknown_in_a_prompt_is_not_repeated(byte_folder):
    stream = Tokenizer(byte_folder).stream(level_bytes("a\ufffd".encode()))
    assert stream.push(level_bytes(b"b")) + stream.flush() == "b"


@given(
    prompt=st.lists(st.integers(0, 262), max_size=9),
    ids=st.lists(
        st.one_of(st.integers(0, 262), st.sampled_from(level_bytes("\ufffd\U0001f600".encode()))), max_size=60
    ),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    special=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_put_together_read_as_the_decoder_reads_them(special_folder, prompt, ids, widths, special):
    """Any ids, in pushes of any size: each gives the piece that the library's decoder gives it, to the last byte.

    Special tokens, shown or not, ids that are no token, and bytes that are no text for longer than a stream waits.
    """
    tokenizer = Tokenizer(special_folder)
    quick = tokenizer.stream(prompt, special)
    slow = TokenStream(partial(tokenizer.decode, special=special), prompt)
    assert quick._bytes_of is not None
    assert slow._bytes_of is None
    at = 0
    for width in itertools.cycle(widths):
        assert quick.push(ids[at : at + width]) == slow.push(ids[at : at + width])
        at += width
        if at >= len(ids):
            break
    assert quick.flush() == slow.flush()


@given(
    prompt=st.lists(st.integers(0, 269), max_size=9),
    ids=st.lists(st.integers(0, 269), min_size=1, max_size=40),
    stops=st.lists(st.sampled_from(["a", "\ufffd", " h", "ab"]), max_size=2),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_any_ids_give_text_whose_pieces_join_to_it(folder, prompt, ids, stops, widths):
    """Also bytes that are no UTF-8, at which the library's own streams raise."""
    shown = IncrementalDetokenizer(Tokenizer(folder).stream(prompt), stops)
    pieces, taken = [], 0
    for width in itertools.cycle(widths):
        if taken >= len(ids) or shown.feed(ids[taken : taken + width]) is not None:
            break
        taken += width
        pieces.append(shown.piece())
    pieces.append(shown.piece() + shown.finish())
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


# ---------------------------------------------------------------------------------------------- texts that are too long

LETTERS = st.sampled_from("aab  e\u0301\u03b9\u0308\u4e2d\u1100\u1161\u11a8\u212a<s>")


@given(text=st.lists(LETTERS, max_size=60).map("".join))
@settings(max_examples=300, deadline=None)
def test_a_text_has_at_least_the_fewest_tokens_it_is_said_to_have(folder, byte_folders, text):
    for each in (folder, *byte_folders):
        tokenizer = Tokenizer(each)
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


@pytest.fixture(scope="module")
def byte_folders(tmp_path_factory) -> list[Path]:
    """With long tokens, and with a normalizer that composes."""
    path = tmp_path_factory.mktemp("bounds")
    long = [b"aaaa", b" " * 8, "\u1100\u1161\u11a8".encode(), "\uac01".encode() * 3]
    return [save_byte_level(path / "plain", *long), save_byte_level(path / "nfc", *long, normalizer=normalizers.NFC())]


def test_the_fewest_tokens_are_reached(tmp_path):
    """A text of the longest token alone has no more; a byte more is a token more."""
    tokenizer = Tokenizer(save_byte_level(tmp_path, b"a" * 8))
    assert [tokenizer.fewest_tokens("a" * size) for size in (0, 40, 41)] == [0, 5, 6]
    assert len(tokenizer.encode("a" * 40)) == 5


def test_composing_shortens_a_text_by_less_than_the_factor_that_is_reckoned_with():
    """Bytes that a character's composed form has, against the most that what composes to it can have.

    Only single characters have more bytes than what they decompose to, so each decomposed character stands for as many
    as the longest of those.
    """
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    size, longest = (lambda text: len(text.encode())), {}
    for character in every:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), size(character))
        assert len(parts) == 1 or size(character) <= size(parts)
    composed = [each for each in every if unicodedata.normalize("NFC", each) == each]
    sums = [sum(longest[part] for part in unicodedata.normalize("NFD", each)) / size(each) for each in composed]
    assert 1 < max(sums) <= NFC_SHRINKS


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("aa", "")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"model": models.WordLevel({"<unk>": 0}, unk_token="<unk>")},
        {"model": models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)},
        {"added": AddedToken("<x>", lstrip=True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_said_of_a_tokenizer_that_may_drop_text(byte_folder, tmp_path, change):
    """A megabyte may be one token there, and is not refused for its length."""
    bpe = BpeTokenizer.from_file(str(byte_folder / "tokenizer.json"))
    for name, value in change.items():
        if name == "added":
            bpe.add_tokens([value])
        else:
            setattr(bpe, name, value)
    bpe.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(byte_folder).fewest_tokens("a" * 10**6) == 10**6
    assert Tokenizer(tmp_path).fewest_tokens("a" * 10**6) == 0


def test_a_text_beyond_every_context_is_refused_unread(byte_folder, monkeypatch):
    """Before it is encoded, and only if it cannot fit: the longest that fits is served."""
    save_random_llama(byte_folder, vocab_size=256, max_position_embeddings=64)
    llm = LLM(byte_folder)
    assert len(llm.generate("a" * 63)[0].token_ids) == 1
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
    refused(InputError, lambda: llm.generate("a" * 64), "at least 64 tokens", "--context-length")
    refused(InputError, lambda: llm.generate(["b", "a" * 30_000_000][1:]), "at least 30000000 tokens")
