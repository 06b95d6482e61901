"""What a parser finds in an output's text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins.

    index: of the output's calls, from 0 on.
    is_custom: of a tool that is given a text and no object, see `parsers/custom.py`.
    """

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, a JSON object in text. Joined they are JSON, what the model wrote if that was; a
    beginning of it where the output was cut off. is_custom: they are a text.
    """

    index: int
    text: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallEnd:
    """No more arguments of this call come. A call that was cut off may have none."""

    index: int


Event = Content | ReasoningDelta | CallStart | Arguments | CallEnd


class Parser(Protocol):
    """Of one output. Joined events of a kind are the same however the text is cut into pieces."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self, stopped: bool = True) -> list[Event]:
        """What waited for more text, which does not come.

        stopped: the output ended by itself. Then a call that is open is closed; one that was cut off has no `CallEnd`.
        """
        ...
