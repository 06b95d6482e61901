"""How many tokens a text has at least, told from its length, for tokenizers of which that can be told."""

import json
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import models, pre_tokenizers

NFC_SHRINKS = 4
"""UTF-8 bytes of a text over those of its composed form, at most; the largest is 3.5, that of U+0390."""


def bytes_of_a_token(bpe: BpeTokenizer) -> int | None:
    """Most UTF-8 bytes of a text that one token can stand for; None where no such number is known.

    It is known of BPE over bytes, or with a token for every byte to fall back to, if nothing on the way drops text: no
    token for the unknown then takes a run of characters, and each byte of the normalised text lies in one token.
    """
    model, added = bpe.model, bpe.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    shrinks, splits = _shrinks(parts_of(bpe.normalizer)), parts_of(bpe.pre_tokenizer)
    if shrinks is None or not all(map(_keeps_all, splits)) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocab = bpe.get_vocab(with_added_tokens=False)
    contents = {token.content for token in added}
    texts = contents if bpe.normalizer is None else contents | {bpe.normalizer.normalize_str(each) for each in contents}
    longest = max((len(each.encode()) for each in texts), default=1)
    if any(split["type"] == "ByteLevel" for split in splits):
        whole = all(character in vocab for character in pre_tokenizers.ByteLevel.alphabet())
        longest = max(longest, *(len(token) for token in vocab))  # a character stands for a byte
    else:
        whole = model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
        longest = max(longest, *(len(token.encode()) for token in vocab))
    return longest * shrinks if whole else None


def parts_of(component: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the file's JSON has it, sequences laid flat."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [each for inner in part.get("normalizers", part.get("pretokenizers", ())) for each in _flat(inner)]


def _shrinks(normalizers: list[dict[str, Any]]) -> int | None:
    """By what factor these make a text shorter at most; None if one may drop any amount."""
    factor = 1
    for each in normalizers:
        pattern = each.get("pattern", {}).get("String")
        if each["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif each["type"] == "Replace":
            if pattern is None or len(each["content"].encode()) < len(pattern.encode()):
                return None
        elif each["type"] != "Prepend":
            return None
    return factor


def _keeps_all(split: dict[str, Any]) -> bool:
    return split["type"] in ("ByteLevel", "Digits", "Metaspace") or (
        split["type"] == "Split" and split["behavior"] != "Removed"
    )
