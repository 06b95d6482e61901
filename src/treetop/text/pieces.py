"""Where a long text may be cut, so that the ids of its parts are the ids of the whole, for tokenizers of which that can
be told: encoding takes some 200 bytes of memory for each of a text, which a part at a time gives back.

    ... of the| first word,| "and ...        before a space that stands between two printed characters of ASCII

No alternative of `_ALTERNATIVES` matches a printed character with a space behind it, and none looks behind itself. So
the word before the cut ends there, and the next begins there, whether the other part is there or not; what looks ahead
(`\\s+(?!\\S)`) ends with a space. Within a word nothing depends on others.
"""

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

from treetop.text.token_bound import parts_of

PIECE = 2**16
"""Characters of a part, about: cuts are looked for from there on."""
_CUT = re.compile(r"(?<=[!-~]) (?=[!-~])")
_ALTERNATIVES = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)"),
        *(r" ?\p{L}+", r" ?[\p{L}_]+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+"),
        *(r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}+", r"\p{N}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}_]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    )
)
"""Of patterns that split words: those of GPT-2, Llama 3, Qwen 2 and ours, each read for the rule above."""


def can_be_cut(bpe: BpeTokenizer) -> bool:
    """Whether every space between printed characters is a safe cut."""
    splits = parts_of(bpe.pre_tokenizer)
    return (
        all(each["type"] == "NFC" for each in parts_of(bpe.normalizer))  # composes no printed character with a space
        and any(_ends_words(each) for each in splits)
        and all(_ends_words(each) or _goes_on(each) for each in splits)
        and not any(
            " " in token.content or token.lstrip or token.rstrip for token in bpe.get_added_tokens_decoder().values()
        )
    )


def ids_in_pieces(bpe: BpeTokenizer, text: str, is_cut: bool, special: bool, most: int | None = None) -> list[int]:
    """Ids of a text. is_cut: `can_be_cut`. special: with the special tokens around it, of one that is not cut.

    most: of a text with more the first ids may be all, more than these. Raises TypeError for lone surrogates.
    """
    ids = list[int]()
    for piece in pieces_of(text) if is_cut else (text,):
        (encoded,) = bpe.encode_batch_fast([piece], add_special_tokens=special)  # other threads run meanwhile
        ids += encoded.ids
        if most is not None and len(ids) > most:
            break
    return ids


def pieces_of(text: str) -> Iterator[str]:
    """The text in parts, cut where it may be from each `PIECE` characters on."""
    begin = 0
    while (cut := _CUT.search(text, begin + PIECE)) is not None:
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def _ends_words(split: dict[str, Any]) -> bool:
    """Whether it ends a word before each such space."""
    if split["type"] == "ByteLevel":
        return bool(split["use_regex"]) and not split["add_prefix_space"]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return False
    pattern = split["pattern"].get("Regex")
    return pattern is not None and _alternatives(pattern) <= _ALTERNATIVES


def _goes_on(split: dict[str, Any]) -> bool:
    """Whether it only splits words further, each by itself."""
    return split["type"] == "Digits" or (split["type"] == "ByteLevel" and not split["add_prefix_space"])


def _alternatives(pattern: str) -> set[str]:
    """Those of the outermost level."""
    found, depth, begin = set(), 0, 0
    for at, each in enumerate(pattern):
        depth += (each in "([") - (each in ")]")
        if each == "|" and not depth:
            found.add(pattern[begin:at])
            begin = at + 1
    return found | {pattern[begin:]}
