"""Which tokens of a language model that drafts are its target's: the same ids where they name the same words, else the
same text, token by token.

A token of the target that the draft lacks is read as the longest of the draft's tokens that its text ends with; a token
of the draft that the target lacks is never proposed. Drafts shape trees only, so no token of an output depends on it.
Source: token-level intersection, arXiv:2502.05202; vLLM's `use_heterogeneous_vocab`.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from treetop.types.errors import CheckpointError, shown

log = logging.getLogger("treetop")
Spelling = tuple[bool, bytes]
"""Whether a token is special, and what it stands for: of a special one its name."""


@dataclass(frozen=True, slots=True)
class SharedWords:
    """Tokens of the same text in two vocabularies.

    reads: [target vocab] int64, the draft's token that each of the target's is read as.
    proposed, meant: [n] int64, the draft's tokens that the target has, and the target's, ascending.
    """

    reads: Tensor
    proposed: Tensor
    meant: Tensor


def shared_words(draft: Path, draft_vocab: int, target: Path, target_vocab: int) -> SharedWords | None:
    """By the `tokenizer.json` of both folders; None where tokens that both name are the same: ids mean the same then.

    Without both files the sizes of the vocabularies have to be equal. Raises CheckpointError where they are not, for a
    file that cannot be read, and for vocabularies that share nothing.
    """
    files = [folder / "tokenizer.json" for folder in (draft, target)]
    if not all(file.is_file() for file in files):
        if draft_vocab != target_vocab:
            raise CheckpointError(
                f"{draft}: a draft with a vocabulary of {draft_vocab} tokens for a target with {target_vocab}, and"
                f" no tokenizer.json in {' and in '.join(str(f.parent) for f in files if not f.is_file())} to tell"
                " which tokens are the same words; give both, or a draft with the target's vocabulary to"
                " --speculative-draft-model-path"
            )
        return None
    own, wanted = (_read(file) for file in files)
    names = [{token: word for word, token in each.get_vocab(with_added_tokens=True).items()} for each in (own, wanted)]
    if all(names[0][token] == names[1][token] for token in names[0].keys() & names[1].keys()):
        return None
    spelled = {token: said for token, said in _spellings(own, files[0], names[0]).items() if token < draft_vocab}
    meant = {token: said for token, said in _spellings(wanted, files[1], names[1]).items() if token < target_vocab}
    tokens = {said: token for token, said in sorted(spelled.items(), reverse=True)}  # the first of equal ones
    by_text = {said: token for token, said in sorted(meant.items(), reverse=True)}
    both = sorted((by_text[said], token) for said, token in tokens.items() if said in by_text)
    if not both:
        raise CheckpointError(
            f"{files[0]}: no token has the text of one of the target's: its token 0 is {shown(names[0].get(0))}, the"
            f" target's is {shown(names[1].get(0))}; give a draft with more of the target's vocabulary to"
            " --speculative-draft-model-path"
        )
    log.info(
        "%s: another vocabulary than the target's: %d of its %d tokens have the text of one of the target's %d; others"
        " are never proposed", draft, len(both), len(spelled), len(meant),
    )  # fmt: skip
    reads = [_read_as(meant.get(token), tokens) for token in range(target_vocab)]
    ours, theirs = (torch.tensor([pair[side] for pair in both]) for side in (1, 0))
    return SharedWords(torch.tensor(reads), ours, theirs)


def _read_as(said: Spelling | None, tokens: dict[Spelling, int]) -> int:
    """The draft's token of this spelling, else of the longest end of it; 0 where nothing is known of it."""
    if said is None or said in tokens:
        return 0 if said is None else tokens[said]
    text = said[1]
    ends = ((False, text[start:]) for start in range(len(text)))
    return next((tokens[end] for end in ends if end in tokens), 0)


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None


def _spellings(tokenizer: Tokenizer, file: Path, names: dict[int, str]) -> dict[int, Spelling]:
    """Of each token that has a name.

    Of tokens over bytes a character stands for a byte; of others a lower one eighth block for a space, and <0x41> for a
    byte. Source: GPT-2's `bytes_to_unicode`, SentencePiece's byte fallback.
    """
    added = tokenizer.get_added_tokens_decoder()
    whole = json.loads(file.read_text(encoding="utf-8"))
    over_bytes = any(_has_byte_level(whole.get(part)) for part in ("pre_tokenizer", "decoder"))
    bytes_of = _BYTES if over_bytes else {}
    found = dict[int, Spelling]()
    for token, name in names.items():
        if token in added:
            found[token] = added[token].special, name.encode()
        elif all(character in bytes_of for character in name):
            found[token] = False, bytes(bytes_of[character] for character in name)
        elif len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">"):
            found[token] = False, bytes.fromhex(name[3:5])
        else:
            found[token] = False, name.replace("\u2581", " ").encode()
    return found


def _has_byte_level(part: Any) -> bool:
    """Whether a pre-tokenizer or decoder, or one within it, is of bytes."""
    if isinstance(part, dict):
        return part.get("type") == "ByteLevel" or any(_has_byte_level(each) for each in part.values())
    return isinstance(part, list) and any(_has_byte_level(each) for each in part)


def _byte_characters() -> dict[str, int]:
    """The byte that each of GPT-2's printable characters stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
