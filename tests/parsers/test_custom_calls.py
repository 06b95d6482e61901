"""Calls of custom tools: the text that they give, however the output is cut into pieces, or cut off."""

import json
import random

import pytest

from treetop.parsers.arguments import Tools
from treetop.parsers.custom import CustomCalls, arguments_of, custom_call, input_of
from treetop.parsers.events import Arguments, CallEnd, CallStart
from treetop.parsers.registry import output_format
from treetop.parsers.text_parser import TextParser

TEXTS = ["", "x", '*** Begin Patch\n+a = "\\u00e9"\n', "\\", "🦊\t{}", 'ends in a quote"']


def said(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(parser, text: str, rng, stopped: bool = True) -> list:
    """Events, joined by kind, of a text in pieces."""
    events, at = [], 0
    while at < len(text):
        size = rng.randint(1, 7)
        events += parser.push(text[at : at + size])
        at += size
    return [*events, *parser.finish(stopped)]


@pytest.mark.parametrize("seed", range(20))
def test_a_call_between_others_gives_its_text_at_its_end(seed):
    rng = random.Random(seed)
    given = rng.choice(TEXTS)
    text = said("f", {"a": 1}) + said("patch", {"input": given}) + said("f", {"a": 2})
    parser = output_format("", "hermes", "none").parser("", Tools({"f": {}, "patch": {}}))
    events = read(CustomCalls(parser, {"patch"}), text, rng)
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [(start.name, start.is_custom) for start in starts] == [("f", False), ("patch", True), ("f", False)]
    pieces = [event for event in events if isinstance(event, Arguments) and event.index == 1]
    assert [piece.text for piece in pieces] == [given] * bool(given)
    assert all(piece.is_custom for piece in pieces)
    others = ["".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in (0, 2)]
    assert [json.loads(each) for each in others] == [{"a": 1}, {"a": 2}]
    assert [event.index for event in events if isinstance(event, CallEnd)] == [0, 1, 2]


@pytest.mark.parametrize("given", TEXTS)
def test_arguments_that_are_cut_off_give_the_beginning_of_the_text(given):
    whole = json.dumps({"input": given})
    assert input_of(whole) == input_of(arguments_of(given)) == given
    for end in range(len('{"input": "'), len(whole)):
        assert given.startswith(input_of(whole[:end]))
    assert [input_of(each) for each in ("", "[1]", '{"other": "x"}', "{")] == ["", "[1]", '{"other": "x"}', "{"]


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("given", TEXTS)
def test_an_output_that_a_grammar_holds_is_the_text_of_one_call(given, stopped):
    """Cut off, it has no end."""
    events = read(CustomCalls(TextParser(custom_call("patch")), {"patch"}), given, random.Random(1), stopped)
    assert [type(event) for event in events if not isinstance(event, Arguments)] == [CallStart, CallEnd][: 1 + stopped]
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == given
