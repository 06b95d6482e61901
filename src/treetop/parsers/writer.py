"""Collects what a format's reader finds, as events."""

import secrets
from collections.abc import Callable

from treetop.parsers.events import Arguments, CallEnd, CallStart, Content, Event, ReasoningDelta

_SPACES = " \t\r\n"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Writer:
    """The events of one output.

    White space before a tool call belongs to the format, not to the content; so does that around reasoning. It waits
    until it is known what follows.
    """

    def __init__(self, most_calls: int | None = None, new_id: Callable[[], str] = new_call_id) -> None:
        """most_calls: calls beyond these are left out. new_id: makes the ids of calls that bring none."""
        self._most_calls, self._new_id = most_calls, new_id
        self._events: list[Event] = []
        self._joining: tuple[type[Content | ReasoningDelta | Arguments], list[str]] | None = None
        self._content_spaces, self._reasoning_spaces = list[str](), list[str]()
        self._has_reasoning = self._has_arguments = False
        self.num_calls = 0

    def content(self, text: str) -> None:
        body = text.rstrip(_SPACES)
        if body:
            self._join(Content, *self._content_spaces, body)
            self._content_spaces.clear()
        if len(body) < len(text):
            self._content_spaces.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        if not self._has_reasoning:
            text = text.lstrip(_SPACES)
        body = text.rstrip(_SPACES)
        if body:
            self._has_reasoning = True
            self._join(ReasoningDelta, *self._reasoning_spaces, body)
            self._reasoning_spaces.clear()
        if len(body) < len(text):
            self._reasoning_spaces.append(text[len(body) :])

    def start(self, name: str, call_id: str | None = None) -> None:
        self._content_spaces.clear()
        self._cut()  # arguments of a call that was not ended
        self._has_arguments = False
        self.num_calls += 1
        if self._is_wanted:
            self._events.append(CallStart(self.num_calls - 1, call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            if self._is_wanted:
                self._join(Arguments, text)

    def end(self) -> None:
        """The arguments of the call that was started last are complete; an empty object, if there were none."""
        if not self._has_arguments:
            self.arguments("{}")
        if self._is_wanted:
            self._cut()
            self._events.append(CallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """No more comes."""
        if not self.num_calls:
            self._join(Content, *self._content_spaces)
        self._content_spaces.clear()

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._cut()
        events, self._events = self._events, []
        return events

    @property
    def _is_wanted(self) -> bool:
        return self._most_calls is None or self.num_calls <= self._most_calls

    def _join(self, kind: type[Content | ReasoningDelta | Arguments], *texts: str) -> None:
        if self._joining is None or self._joining[0] is not kind:
            self._cut()
            self._joining = kind, []
        self._joining[1].extend(texts)

    def _cut(self) -> None:
        """What has been joined is an event."""
        if self._joining is None:
            return
        kind, pieces = self._joining
        self._joining, text = None, "".join(pieces)
        if text and kind is Arguments:
            self._events.append(Arguments(self.num_calls - 1, text))
        elif text:
            self._events.append(Content(text) if kind is Content else ReasoningDelta(text))
