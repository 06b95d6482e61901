"""The constraint state of a request: which tokens its constraint allows next."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from treetop.scheduler.tree_walk import TreeWalk
from treetop.types.constraint import Branch, SlowConstraint, StructuredOutput, TokenConstraint
from treetop.types.errors import CheckError, InputError
from treetop.types.messages import NodeMasks, RowTree
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams


class ConstraintState:
    """Sets of tokens are integers here, bit t for token t.

    allowed: what may come next, by all that rules tokens out; it counts while no question is open.

    A round of such a request accepts drafts whose nodes a walk has reached. Without a walk it takes its root's choice
    alone.
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
        self._walk: TreeWalk | None = None
        self._walking: Future[None] | None = None
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
            answer_bits = self._bits_of_answer(asked.result())
        except InputError:
            raise
        except BaseException as error:  # a caller's own code may exit, a library's may panic
            raise failed(error) from error
        self.allowed = self._left_of(answer_bits, ())
        if answer_bits and not self.allowed:
            raise InputError("the constraint allows no token that bad_words, allowed_token_ids and min_tokens leave")
        if self._begun:
            return answer_bits != 0
        return self._first_answer(answer_bits)

    def _first_answer(self, answer_bits: int) -> bool | None:
        """To the questions of the start, which are two if something was received. Raises InputError if it is none."""
        if not answer_bits:
            behind = f"token after the {self._num_output} received" if self._num_output else "first token"
            raise InputError(f"the constraint allows no {behind}")
        received, self._received = self._received, ()
        if received:
            return self.advance(received)
        self._begun = True
        return True

    def _ask(self, new_ids: Sequence[int]) -> None:
        walking, self._walking = self._walking, None
        if walking is not None and walking.done() and (error := walking.exception()) is not None:
            raise failed(error) from error
        self._num_output += len(new_ids)
        self._recent = [*self._recent, *new_ids][-self._most_recent :] if self._most_recent else []
        self.asked, self.asked_s = self._constraint.ask(tuple(new_ids)), time.monotonic()

    def _left_of(self, answer_bits: int, drafts: tuple[int, ...]) -> int:
        """What all else leaves of an answer, where the output and these drafts stand before."""
        left = answer_bits & self._listed
        if self._num_output + len(drafts) < self._min_tokens:
            left &= ~self._ends
        if self._bad_words:
            recent = (*self._recent, *drafts)
            left &= ~_bits(word[-1] for word in self._bad_words if _is_next(word, recent))
        return left

    def mask(self) -> bytes:
        """`allowed`, bit t % 8 of byte t // 8 for token t."""
        return self._packed(self.allowed)

    def _packed(self, allowed: int) -> bytes:
        return allowed.to_bytes(-(-self._vocab_size // 8), "little")

    @property
    def forced(self) -> tuple[int, ...]:
        """What must follow, as far as that is known. No question is open."""
        return self._constraint.forced

    def walk(self, tree: RowTree, until_s: float) -> "Future[None] | None":
        """Begin to find out what may follow the nodes of its tree, until then by `time.monotonic`. No question is open.

        None if it keeps to one token a round.
        """
        self._walk = walk = TreeWalk(tree)

        def visit(branch: Branch) -> None:
            walk.visit(branch, self.allowed, self._bits_behind, self._ends, until_s)

        self._walking = self._constraint.walk(visit)
        return self._walking

    def walked(self) -> NodeMasks:
        """What the walk has found by now, which is all that counts of it, and the tree with what is forced."""
        assert self._walk is not None
        self._walk, source = self._walk.snapshot().with_branches()
        tree, known = self._walk.tree, self._walk.allowed
        masks = {node: self._packed(allowed) for node, allowed in known.items()}
        return NodeMasks(tree.row, masks, tree if source else None, source)

    def _bits_behind(self, answer: Iterable[int] | bytes | None, drafts: tuple[int, ...]) -> int:
        return self._left_of(self._bits_of_answer(answer), drafts)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise CheckError for what must never leave: a token that is not allowed, or one behind what is not known.

        tokens: of a step.
        """
        walk, self._walk = self._walk, None
        allowed, node = self.allowed, 0
        for place, token in enumerate(tokens):
            if place:
                found = None if walk is None else walk.child(node, tokens[place - 1])
                node, allowed = (0, 0) if walk is None or found is None else (found, walk.allowed[found])
            if not allowed >> token & 1:
                raise CheckError(
                    f"a constrained request got tokens {list(tokens)}: token {token} is none that its constraint allows"
                )

    def _bits_of_answer(self, answer: Iterable[int] | bytes | None) -> int:
        if answer is None:
            return self._all
        answer_bits = int.from_bytes(answer, "little") if isinstance(answer, bytes) else _bits(answer)
        if answer_bits > self._all:
            raise InputError(
                f"the constraint allows token {answer_bits.bit_length() - 1} of a vocabulary of {self._vocab_size}"
            )
        return answer_bits


class Structures(Protocol):
    """Makes constraints of structures; see `StructuredOutputManager`."""

    def constraint(self, asked: StructuredOutput, without: Sequence[int] = ()) -> SlowConstraint: ...


def constrained_by(
    asked: EngineRequest,
    stop_ids: frozenset[int],
    eos_ids: frozenset[int],
    vocab_size: int | None,
    structures: Structures | None,
) -> "ConstraintState | None":
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
    made = ConstraintState(slow, vocab_size, asked.params, stop_ids, asked.received, asked.bad_words)
    made.answer()  # a caller's constraint has one
    return made


class _Anything:
    """Where only bad words rule tokens out."""

    def allowed(self, _: Sequence[int]) -> None:
        return None

    def rollback(self, _: int) -> None:
        return None


class Inline:
    """A caller's constraint, which answers at once, on the thread that asks."""

    overdue, forced = None, ()

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint

    def ask(self, new_ids: Sequence[int]) -> "Future[Any]":
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._constraint.allowed(tuple(new_ids)))
        except BaseException as error:
            answer.set_exception(error)
        return answer

    def walk(self, visit: Callable[[Branch], None]) -> "Future[None] | None":
        rollback = getattr(self._constraint, "rollback", None)
        if not callable(rollback):
            return None
        visited: Future[None] = Future()
        try:
            visit(_InlineBranch(self._constraint, rollback))
            visited.set_result(None)
        except BaseException as error:
            visited.set_exception(error)
        return visited


class _InlineBranch:
    """A caller's constraint along a tree."""

    def __init__(self, constraint: TokenConstraint, rollback: Callable[[int], None]) -> None:
        self._constraint, self._rollback = constraint, rollback

    def accept(self, token: int) -> Iterable[int] | bytes | None:
        return self._constraint.allowed((token,))

    def rollback(self) -> bool:
        self._rollback(1)
        return True


def failed(error: BaseException) -> InputError:
    return InputError(f"the constraint failed: {type(error).__name__}: {_said(error)}")


def _is_next(word: tuple[int, ...], recent: tuple[int, ...]) -> bool:
    """Whether the output, which ends so, ends with all of a bad word but its last token."""
    before = len(word) - 1
    return not before or recent[-before:] == word[:-1]


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
