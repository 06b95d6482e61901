"""Calls of custom tools: the text that they give, however the output is cut into pieces, or cut off."""

import json
import random
import re
from collections import Counter
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from treetop.api.requests.tools import Calls, CustomTool, Function, Tool
from treetop.checkpoints.folder import resolve_folder
from treetop.parsers.arguments import Tools
from treetop.parsers.custom import CustomCalls, arguments_of, custom_call, input_of
from treetop.parsers.events import Arguments, CallEnd, CallStart
from treetop.parsers.forced import listed_or_raw
from treetop.parsers.registry import output_format
from treetop.parsers.text_parser import TextParser
from treetop.types.constraint import StructuredOutput

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


# ------------------------------------------------------------------- grammars where a call is forced, of any tool

REGEXES = ["[a-z]{1,3}", 'say "[^"]{0,4}"\\n', "(ab|é\\\\){1,2}", "[0-9]{2}(\\.[0-9])?"]
LARKS = [
    'start: "(" start ")" | /[ab]{1,2}/',
    'start: line{1,2}\nline: "+" /[a-z]{0,3}/ "\\n"',
    'start: "x" "}" /[01]{2}/',
]
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((resolve_folder("builtin:nestling") / "tokenizer.json").read_text())


def matcher_of(asked: StructuredOutput) -> LLMatcher:
    schema = {"json_schema": json.loads(asked.spec)} if asked.kind == "json_schema" else {"lark_grammar": asked.spec}
    made = LLMatcher(tokenizer(), json.dumps({"grammars": [schema]}), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def walked(matcher: LLMatcher, rng: random.Random) -> str | None:
    """A text that the structure allows, token by token at random; None if it comes to no end."""
    ids, end = [], tokenizer().eos_token
    for _ in range(200):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        fitting = [token for token in range(mask.bit_length()) if mask >> token & 1]
        token = end if end in fitting and rng.random() < 0.5 else rng.choice(fitting)
        if token == end:
            return tokenizer().decode_str(ids)
        ids.append(token)
        assert matcher.consume_tokens([token])
        if matcher.is_stopped():
            return tokenizer().decode_str(ids)
    return None


def tools_of(rng: random.Random) -> tuple[list[Tool | CustomTool], dict[str, tuple[str, str]]]:
    """Tools, in any order, and the grammars of some."""
    grammars = {f"r{i}": ("regex", rng.choice(REGEXES)) for i in range(rng.randint(0, 2))}
    grammars |= {f"l{i}": ("lark", rng.choice(LARKS)) for i in range(rng.randint(not grammars, 2))}
    tools: list[Tool | CustomTool] = [
        CustomTool.model_validate(
            {
                "type": "custom",
                "custom": {
                    "name": name,
                    "format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": said}},
                },
            }
        )
        for name, (syntax, said) in grammars.items()
    ]
    if rng.random() < 0.6:
        tools.append(Tool(type="function", function=Function(name="f", parameters=PARAMETERS)))
    rng.shuffle(tools)
    return tools, grammars


def fits(grammar: tuple[str, str], text: str) -> bool:
    if grammar[0] == "regex":
        return re.fullmatch(grammar[1], text) is not None
    alone = matcher_of(StructuredOutput("grammar", grammar[1]))
    ids = tokenizer().tokenize_str(text)
    return alone.consume_tokens(ids) and alone.is_accepting()


@pytest.mark.parametrize("parallel", [True, False])
def test_what_must_be_a_call_has_the_grammar_of_its_tool(parallel):
    """Texts that the structure allows at random, read in random pieces, against each grammar by itself."""
    seen = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        tools, grammars = tools_of(rng)
        calls = Calls(tools, "required", parallel)
        assert calls.structure is not None
        assert calls.reader is not None
        text = walked(matcher_of(calls.structure), rng)
        if text is None:
            continue
        events = read(CustomCalls(TextParser(calls.reader, calls.most), calls.custom), text, rng)
        starts = [event for event in events if isinstance(event, CallStart)]
        assert len(starts) == sum(isinstance(event, CallEnd) for event in events) >= 1
        assert parallel or len(starts) == 1
        for start in starts:
            given = "".join(e.text for e in events if isinstance(e, Arguments) and e.index == start.index)
            seen[start.name[0]] += 1
            if start.name == "f":
                assert [*json.loads(given)] == ["on"]
            else:
                assert fits(grammars[start.name], given), (grammars[start.name], given)
    assert min(seen[kind] for kind in "frl") >= 3, seen


def test_no_call_comes_that_its_grammar_does_not_have():
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARKS[0]}}
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
    tools = [
        CustomTool.model_validate({"type": "custom", "custom": {"name": name, "format": form}})
        for name, form in (("l", lark), ("r", regex))
    ]
    structure = Calls(tools, "required", True).structure
    assert structure is not None
    for text, is_one in (
        ("l\n((ab))", True),
        ("l\n((ab)", False),
        ("r\na", False),
        (listed_of("r", "a"), True),
        (listed_of("r", "ab"), False),
        (listed_of("l", "a"), False),
    ):
        matcher, ids = matcher_of(structure), tokenizer().tokenize_str(text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_one, text


def listed_of(name: str, text: str) -> str:
    return json.dumps([{"name": name, "parameters": {"input": text}}])


@pytest.mark.parametrize("text", ["", "pat", "other\nx", "patch\nab"])
def test_a_raw_call_that_is_cut_off_is_none_before_its_line_ends(text):
    events = read(TextParser(listed_or_raw({"patch"})), text, random.Random(1), stopped=False)
    assert [type(event) for event in events[:1]] == ([CallStart] if text.startswith("patch\n") else [])
    assert not any(isinstance(event, CallEnd) for event in events)
