"""An output as blocks in the order of their coming: reasoning, text, calls. What Responses and Messages share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treetop.parsers.events import Arguments, CallEnd, CallStart, Content, Event, ReasoningDelta

BlockKind = Literal["reasoning", "text", "call"]
Step = Literal["opens", "grows", "closes"]


@dataclass(slots=True)
class Block:
    """Text of one kind.

    index: among the output's blocks.
    id, name: of a call, whose text is its arguments. is_custom: of a custom tool, whose text is what it is given.
    """

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    is_custom: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Blocks:
    """The blocks of one output. The last may be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def is_reasoning(self) -> bool:
        return self._open is not None and self._open.kind == "reasoning"

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def take(self, events: Sequence[Event]) -> Iterator[tuple[Step, Block, str]]:
        """What these do to which block, and by which text it grows."""
        for event in events:
            if isinstance(event, CallStart):
                yield from self._begin(Block("call", len(self.all), event.id, event.name, event.is_custom))
            elif isinstance(event, CallEnd):
                yield from self.close()
            else:
                kind = _kind(event)
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(Block(kind, len(self.all)))
                assert self._open is not None
                self._open.pieces.append(event.text)
                yield "grows", self._open, event.text

    def close(self) -> Iterator[tuple[Step, Block, str]]:
        """The open block gets no more; nothing, if none is open."""
        if self._open is not None:
            block, self._open = self._open, None
            yield "closes", block, ""

    def _begin(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        yield from self.close()
        self.all.append(block)
        self._open = block
        yield "opens", block, ""


def _kind(event: Content | ReasoningDelta | Arguments) -> BlockKind:
    return "text" if isinstance(event, Content) else "reasoning" if isinstance(event, ReasoningDelta) else "call"
