"""What follows one output, token by token: a grammar's parser, a limit of its reasoning, or both."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetop.structured.reasoning import ReasoningLimit
from treetop.structured.refusals import refused

if TYPE_CHECKING:
    from llguidance import LLMatcher


class OutputParser:
    """At a place of an output, the start at first."""

    def __init__(self, matcher: "LLMatcher | None", limit: ReasoningLimit | None) -> None:
        """matcher: None where any text will do."""
        self._matcher, self._limit = matcher, limit
        self._thoughts = [] if limit is None else [limit.start]

    def copy(self) -> "OutputParser":
        """One at the same place, which is as far as it can be rolled back."""
        copied = OutputParser(None if self._matcher is None else self._matcher.deep_copy(), self._limit)
        copied._thoughts = self._thoughts[-1:]
        return copied

    def follow(self, new_ids: Sequence[int]) -> None:
        """The output has grown for good. Raises InputError where the library gives up."""
        if self._limit is not None:
            for token in new_ids:
                self._thoughts = [self._limit.after(self._thoughts[-1], token)]
        self._consume(new_ids)

    def try_token(self, token: int) -> None:
        """The output may grow by this; `rollback` takes it back. Raises as `follow`."""
        if self._limit is not None:
            self._thoughts.append(self._limit.after(self._thoughts[-1], token))
        self._consume((token,))

    def rollback(self) -> bool:
        """Take back the last token that was tried. False if the library cannot."""
        if self._limit is not None:
            self._thoughts.pop()
        return self._matcher is None or self._matcher.rollback(1)

    def mask(self) -> bytes | None:
        """Which tokens may follow: bit t % 8 of byte t // 8 for token t, perhaps padded; None for all.

        Raises InputError where the library gives up.
        """
        matcher, forced, others = self._matcher, None, None
        if self._limit is not None:
            forced, others = self._limit.forced(self._thoughts[-1]), self._limit.others(self._thoughts[-1])
        mask = None
        if matcher is not None:
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                raise refused(matcher.get_error())
        if forced is None:
            return mask if others is None else _both(mask, others)
        if mask is not None and not mask[forced // 8] >> forced % 8 & 1:
            raise refused("reasoning may not end here, and its budget is spent")
        return (1 << forced).to_bytes(forced // 8 + 1 if mask is None else len(mask), "little")

    def forced(self) -> tuple[int, ...]:
        """Tokens that must follow, as far as that is known."""
        token = None if self._limit is None else self._limit.forced(self._thoughts[-1])
        if token is not None:
            return (token,)
        return () if self._matcher is None else tuple(self._matcher.compute_ff_tokens())

    def _consume(self, new_ids: Sequence[int]) -> None:
        matcher = self._matcher
        if matcher is not None and new_ids and not matcher.consume_tokens(list(new_ids)):
            raise refused(matcher.get_error())


def _both(mask: bytes | None, others: bytes) -> bytes:
    """What two masks allow."""
    if mask is None:
        return others
    both = int.from_bytes(mask, "little") & int.from_bytes(others, "little")
    if not both:
        raise refused("reasoning may begin again and nothing else, and its budget is spent")
    return both.to_bytes(len(mask), "little")
