"""Reasoning between two tags, before everything else: `<think>` and `</think>` of most families."""

from dataclasses import dataclass

from treetop.parsers.source import END, Markers, Steps, TextBuffer
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer


@dataclass(frozen=True, slots=True)
class Thinking:
    """opens, closes: the tags.
    inside: an output begins inside them unless the prompt ends with `closes`; else only if it ends with `opens`.
    also_closes: what ends reasoning that was never closed, and is read as what follows it. A `closes` behind that is
        left out.
    awaits: an output that begins without `opens` may be reasoning, too: it is held back until `closes`, a call or its
        end comes, unless the prompt says that there is no reasoning.
    title: what stands behind `opens` and is no reasoning.
    answer: tags that may stand around what follows.
    """

    opens: str = "<think>"
    closes: str = "</think>"
    inside: bool = False
    also_closes: tuple[str, ...] = ()
    awaits: bool = False
    title: str = ""
    answer: tuple[str, str] | None = None

    def begins_inside(self, tail: str) -> bool:
        """Whether the output of a prompt with this end begins with reasoning."""
        return tail.rstrip().endswith(self.opens + self.title) or (self.inside and not self.has_closed(tail))

    def has_closed(self, tail: str) -> bool:
        """Whether a prompt with this end says that there is no reasoning."""
        return tail.rstrip().endswith(self.closes)


def thinking(tags: Thinking, tail: str, then: Reader) -> Reader:
    """Reasoning, if an output begins with it, and what comes behind it. tail: the end of the prompt's text."""
    inside, ends = tags.begins_inside(tail), Markers(tags.closes, *tags.also_closes)
    waits = tags.awaits and not tags.has_closed(tail)

    def read(source: TextBuffer, out: Writer) -> Steps[None]:
        space = yield from source.space()
        ended_by: str | None = ""
        opened = yield from source.word(tags.opens)
        if opened or inside:
            yield from source.word(tags.title if opened else "")
            ended_by = yield from source.until(ends, out.reasoning)
            source.back(ended_by if ended_by in tags.also_closes else "")
        elif waits:
            ended_by = yield from _late(source, out, ends, tags, space)
        else:
            out.content(space)
        if ended_by == tags.closes:
            yield from source.space()
        if ended_by in tags.also_closes:
            yield from _without(source, out, then, Markers(tags.closes))
        elif tags.answer is not None and (yield from source.word(tags.answer[0])):
            yield from source.space()
            yield from _without(source, out, then, Markers("\n" + tags.answer[1], tags.answer[1]))
        else:
            yield from then(source, out)

    return read


def _late(source: TextBuffer, out: Writer, ends: Markers, tags: Thinking, space: str) -> Steps[str]:
    """Read what is reasoning if `closes` comes, and else comes again. Returns `closes`, or ""."""
    pieces = [space]
    found = yield from source.until(ends, pieces.append)
    if found == tags.closes:
        out.reasoning("".join(pieces))
        return found
    source.again("".join(pieces) + (found or ""))
    return ""


def _without(source: TextBuffer, out: Writer, then: Reader, marks: Markers) -> Steps[None]:
    """What comes, but for the first of the marks."""
    inner = TextBuffer()
    steps = then(inner, out)

    def take(text: str) -> None:
        inner.feed(text)
        next(steps)

    if (yield from source.until(marks, take)):
        yield from source.space()
        yield from source.until(END, take)
    inner.end(source.stopped)
    for _ in steps:
        raise AssertionError("a reader waits behind the end of the text")


def plain(source: TextBuffer, out: Writer) -> Steps[None]:
    """All is content."""
    yield from source.until(END, out.content)
