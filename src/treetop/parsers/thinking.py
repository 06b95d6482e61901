"""Reasoning between two tags, before everything else: `<think>` and `</think>` of most families."""

from dataclasses import dataclass

from treetop.parsers.source import END, Markers, Source, Steps
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer


@dataclass(frozen=True, slots=True)
class Thinking:
    """opens, closes: the tags.
    inside: an output begins inside them unless the prompt ends with `closes`; else only if it ends with `opens`.
    also_closes: what ends reasoning that was never closed, and is read as what follows it.
    """

    opens: str = "<think>"
    closes: str = "</think>"
    inside: bool = False
    also_closes: tuple[str, ...] = ()

    def begins_inside(self, tail: str) -> bool:
        """Whether the output of a prompt with this end begins with reasoning."""
        return tail.rstrip().endswith(self.opens) or (self.inside and not self.has_closed(tail))

    def has_closed(self, tail: str) -> bool:
        """Whether a prompt with this end says that there is no reasoning."""
        return tail.rstrip().endswith(self.closes)


def thinking(tags: Thinking, tail: str, then: Reader) -> Reader:
    """Reasoning, if an output begins with it, and what comes behind it. tail: the end of the prompt's text."""
    inside, ends = tags.begins_inside(tail), Markers(tags.closes, *tags.also_closes)

    def read(source: Source, out: Writer) -> Steps[None]:
        space = yield from source.space()
        if (yield from source.word(tags.opens)) or inside:
            ended_by = yield from source.until(ends, out.reasoning)
            if ended_by == tags.closes:
                yield from source.space()
            else:
                source.back(ended_by or "")
        else:
            out.content(space)
        yield from then(source, out)

    return read


def plain(source: Source, out: Writer) -> Steps[None]:
    """All is content."""
    yield from source.until(END, out.content)
