"""Long texts are encoded a piece at a time: ids are those of the whole, and memory is a piece's."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from support.examples import some_of
from support.serving import TOKENIZER
from treetop.text import pieces
from treetop.text.pieces import can_be_cut, ids_in_pieces, pieces_of
from treetop.text.tokenizer import Tokenizer

SPLITS = {
    "gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm2": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama3": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
TEXTS = st.text(st.sampled_from("ab'sS1 ,.\"\n\r\t_\u0301\u00e9\u4e2d<|>\u00a0"), max_size=60)


def over_bytes(splits, normalizer=None, special=()):
    """Pairs of bytes are tokens, so a cut inside a word shows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = [*alphabet, *(a + b for a in alphabet for b in alphabet)]
    merges = [(a, b) for a in alphabet for b in alphabet]
    bpe = BpeTokenizer(models.BPE(vocab={token: i for i, token in enumerate(found)}, merges=merges))
    parts = [pre_tokenizers.Split(Regex(each), "isolated") if isinstance(each, str) else each for each in splits]
    if all(isinstance(each, str) for each in splits):
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if normalizer is not None:
        bpe.normalizer = normalizer
    bpe.add_tokens([AddedToken("<|a|>", special=True), *special])
    return bpe


TOKENIZERS = {name: over_bytes(splits, normalizers.NFC()) for name, splits in SPLITS.items()}


@pytest.mark.parametrize("name", [*SPLITS, "ours"])
@given(text=TEXTS)
@some_of(100, 2000)
def test_ids_of_pieces_are_those_of_the_whole(name, text):
    bpe = TOKENIZER._bpe if name == "ours" else TOKENIZERS[name]
    assert can_be_cut(bpe)
    with patch.object(pieces, "PIECE", 1):
        cut = [*pieces_of(text)]
        assert "".join(cut) == text
        assert ids_in_pieces(bpe, text, True, False) == bpe.encode(text, add_special_tokens=False).ids


def test_a_text_is_cut_wherever_it_may_be():
    with patch.object(pieces, "PIECE", 1):
        assert [*pieces_of('of the, "one".  Two\n three')] == ["of", " the,", ' "one".  Two\n three']


def test_what_may_see_over_a_cut_is_not_cut():
    """Spaces that become part of words, tokens that take spaces, patterns nobody has read."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert can_be_cut(over_bytes([level]))
    for bpe in (
        over_bytes([level], normalizers.Prepend("x")),
        over_bytes([pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        over_bytes([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        over_bytes([r"\S+ \S+|\s+"]),
        over_bytes([level], special=[AddedToken("a b")]),
        over_bytes([level], special=[AddedToken("<m>", lstrip=True)]),
        over_bytes([pre_tokenizers.Metaspace()]),
    ):
        assert not can_be_cut(bpe)


def test_special_tokens_stand_around_a_text_in_pieces_once(tmp_path):
    bpe = over_bytes(SPLITS["llama3"], special=[AddedToken("<e>", special=True)])
    bpe.post_processor = processors.TemplateProcessing(
        "<|a|> $A <e>", special_tokens=[(n, bpe.token_to_id(n)) for n in ("<|a|>", "<e>")]
    )
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer(tmp_path), "some words, " * 50
    whole = tokenizer.encode(text), tokenizer.encode(text, special=False)
    with patch.object(pieces, "PIECE", 40), patch("treetop.text.tokenizer.PIECE", 40):
        assert (tokenizer.encode(text), tokenizer.encode(text, special=False)) == whole
        few = tokenizer.encode(text, most=20)
        assert 20 < len(few) < 60
        assert few[: len(few) - 1] == whole[0][: len(few) - 1]


PEAK = """
import re, sys
from pathlib import Path
from unittest.mock import patch

from support.serving import TOKENIZER

def peak():  # kB; of this process alone, unlike getrusage's, which begins with its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

if len(sys.argv) > 2:
    patch("treetop.text.tokenizer.PIECE", 2**40).start()
text, before = "ab cd " * (2**20 * int(sys.argv[1]) // 6), peak()
print(len(TOKENIZER.encode(text)), peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_text_takes_little_more_than_its_ids():
    """Of 2 MiB of short words 700,000 ids, and less than 100 MB where all at once take some 325."""

    def measured(*more):
        words = [sys.executable, "-c", PEAK, "2", *more]
        tests = Path(__file__).parents[1]  # where `support` is
        ran = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tests)
        return map(int, ran.stdout.split())

    (count, took), (same, whole) = measured(), measured("whole")
    assert count == same
    assert took < 100_000 < whole
