"""The tokenizer of a GGUF file's metadata."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tiny_models import byte_characters
from treetop.checkpoints.gguf.vocabulary import vocabulary
from treetop.types.errors import CheckpointError

PATH = Path("m.gguf")
BYTES = tuple(byte_characters())
MERGES = ("h e", "l l", "he ll", "\u0120 a")
WHOLE = (*BYTES, "he", "ll", "hell", "\u0120a", "<s>", "<|eot_id|>", "<user>")
TYPES = (*(1,) * 260, 3, 3, 4)
BOS, EOT, USER = 260, 261, 262


def entries(**more: object) -> dict[str, object]:
    same = {"model": "gpt2", "pre": "gpt-2", "tokens": WHOLE, "merges": MERGES, "token_type": TYPES}
    ids = {"bos_token_id": BOS, "eos_token_id": EOT}
    found = {**same, **ids, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def read(**more: object):
    return vocabulary(entries(**more), 263, PATH)


def pieces(pre: str, text: str) -> list[str]:
    found = read(pre=pre).tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in found]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "!", "\n ", " now"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!", "\n ", " now"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "!\n", " ", " now"]),
        ("gpt-4o", ["I'll", " pay", " ", "123", "45", "!\n", " ", " now"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!\n", " ", " now"]),
        ("dbrx", ["I", "'ll", " pay", " ", "123", "45", "!\n", " ", " now"]),
        ("smaug-bpe", ["I", "'ll", " pay", " ", "123", "45", "!\n", " ", " now"]),
        ("refact", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!", "\n ", " now"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!\n", " ", " now"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "45", "!", "\n ", " now"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_name_says(pre: str, expected: list[str]) -> None:
    """Digits by one or three, contractions, punctuation with its newline or apart."""
    assert pieces(pre, "I'll pay 12345!\n  now") == expected


def test_o200k_cuts_words_where_small_letters_end() -> None:
    """As tiktoken's pattern has it: capitals begin a word, marks belong to letters, a slash to what stands before."""
    text = "aHTMLPage's n\u0303 \u4f60\u597d ://x"
    expected = ["a", "HTMLPage's", " n\u0303", " \u4f60\u597d", " ://", "x"]
    assert pieces("gpt-4o", text) == expected


def test_merges_special_tokens_and_stops_are_those_of_the_file() -> None:
    """Control tokens are special, those of users are found in a text and shown; a word that is a token is one."""
    found = read()
    assert found.stops == (EOT,)
    ids = found.tokenizer.encode("hello a<user><|eot_id|>").ids
    assert [WHOLE[i] for i in ids] == ["hell", "o", "\u0120a", "<user>", "<|eot_id|>"]
    assert found.tokenizer.decode(ids) == "hello a<user>"
    assert found.tokenizer.decode(ids, skip_special_tokens=False) == "hello a<user><|eot_id|>"
    assert read(eos_token_id=None).stops == (EOT,), "a control token of that name ends an output"
    assert read(eos_token_id=0, eot_token_id=5).stops == (0, 5, EOT)


def test_in_gpt_oss_the_end_of_a_message_ends_no_output() -> None:
    """`<|return|>` and `<|call|>` do; where these are not, `<|end|>` does."""
    harmony = (*BYTES, *WHOLE[256:260], "<|end|>", "<|return|>", "<|call|>")
    of_file = {"tokens": harmony, "token_type": (*(1,) * 260, 3, 3, 3), "bos_token_id": None, "pre": "gpt-4o"}
    assert read(**of_file, eos_token_id=261).stops == (261, 262)
    phi = (*harmony[:262], "<|user|>")
    assert read(**{**of_file, "tokens": phi}, eos_token_id=261).stops == (261, 260)


def test_what_stands_around_a_text_is_as_the_file_says() -> None:
    """BOS and EOS; where it says nothing llama-bpe begins with BOS and others do not."""
    assert read().tokenizer.encode("h").ids == [BYTES.index("h")]
    assert read(pre="llama-bpe").tokenizer.encode("h").ids == [BOS, BYTES.index("h")]
    assert read(pre="llama-bpe", add_bos_token=False).tokenizer.encode("h").ids == [BYTES.index("h")]
    both = read(add_bos_token=True, add_eos_token=True).tokenizer
    assert both.encode("h").ids == [BOS, BYTES.index("h"), EOT]
    assert both.encode("h", add_special_tokens=False).ids == [BYTES.index("h")]


@settings(max_examples=60)
@given(st.text(max_size=40), st.sampled_from(["gpt-2", "smollm", "llama-bpe", "default"]))
def test_any_text_comes_back(text: str, pre: str) -> None:
    """Over bytes nothing is lost; `qwen2` normalises."""
    tokenizer = TOKENIZERS.setdefault(pre, read(pre=pre, add_bos_token=False).tokenizer)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


