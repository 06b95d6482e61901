"""A request whose next token the host must name: what its constraint allows, as far as its output has come."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from treetop.types.constraint import SlowConstraint, StructuredOutput, TokenConstraint
from treetop.types.errors import CheckError, InputError
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams


class Constrained:
    """Sets of tokens are integers here, bit t for token t. allowed: what may come next, by all that rules tokens out;
    it counts while no question is open.

    A round of such a request takes its root's choice and no draft, because the host knows what is allowed after the
    root alone.
    """

    def __init__(
        self,
        constraint: SlowConstraint,
        vocab_size: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        received: Sequence[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Asks for the first token, and then for that behind what was `received`. bad_words: none may be completed."""
        self._bad_words, self._recent = bad_words, list[int]()
        self._most_recent = max((len(word) - 1 for word in bad_words), default=0)
        self._constraint, self._vocab_size, self._min_tokens = constraint, vocab_size, params.min_tokens
        self._all = (1 << vocab_size) - 1
        self._ends = _bits(token for token in stop_ids if token < vocab_size)
        listed = params.allowed_token_ids
        self._listed = self._all if listed is None else _bits(listed)
        self._num_output, self._received, self._begun = 0, tuple(received), False
        self.allowed = 0
        self.asked: Future[Any] | None = None
        """The answer to come, if a question is open."""
        self.asked_s = 0.0
        """When it was asked, by `time.monotonic`."""
        self._ask(())

    def advance(self, new_ids: Sequence[int]) -> bool | None:
        """The output has grown. As `answer`."""
        self._ask(new_ids)
        return self.answer()

    def answer(self) -> bool | None:
        """Whether the output may go on; None if that is not known yet. A question is open.

        Raises InputError if the constraint fails, or takes too long.
        """
        assert self.asked is not None
        if not self.asked.done():
            if (why := self._constraint.overdue) is not None:
                raise InputError(why)
            return None
        asked, self.asked = self.asked, None
        try:
            told = self._told(asked.result())
        except InputError:
            raise
        except BaseException as error:  # a caller's own code may exit, a library's may panic
            raise InputError(f"the constraint failed: {type(error).__name__}: {_said(error)}") from error
        self.allowed = told & self._listed
        if self._num_output < self._min_tokens:
            self.allowed &= ~self._ends
        self.allowed &= ~_bits(word[-1] for word in self._bad_words if self._is_next(word))
        if told and not self.allowed:
            raise InputError("the constraint allows no token that bad_words, allowed_token_ids and min_tokens leave")
        if self._begun:
            return told != 0
        return self._first_answer(told)

    def _first_answer(self, told: int) -> bool | None:
        """To the questions of the start, which are two if something was received. Raises InputError if it is none."""
        if not told:
            behind = f"token after the {self._num_output} received" if self._num_output else "first token"
            raise InputError(f"the constraint allows no {behind}")
        received, self._received = self._received, ()
        if received:
            return self.advance(received)
        self._begun = True
        return True

    def _ask(self, new_ids: Sequence[int]) -> None:
        self._num_output += len(new_ids)
        self._recent = [*self._recent, *new_ids][-self._most_recent :] if self._most_recent else []
        self.asked, self.asked_s = self._constraint.ask(tuple(new_ids)), time.monotonic()

    def _is_next(self, word: tuple[int, ...]) -> bool:
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


class Structures(Protocol):
    """Makes constraints of structures; see `StructuredOutputManager`."""

    def constraint(self, asked: StructuredOutput, without: Sequence[int] = ()) -> SlowConstraint: ...


def constrained_by(
    asked: EngineRequest,
    stop_ids: frozenset[int],
    eos_ids: frozenset[int],
    vocab_size: int | None,
    structures: Structures | None,
) -> "Constrained | None":
    """What holds a request's tokens, None if nothing does. eos_ids: the model's, which never come where they are
    ignored. vocab_size: None where no constraint can be kept. structures: None where no structure can.

    Raises InputError for what cannot be kept.
    """
    structure, constraint = asked.params.structured_output, asked.constraint
    if structure is None and constraint is None:
        if all(len(word) == 1 for word in asked.bad_words):
            return None
        constraint = _Anything()
    if structure is not None and constraint is not None:
        raise InputError("structured_output, constraints: give one of them")
    if vocab_size is None or (structure is not None and structures is None):
        raise InputError("structured_output, constraints: this engine holds no tokens to a structure")
    slow: SlowConstraint
    if structure is not None:
        assert structures is not None
        slow = structures.constraint(structure, sorted(each for each in eos_ids - stop_ids if each < vocab_size))
    else:
        assert constraint is not None
        slow = Inline(constraint)
    made = Constrained(slow, vocab_size, asked.params, stop_ids, asked.received, asked.bad_words)
    made.answer()  # a caller's constraint has one
    return made


class _Anything:
    """Where only bad words rule tokens out."""

    def allowed(self, _: Sequence[int]) -> None:
        return None


class Inline:
    """A caller's constraint, which answers at once, on the thread that asks."""

    overdue = None

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint

    def ask(self, new_ids: Sequence[int]) -> "Future[Any]":
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._constraint.allowed(tuple(new_ids)))
        except BaseException as error:
            answer.set_exception(error)
        return answer


def _said(error: BaseException) -> str:
    """Its words, which may fail like all of a caller's code."""
    try:
        return str(error)
    except BaseException:
        return "it cannot be shown"


def _bits(ids: Iterable[int]) -> int:
    listed = [*ids]
    mask = bytearray(max(listed, default=0) // 8 + 1)
    for token in listed:
        if token < 0:
            raise InputError(f"the constraint allows token {token}")
        mask[token // 8] |= 1 << token % 8
    return int.from_bytes(mask, "little")
