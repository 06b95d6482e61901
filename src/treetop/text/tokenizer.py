"""Text to ids and back, by the `tokenizers` library."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.decoders import ByteLevel

from treetop.checkpoints.json_file import not_there
from treetop.text.pieces import PIECE, can_be_cut, ids_in_pieces
from treetop.text.special_text import SpecialText
from treetop.text.token_bound import bytes_of_a_token
from treetop.types.errors import CheckpointError, InputError

Decode = Callable[[Sequence[int]], str]
"""Ids to text."""
_CONTEXT = 6
"""Tokens of a prompt that its output's first pieces are decoded with."""
_UNKNOWN = "\ufffd"
"""What bytes that are no character, or not yet, decode to."""
_BYTES = 4
"""Bytes of a character in UTF-8, at most."""
_LONGEST = 16
"""Tokens that may wait for a character to become complete."""
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PLAIN} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))
}
"""Character -> byte, of tokenizers over bytes: those that print stand for themselves, the rest follows from U+0100 on.
Source: GPT-2's vocabulary."""


class Tokenizer:
    """A checkpoint's `tokenizer.json`, without the truncation and padding that its training may have left in it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}; pass token ids instead of text")
        try:
            self._bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        self._bpe.no_truncation()
        self._bpe.no_padding()

    @property
    def vocab_size(self) -> int:
        return int(self._bpe.get_vocab_size())

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text is known to have at least, without encoding it; 0 if nothing is known."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:  # `encode` refuses it
            return 0
        return -(-size // self._bytes_of_a_token) if self._bytes_of_a_token is not None else 0

    @cached_property
    def _bytes_of_a_token(self) -> int | None:
        return bytes_of_a_token(self._bpe)

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """Ids of a prompt. special: with the special tokens that the checkpoint's template adds.

        most: of a text with more the first ids may be all, more than these.
        """
        in_pieces = len(text) > PIECE and self._can_be_cut
        before, after = self._around if special and in_pieces else ((), ())
        try:
            return [*before, *ids_in_pieces(self._bpe, text, in_pieces, special and not in_pieces, most), *after]
        except TypeError:  # lone surrogates: bytes of a terminal that are not UTF-8
            raise InputError("the prompt is not valid UTF-8 text") from None

    @cached_property
    def _can_be_cut(self) -> bool:
        return can_be_cut(self._bpe)

    @cached_property
    def _around(self) -> tuple[Sequence[int], Sequence[int]]:
        """Special tokens before and behind every text."""
        plain, whole = (list(self._bpe.encode("a", add_special_tokens=each).ids) for each in (False, True))
        begin = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:begin], whole[begin + len(plain) :]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids, special tokens left out unless `special`."""
        return str(self._bpe.decode(list(ids), skip_special_tokens=not special))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(i for i, token in self._bpe.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Ids of special tokens by how they read."""
        return {token.content: i for i, token in self._bpe.get_added_tokens_decoder().items() if token.special}

    def decode_each(self, listed: Sequence[list[int]]) -> list[str]:
        """As `decode`, of many ids at a time, while other threads run."""
        return list(self._bpe.decode_batch(list(listed), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, a special one its name; a part of a character is no text."""
        token = self._bpe.id_to_token(token_id) or ""
        if token_id in self._bpe.get_added_tokens_decoder():
            return token.encode()
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        if byte:
            return bytes.fromhex(byte[1])
        if self._over_bytes and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.replace(_SPACE, " ").encode()

    @cached_property
    def _over_bytes(self) -> bool:
        """Whether the characters of tokens stand for bytes."""
        return "ByteLevel" in str(self._bpe.decoder)

    @cached_property
    def _bytes_of(self) -> "tuple[TokenBytes | None, TokenBytes | None]":
        """Of tokens as text without special ones, and with them. None for a decoder that is not over bytes alone."""
        if type(self._bpe.decoder) is not ByteLevel:
            return None, None
        return TokenBytes(self._bpe, self.special_ids), TokenBytes(self._bpe, frozenset())

    @cached_property
    def special_text(self) -> SpecialText:
        """How names of special tokens are told from the tokens."""
        return SpecialText(self._bpe)

    def stream(self, prompt_ids: Sequence[int] = (), special: bool = False) -> "TokenStream":
        """Of what follows these ids. special: show special tokens."""
        return TokenStream(partial(self.decode, special=special), prompt_ids, self._bytes_of[special])


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, None if it has none."""
    return Tokenizer(folder) if os.path.lexists(folder / "tokenizer.json") else None


class TokenBytes(dict[int, bytes]):
    """What a decoder over bytes makes of each token, whatever stands beside it; looked up once. b"" for no token."""

    def __init__(self, bpe: BpeTokenizer, hidden: frozenset[int]) -> None:
        """hidden: ids that give nothing."""
        self._bpe, self._hidden = bpe, hidden

    def __missing__(self, token_id: int) -> bytes:
        token = "" if token_id in self._hidden else self._bpe.id_to_token(token_id) or ""
        stands_for = [_BYTE_OF.get(character) for character in token]
        known = token.encode() if None in stands_for else bytes(byte for byte in stands_for if byte is not None)
        self[token_id] = known
        return known


class TokenStream:
    """Ids to text, some at a time, as it reads after the prompt; a character's bytes give it when it is complete.

    A token is decoded with the few before it, and what those gave is cut off: so a space that decoders drop at the
    beginning of a text stays between a prompt and its output. A prompt may end inside a character: if the output
    completes it, it is the output's; if not, the prompt's bytes are left out. Any ids give some text. The idea is that
    of Hugging Face's text-generation-inference. Where tokens are bytes, and what came before ends with a character,
    these are put together without the decoder: it would give the same.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], bytes_of: Mapping[int, bytes] | None = None) -> None:
        """bytes_of: each token's, None if a token alone does not say them."""
        self._decode, self._bytes_of = decode, bytes_of
        self._before, self._open = _ends_whole(decode, prompt_ids)
        self._known_text = decode(self._before)
        self._own = self._after(self._open)  # what the prompt's open bytes read as if nothing completes them
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete. Whole characters, as nearly always, are decoded together."""
        ids = list(token_ids)
        if self._bytes_of is not None and not (self._open or self._known_text.endswith(_UNKNOWN)):
            return self._joined(ids, self._bytes_of)
        if not self._new and not self._open:
            piece = self._after(ids)
            if not piece.endswith(_UNKNOWN):
                return self._known(ids, piece)
        return "".join(self._push_one(token) for token in ids)

    def _push_one(self, token_id: int) -> str:
        self._new.append(token_id)
        waits = len(self._new) < _LONGEST
        if waits and all(self._after(ids).endswith(_UNKNOWN) for ids in self._readings()):
            return ""
        return self.flush()

    def _joined(self, ids: list[int], bytes_of: Mapping[int, bytes]) -> str:
        """As one after the other."""
        if not self._new:
            with suppress(UnicodeDecodeError):
                piece = b"".join([bytes_of[token] for token in ids]).decode()
                if not piece.endswith(_UNKNOWN):
                    return self._known(ids, piece, piece)
        shown = ""
        for index, token in enumerate(ids):
            self._new.append(token)
            piece = b"".join([bytes_of[each] for each in self._new]).decode(errors="replace")
            if len(self._new) < _LONGEST and piece.endswith(_UNKNOWN):
                continue
            new, self._new = self._new, []
            shown += self._known(new, piece, piece)
            if piece.endswith(_UNKNOWN):  # bytes that follow may change how it reads
                return shown + self.push(ids[index + 1 :])
        return shown

    def flush(self) -> str:
        """The text of what waits, complete or not."""
        if not self._new and not self._open:
            return ""
        ids = self._readings()[0]
        piece = self._after(ids)
        if self._open and piece.startswith(self._own):  # still open
            ids = self._new
            piece = self._after(ids)
        self._new = []
        return self._known(ids, piece)

    def _known(self, ids: list[int], piece: str, alone: str | None = None) -> str:
        """What follows is read behind these ids, if they gave any text. alone: how they read by themselves."""
        if piece:
            self._before, self._open = ids, []
            self._known_text = self._decode(ids) if alone is None else alone
        return piece

    def _readings(self) -> list[list[int]]:
        """The ids that wait, behind the prompt's open bytes and, if it has any, also without them."""
        return [self._open + self._new, self._new] if self._open else [self._new]

    def _after(self, ids: list[int]) -> str:
        """Text of ids behind what is known; by themselves if they change how that reads, as bytes may."""
        text = self._decode(self._before + ids)
        return text[len(self._known_text) :] if text.startswith(self._known_text) else self._decode(ids)


def _ends_whole(decode: Decode, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The last few of a prompt's ids, from one character's beginning to another's end; and what is open after it.

    If no such part is found, its bytes are no text; then the last few ids are taken as they are.
    """
    for end in range(len(ids), max(len(ids) - _BYTES, -1), -1):
        for start in range(max(end - _CONTEXT, 0), max(end - _CONTEXT - _BYTES, -1), -1):
            text = decode(ids[start:end])
            if not text.startswith(_UNKNOWN) and not text.endswith(_UNKNOWN):
                return list(ids[start:end]), list(ids[end:])
    return list(ids[-_CONTEXT:]), []