TOKENIZERS: dict[str, object] = {}

LETTERS = "abcdehlor,\u2581"
WORDS = ("he", "ll", "llo", "lo", "hello", "\u2581he", "\u2581a", "ab", "bc", "abc", "\u2581\u2581")
PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *WORDS)
SCORES = (*(0.0,) * 259, *(-100.0 - i for i in range(len(LETTERS))), *(-3.0, -5, -1, -2, -9, -4, -6, -8, -7, -12, -11))
PIECE_TYPES = (2, 3, 3, *(6,) * 256, *(1,) * (len(LETTERS) + len(WORDS)))


def sentence_piece(**more: object):
    same = {"model": "llama", "pre": None, "tokens": PIECES, "merges": None, "token_type": PIECE_TYPES}
    ids = {"scores": SCORES, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return vocabulary(entries(**same, **ids, **more) if not more else entries(**{**same, **ids, **more}), 400, PATH)


def by_scores(text: str) -> list[int]:
    """SentencePiece's BPE: of all neighbours the best score is merged, the first of equal ones, until none is left."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        fit = [(SCORES[PIECES.index(a + b)], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in WORDS]
        if not fit:
            break
        at = -max(fit)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[PIECES.index(p)] if p in PIECES else [3 + byte for byte in p.encode()] for p in parts]
    return [index for each in known for index in each]


@settings(max_examples=80)
@given(st.text(alphabet="abcdehlo ,r\u00e9\u4f60", max_size=24))
def test_scores_merge_as_sentence_piece_does(text: str) -> None:
    """Against a merge by hand; what no token spells becomes bytes; a space is put first, and taken away again."""
    tokenizer = TOKENIZERS.setdefault("llama", sentence_piece().tokenizer)
    expected = by_scores(" " + text) if text else []
    assert tokenizer.encode(text).ids == [1, *expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_sentence_piece_without_a_space_in_front() -> None:
    tokenizer = sentence_piece(add_space_prefix=False, add_bos_token=False).tokenizer
    assert tokenizer.encode("hello a").ids == by_scores("hello a")
    assert tokenizer.decode(by_scores(" hello")) == " hello"


GEMMA = {
    "tokens": (*PIECES, "<start_of_turn>", "<end_of_turn>", "  ", "   ", "\n\n"),
    "scores": (*SCORES, *(0.0,) * 5),
    "token_type": (*PIECE_TYPES, 3, 3, 4, 4, 4),
    **{"pre": "default", "add_space_prefix": False, "add_bos_token": True},
}


@settings(max_examples=60)
@given(st.text(alphabet="ab he\n\u4f60", max_size=16), st.sampled_from(["", "<start_of_turn>", "<end_of_turn>"]))
def test_gemmas_tokens_of_users_come_before_its_merges(text: str, control: str) -> None:
    """Runs of spaces and lines, which are stored as they are; no space is put first; a turn's end ends an output."""
    found = TOKENIZERS.setdefault("gemma", sentence_piece(**GEMMA))
    assert found.stops == (2, GEMMA["tokens"].index("<end_of_turn>"))
    own = "(<start_of_turn>|<end_of_turn>|   |  |\n\n)"
    expected = [
        index
        for part in re.split(own, text + control)
        for index in ([GEMMA["tokens"].index(part)] if re.fullmatch(own, part) else by_scores(part))
    ]
    assert found.tokenizer.encode(text + control).ids == [1, *expected]
    assert found.tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5'.*only gpt2 and llama"),
        ({"pre": "bloom"}, "tokenizer.ggml.pre 'bloom'.*smollm, llama-bpe, gpt-4o, tekken"),
        ({"merges": ("h x",)}, "merges 'h x'"),
        ({"merges": ("hello",)}, "merges 'hello'"),
        ({"merges": None}, "merges .*must be a list of text"),
        ({"tokens": (*BYTES, *BYTES)}, "512 tokens, 256 of them different"),
        ({"tokens": (1, 2)}, "tokens .*must be a list of text"),
        ({"token_type": (1,)}, "token_type .*must be 263 numbers"),
        ({"eos_token_id": 263}, "eos_token_id 263: there are 263 tokens"),
        ({"eos_token_id": "2"}, "eos_token_id '2': must be one int"),
        ({"model": "llama", "scores": (0.5,)}, "scores .*must be 263 numbers"),
        ({"add_bos_token": 1}, "add_bos_token 1: must be one bool"),
    ],
)
def test_what_is_no_vocabulary_is_refused_by_name(more: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(**more)
