"""Names of special tokens in what clients write: they are text there, and tokens only where a chat template puts them.

A template may do anything to a message, so a message cannot be found again in what is rendered. Therefore the first
character of each such name is exchanged for a mark, a character that nothing else holds. The rendered text then has a
name only where the template wrote it. A mark outlives what templates do: trimming, splitting, joining, JSON. If one is
lost, the text around it is still no special token.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from treetop.text.pieces import can_be_cut, ids_in_pieces
from treetop.types.errors import InputError

_PRIVATE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Characters for private use."""


@dataclass(frozen=True, slots=True)
class Marks:
    """mark_of: what stands for each character.
    end: stands where the last message ends.
    """

    mark_of: Mapping[str, str]
    end: str

    def in_text(self, text: str) -> bool:
        return any(mark in text for mark in self.mark_of.values())

    def removed(self, text: str) -> str:
        """The text as it was meant."""
        return text.translate({ord(mark): character for character, mark in self.mark_of.items()})


class SpecialText:
    """The special tokens of one tokenizer, by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._tokens = {token.content: (i, token) for i, token in added if token.special and token.content}
        self._ids = frozenset(i for i, _ in self._tokens.values())

    def marks(self, value: object) -> Marks:
        """Marks that a value of JSON does not hold. Raises InputError if it holds all there may be."""
        used = set(json.dumps(value, ensure_ascii=False))
        free = list(islice((mark for mark in map(chr, _PRIVATE) if mark not in used), len(self._characters) + 1))
        if len(free) <= len(self._characters):
            raise InputError("messages: they hold all characters for private use, of which some are needed here")
        return Marks(dict(zip(self._characters, free, strict=False)), free[-1])

    def hidden(self, value: Any, marks: Marks) -> Any:
        """A value of JSON without a name in any text."""
        if isinstance(value, str):
            if not self._tokens or self._names.search(value) is None:
                return value
            return self._starts.sub(lambda found: marks.mark_of[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hidden(key, marks): self.hidden(each, marks) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(each, marks) for each in value]
        return value

    def hidden_content(self, content: str, marks: Marks) -> str:
        """A message's content, also without parts of names at its ends, to which a template might write the rest."""
        text: str = self.hidden(content, marks)
        if self._tokens:
            for found in (self._head_at_end.search(text), self._rest_at_start.match(text)):
                if found is not None:
                    at = found.start(1)
                    text = text[:at] + marks.mark_of.get(text[at], text[at]) + text[at + 1 :]
        return text

    def are_names_alone(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a rendered text has as many names as its ids have special tokens."""
        names = sum(1 for _ in self._names.finditer(text)) if self._tokens else 0
        return names == sum(token in self._ids for token in ids)

    def encode(self, text: str, marks: Marks) -> list[int]:
        """Ids of a rendered text: its names are tokens, and what is marked is text."""
        other, aliases, own_ids = self._other
        text = marks.removed(self._names.sub(lambda found: aliases[found[0]], text))
        return [own_ids.get(token, token) for token in ids_in_pieces(other, text, self._can_be_cut, False)]

    @cached_property
    def _can_be_cut(self) -> bool:
        return can_be_cut(self._other[0])

    @cached_property
    def _characters(self) -> list[str]:
        """All that names are made of, sorted."""
        return sorted({character for name in self._tokens for character in name})

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """The longest name that begins at a place."""
        return re.compile(_any_of(self._tokens))

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        """A character at which a name begins, inside another one, too."""
        return re.compile(rf"(?={_any_of(self._tokens)}).", re.DOTALL)

    @cached_property
    def _head_at_end(self) -> re.Pattern[str]:
        """A text's end that begins a name."""
        return re.compile(rf"({_any_of(name[:end] for name in self._tokens for end in range(1, len(name)))})\s*\Z")

    @cached_property
    def _rest_at_start(self) -> re.Pattern[str]:
        """A text's beginning that ends a name."""
        return re.compile(rf"\s*({_any_of(name[at:] for name in self._tokens for at in range(1, len(name)))})")

    @cached_property
    def _other(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The same tokenizer, to which names are text, and each special token has an alias that nobody can guess.

        Returns it, the aliases of names, and the special tokens of its aliases.
        """
        other, key = Tokenizer.from_str(self._tokenizer.to_str()), secrets.token_hex(16)
        other.encode_special_tokens = True
        aliases = {name: f"{key}{i:x}." for name, (i, _) in self._tokens.items()}
        other.add_tokens([_alias(aliases[name], token) for name, (_, token) in self._tokens.items()])
        own_ids = {cast(int, other.token_to_id(aliases[name])): i for name, (i, _) in self._tokens.items()}
        return other, aliases, own_ids


def _alias(name: str, token: AddedToken) -> AddedToken:
    """A token of another name that takes the spaces beside it as this one does."""
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False)


def _any_of(words: Iterable[str]) -> str:
    """A pattern of the longest of these words, a tree of what they have in common; nothing matches if there is none."""
    listed = sorted({*words})
    if not listed:
        return "(?!)"
    ends = zip(listed[0], listed[-1], strict=False)  # of sorted words the first and the last differ soonest
    first = listed[0][: next((at for at, (one, other) in enumerate(ends) if one != other), len(listed[0]))]
    rests = [word[len(first) :] for word in listed]
    groups: dict[str, list[str]] = {}
    for rest in filter(None, rests):
        groups.setdefault(rest[0], []).append(rest)
    branches = "|".join(map(_any_of, groups.values()))
    optional = "?" if "" in rests else ""
    return re.escape(first) + (f"(?:{branches}){optional}" if branches else "")
