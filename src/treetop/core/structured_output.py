"""Structures as token constraints. The engine's thread neither compiles them nor computes what may come next.

ask () --> parser of the structure, compiled once for all its requests --> copy, mask --> answer
ask ids, for each token after it -------------------------------------------> mask --> answer
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from treetop.core.grammars import Grammars, next_mask
from treetop.types.constraint import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_COMPILED = 16
"""Structures whose parsers are kept for requests that come."""
_NUM_COMPILERS = 2
_MOST_MASKERS = 8
_SLACK = 2
"""A structure has been compiled within the limit before, to check it; here others may need the processor, too."""

Result = TypeVar("Result")


class StructuredOutputManager:
    """Makes the constraints of one engine, whose thread alone calls it.

    Its own threads work beside that one, for the library lets go of Python's lock. They end when nothing holds this
    object any more.
    """

    def __init__(self, grammars: Grammars, timeout_s: float) -> None:
        """timeout_s: that one token's mask may take. Structures have been checked: `core/structure_checker.py`."""
        self.timeout_s, self._grammars = timeout_s, grammars
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "treetop-grammar")
        self.maskers = ThreadPoolExecutor(min(_MOST_MASKERS, os.cpu_count() or 1), "treetop-mask")
        self._compiled: OrderedDict[StructuredOutput, Work[LLMatcher]] = OrderedDict()

    def constraint(self, asked: StructuredOutput, without: Sequence[int] = ()) -> "GrammarConstraint":
        """A constraint that nothing has been asked yet; at once. without: ids that are never allowed."""
        return GrammarConstraint(self, asked, without, -(-self._grammars.vocab_size // 8))

    def compiled(self, asked: StructuredOutput) -> "Work[LLMatcher]":
        """The structure's parser at the start of a text, or its coming. Whoever wants to use it makes a copy."""
        known = self._compiled.get(asked)
        if known is None or (known.done and known.future.exception() is not None):
            known = self._compiled[asked] = Work(self._compilers, partial(self._grammars.matcher, asked))
        self._compiled.move_to_end(asked)
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return known


class GrammarConstraint:
    """A parser that follows one output. See `SlowConstraint`."""

    def __init__(
        self, manager: StructuredOutputManager, asked: StructuredOutput, without: Sequence[int], num_bytes: int
    ) -> None:
        self._manager, self._asked, self._without, self._num_bytes = manager, asked, without, num_bytes
        self._matcher: LLMatcher | None = None
        self._compiling: Work[LLMatcher] | None = None
        self._masking: Work[bytes] | None = None

    def ask(self, new_ids: Sequence[int]) -> "Future[bytes]":
        if self._compiling is None:
            answer: Future[bytes] = Future()
            self._compiling = self._manager.compiled(self._asked)
            self._compiling.future.add_done_callback(partial(self._begin, answer))
            return answer
        self._masking = Work(self._manager.maskers, partial(self._mask, tuple(new_ids)))
        return self._masking.future

    @property
    def overdue(self) -> str | None:
        limit_s = self._manager.timeout_s
        late = (self._compiling is not None and self._compiling.takes_s > _SLACK * limit_s) or (
            self._masking is not None and self._masking.takes_s > limit_s
        )
        if not late:
            return None
        return (
            f"structured_output: what may come next was not known in {limit_s:g} s; a simpler structure takes less"
            " (--structured-output-timeout)"
        )

    def _begin(self, answer: "Future[bytes]", compiled: "Future[LLMatcher]") -> None:
        """The parser has been compiled: answer what may come first."""
        self._masking = Work(self._manager.maskers, partial(self._first, compiled))
        self._masking.future.add_done_callback(partial(_hand_on, answer))

    def _first(self, compiled: "Future[LLMatcher]") -> bytes:
        self._matcher = compiled.result().deep_copy()
        return self._mask(())

    def _mask(self, new_ids: tuple[int, ...]) -> bytes:
        assert self._matcher is not None
        mask = bytearray(next_mask(self._matcher, new_ids)[: self._num_bytes])  # it is padded to words
        for token in self._without:
            mask[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(mask)


class Work(Generic[Result]):
    """What a thread of a pool does, and for how long."""

    def __init__(self, pool: ThreadPoolExecutor, do: Callable[[], Result]) -> None:
        self._began_s: float | None = None
        self.future = pool.submit(self._timed, do)

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def takes_s(self) -> float:
        """Seconds since it began; 0 while it waits for a thread, and once it is done."""
        return 0.0 if self._began_s is None or self.done else time.monotonic() - self._began_s

    def _timed(self, do: Callable[[], Result]) -> Result:
        self._began_s = time.monotonic()
        return do()


def _hand_on(answer: "Future[bytes]", done: "Future[bytes]") -> None:
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)
