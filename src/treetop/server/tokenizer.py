"""Text to ids and back, by the `tokenizers` library."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer

from treetop.models.spec import integers
from treetop.types.errors import CheckpointError, InputError

_CONTEXT = 6
"""Tokens of a prompt that its output's first pieces are decoded with."""
_UNKNOWN = "\ufffd"
"""What bytes that are no character, or not yet, decode to."""
_LONGEST = 16
"""Tokens that may wait for a character to become complete; UTF-8 needs four bytes at most."""


class Tokenizer:
    """A checkpoint's `tokenizer.json`, without the truncation and padding that its training may have left in it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json in it; pass token ids instead of text")
        try:
            self._bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        self._bpe.no_truncation()
        self._bpe.no_padding()

    @property
    def vocab_size(self) -> int:
        return int(self._bpe.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the checkpoint's template adds."""
        try:
            return list(self._bpe.encode(text).ids)
        except TypeError:  # lone surrogates: bytes of a terminal that are not UTF-8
            raise InputError("the prompt is not valid UTF-8 text") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._bpe.decode(list(ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Sequence[int] = ()) -> "TokenStream":
        """Of what follows these ids."""
        return TokenStream(self, prompt_ids)


class TokenStream:
    """Ids to text, one at a time, as it reads after the prompt; a character's bytes give it when it is complete.

    A token is decoded with the few before it, and what those gave is cut off: so a space that decoders drop at the
    beginning of a text stays between a prompt and its output. Any ids give some text. The idea is that of Hugging
    Face's text-generation-inference.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._given = len(self._ids)  # tokens whose text is known
        self._known = tokenizer.decode(self._ids).rstrip(_UNKNOWN)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        waits = len(self._ids) - self._given < _LONGEST
        return "" if waits and self._tokenizer.decode(self._ids).endswith(_UNKNOWN) else self.flush()

    def flush(self) -> str:
        """The text of what waits, complete or not."""
        piece = self._tokenizer.decode(self._ids)[len(self._known) :]
        if piece:
            self._ids = self._ids[self._given :]
            self._known = self._tokenizer.decode(self._ids)
        else:
            del self._ids[self._given :]
        self._given = len(self._ids)
        return piece


def extra_eos_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids that `generation_config.json` names beside those of `config.json`."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return integers(config, "eos_token_id", path)
