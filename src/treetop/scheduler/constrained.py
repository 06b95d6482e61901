"""A request whose next token the host must name: what its constraint allows, as far as its output has come."""

from collections.abc import Iterable, Sequence

from treetop.types.constraint import TokenConstraint
from treetop.types.errors import CheckError, InputError
from treetop.types.sampling import SamplingParams


class Constrained:
    """Sets of tokens are integers here, bit t for token t. allowed: what may come next, by all that rules tokens out.

    A round of such a request takes its root's choice and no draft, because the host knows what is allowed after the
    root alone.
    """

    def __init__(
        self,
        constraint: TokenConstraint | None,
        vocab_size: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        received: Sequence[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Asks for the first token, or for that behind what was `received`. Raises InputError if there can be none.

        constraint: None allows any token. bad_words: of which none may be completed.
        """
        self._bad_words, self._recent = bad_words, list[int]()
        self._most_recent = max((len(word) - 1 for word in bad_words), default=0)
        self._constraint, self._vocab_size, self._min_tokens = constraint, vocab_size, params.min_tokens
        self._all = (1 << vocab_size) - 1
        self._ends = _bits(token for token in stop_ids if token < vocab_size)
        listed = params.allowed_token_ids
        self._listed = self._all if listed is None else _bits(listed)
        self._num_output = 0
        self.allowed = 0
        if not self.advance(()):
            raise InputError("the constraint allows no first token")
        if received and not self.advance(received):
            raise InputError(f"the constraint allows no token after the {len(received)} received")

    def advance(self, new_ids: Sequence[int]) -> bool:
        """The output has grown. Returns whether it may go on. Raises InputError if the constraint fails."""
        self._num_output += len(new_ids)
        self._recent = [*self._recent, *new_ids][-self._most_recent :] if self._most_recent else []
        try:
            told = self._all if self._constraint is None else self._told(self._constraint.allowed(tuple(new_ids)))
        except InputError:
            raise
        except Exception as error:  # a caller's own code
            raise InputError(f"the constraint failed: {type(error).__name__}: {error}") from error
        self.allowed = told & self._listed
        if self._num_output < self._min_tokens:
            self.allowed &= ~self._ends
        self.allowed &= ~_bits(word[-1] for word in self._bad_words if self._begun(word))
        if told and not self.allowed:
            raise InputError("the constraint allows no token that bad_words, allowed_token_ids and min_tokens leave")
        return told != 0

    def _begun(self, word: tuple[int, ...]) -> bool:
        """Whether the output ends with all of a bad word but its last token."""
        before = len(word) - 1
        return not before or tuple(self._recent[-before:]) == word[:-1]

    def mask(self) -> bytes:
        """`allowed`, bit t % 8 of byte t // 8 for token t."""
        return self.allowed.to_bytes(-(-self._vocab_size // 8), "little")

    def check(self, tokens: Sequence[int]) -> None:
        """Raise CheckError for what must never leave: a token that is not allowed, or more than one."""
        if len(tokens) != 1 or not self.allowed >> tokens[0] & 1:
            raise CheckError(f"a constrained request got tokens {list(tokens)}: not one that its constraint allows")

    def _told(self, said: Iterable[int] | bytes | None) -> int:
        if said is None:
            return self._all
        told = int.from_bytes(said, "little") if isinstance(said, bytes) else _bits(said)
        if told > self._all:
            raise InputError(
                f"the constraint allows token {told.bit_length() - 1} of a vocabulary of {self._vocab_size}"
            )
        return told


def _bits(ids: Iterable[int]) -> int:
    listed = [*ids]
    mask = bytearray(max(listed, default=0) // 8 + 1)
    for token in listed:
        if token < 0:
            raise InputError(f"the constraint allows token {token}")
        mask[token // 8] |= 1 << token % 8
    return int.from_bytes(mask, "little")
