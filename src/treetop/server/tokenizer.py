"""Text to ids and back, by the `tokenizers` library."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.decoders import DecodeStream

from treetop.models.spec import integers
from treetop.types.errors import CheckpointError, InputError


class Tokenizer:
    """A checkpoint's `tokenizer.json`."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json in it; pass token ids instead of text")
        try:
            self._bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None

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

    def stream(self) -> "TokenStream":
        return TokenStream(self._bpe)


class TokenStream:
    """Ids to text, one at a time; a piece of a multi-byte character gives its text when it is complete."""

    def __init__(self, bpe: BpeTokenizer) -> None:
        self._bpe, self._stream = bpe, DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._bpe, token_id) or ""


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
