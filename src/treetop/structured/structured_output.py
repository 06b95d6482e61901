"""Structures as token constraints. The engine's thread neither compiles them nor computes what may come next.

ask () --> parser of the structure, compiled once for all its requests --> copy, mask --> answer
ask ids, for each token after it -------------------------------------------> mask --> answer
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from treetop.structured.grammars import GrammarCompiler
from treetop.structured.output_parser import OutputParser
from treetop.types.constraint import Branch, StructuredOutput

_MAX_COMPILED = 16
"""Structures whose parsers are kept for requests that come."""
_NUM_COMPILERS = 2
_MAX_MASKERS = 8
_SLACK = 2
"""A structure has been compiled within the limit before, to check it; here others fill the processor's caches."""

Mask = bytes | None
"""Bit t % 8 of byte t // 8 for token t; None for all tokens."""
Result = TypeVar("Result")


class StructuredOutputManager:
    """Makes the constraints of one engine, whose thread alone calls it.

    Its own threads work beside that one, for the library lets go of Python's lock. They end when nothing holds this
    object any more.
    """

    def __init__(self, grammars: GrammarCompiler, timeout_s: float) -> None:
        """timeout_s: processor time that one token's mask may take. Structures have been checked:
        `structured/structure_checker.py`.
        """
        self.timeout_s, self._grammars = timeout_s, grammars
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "treetop-grammar")
        self.maskers = ThreadPoolExecutor(min(_MAX_MASKERS, os.cpu_count() or 1), "treetop-mask")
        self._compiled: OrderedDict[StructuredOutput, Work[OutputParser]] = OrderedDict()

    def constraint(self, asked: StructuredOutput, without: Sequence[int] = ()) -> "GrammarConstraint":
        """A constraint that nothing has been asked yet; at once. without: ids that are never allowed."""
        return GrammarConstraint(self, asked, without, -(-self._grammars.vocab_size // 8))

    def compiled(self, asked: StructuredOutput) -> "Work[OutputParser]":
        """The structure's parser at the start of a text, or its coming. Whoever wants to use it makes a copy."""
        known = self._compiled.get(asked)
        if known is None or (known.done and known.future.exception() is not None):
            known = self._compiled[asked] = Work(self._compilers, partial(self._grammars.parser, asked))
        self._compiled.move_to_end(asked)
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return known


class GrammarConstraint:
    """A parser that follows one output. See `SlowConstraint`."""

    def __init__(
        self, manager: StructuredOutputManager, asked: StructuredOutput, without: Sequence[int], num_bytes: int
    ) -> None:
        self._manager, self._asked, self._without, self._num_bytes = manager, asked, without, num_bytes
        self._parser: OutputParser | None = None
        self._compiling: Work[OutputParser] | None = None
        self._masking: Work[Mask] | None = None
        self.forced: tuple[int, ...] = ()

    def ask(self, new_ids: Sequence[int]) -> "Future[Mask]":
        if self._compiling is None:
            answer: Future[Mask] = Future()
            self._compiling = self._manager.compiled(self._asked)
            self._compiling.future.add_done_callback(partial(self._begin, answer))
            return answer
        self._masking = Work(self._manager.maskers, partial(self._mask, tuple(new_ids)))
        return self._masking.future

    def walk(self, visit: Callable[[Branch], None]) -> "Future[None]":
        """On a copy of the parser, made at once: drafts never reach the one that follows the output."""
        assert self._parser is not None, "something was answered"
        branch = _GrammarBranch(self._parser.copy(), self._masked)
        return self._manager.maskers.submit(visit, branch)

    @property
    def overdue(self) -> str | None:
        limit_s = self._manager.timeout_s
        late = (self._compiling is not None and self._compiling.takes_s > _SLACK * limit_s) or (
            self._masking is not None and self._masking.takes_s > limit_s
        )
        if not late:
            return None
        return (
            f"structured_output: what may come next took more than {limit_s:g} s of a processor; a simpler structure"
            " takes less (--structured-output-timeout)"
        )

    def _begin(self, answer: "Future[Mask]", compiled: "Future[OutputParser]") -> None:
        """The parser has been compiled: answer what may come first."""
        self._masking = Work(self._manager.maskers, partial(self._first, compiled))
        self._masking.future.add_done_callback(partial(_hand_on, answer))

    def _first(self, compiled: "Future[OutputParser]") -> Mask:
        self._parser = compiled.result().copy()
        return self._mask(())

    def _mask(self, new_ids: tuple[int, ...]) -> Mask:
        assert self._parser is not None
        self._parser.follow(new_ids)
        mask, self.forced = self._parser.mask(), self._parser.forced()
        return self._masked(mask)

    def _masked(self, words: Mask) -> Mask:
        """The library's mask, which is padded to words, without what is never allowed."""
        if words is None:
            return None
        mask = bytearray(words[: self._num_bytes])
        for token in self._without:
            if token // 8 < len(mask):
                mask[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(mask)


class _GrammarBranch:
    """A copy of a parser that goes along a tree. See `Branch`; a parser that has met an error is of no more use."""

    def __init__(self, parser: OutputParser, masked: Callable[[Mask], Mask]) -> None:
        self._parser, self._masked = parser, masked

    def accept(self, token: int) -> Mask:
        self._parser.try_token(token)
        return self._masked(self._parser.mask())

    def rollback(self) -> bool:
        return self._parser.rollback()


class Work(Generic[Result]):
    """What a thread of a pool does, and for how long by the thread's own processor time: a busy machine is no fault of
    a structure's.
    """

    def __init__(self, pool: ThreadPoolExecutor, do: Callable[[], Result]) -> None:
        self._clock: Callable[[], float] | None = None
        self.future = pool.submit(self._timed, do)

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def takes_s(self) -> float:
        """Seconds of its thread since it began; 0 while it waits for a thread, and once it is done."""
        clock = self._clock
        return 0.0 if clock is None or self.done else clock()

    def _timed(self, do: Callable[[], Result]) -> Result:
        self._clock = _stopwatch()
        return do()


def _stopwatch() -> Callable[[], float]:
    """Seconds of processor time that this thread has spent since, told to any thread while this one lives.

    Where systems have no clock of another thread (macOS), seconds that have passed.
    """
    clock = time.monotonic
    if hasattr(time, "pthread_getcpuclockid"):
        clock = partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))
    began_s = clock()
    return lambda: clock() - began_s


def _hand_on(answer: "Future[Mask]", done: "Future[Mask]") -> None:
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)
