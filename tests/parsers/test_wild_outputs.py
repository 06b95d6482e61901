"""Outputs in the wild are recovered, and what is handed on as arguments is JSON, wherever an output ends."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest

from support.tool_streams import STREAMS, TOOLS, Heard, coder, heard, hermes
from support.wild_streams import WILD
from treetop.api.turn import Turn
from treetop.parsers.arguments import Tools, as_json
from treetop.parsers.events import CallEnd
from treetop.parsers.json_text import mended
from treetop.parsers.registry import TOOL_NAMES, output_format

NAMED = pytest.mark.parametrize("name", WILD)


@NAMED
def test_an_output_in_the_wild_is_what_it_means(name):
    """And however it is cut."""
    stream = WILD[name]
    text, found = stream.text, heard(stream.parser(), [stream.text])
    assert (found.content, found.reasoning) == (stream.content, stream.reasoning)
    said = [(name, json.loads(arguments)) for name, arguments in found.calls]
    assert said[: len(stream.calls)] == [*stream.calls] or name.startswith("hermes: brackets")
    assert len(said) == len(stream.calls) == found.num_ended
    assert heard(stream.parser(), [*text]).same() == found.same()
    for at in range(len(text) + 1):
        assert heard(stream.parser(), [text[:at], text[at:]]).same() == found.same(), at


@NAMED
def test_wherever_it_stops_arguments_are_json(name):
    """At a stop every call has an end; where it is cut off arguments are a beginning of those."""
    stream = WILD[name]
    for end in range(len(stream.text)):
        stopped = heard(stream.parser(), [stream.text[:end]])
        cut = heard(stream.parser(), [*stream.text[:end]], stopped=False)
        assert stopped.num_ended == len(stopped.calls)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in stopped.calls), end
        assert len(cut.calls) <= len(stopped.calls)
        for (tool, begun), (same, arguments) in zip(cut.calls, stopped.calls, strict=False):
            assert tool == same
            assert arguments.startswith(begun)


def test_a_call_that_is_cut_off_stays_open():
    """`length` is no stop: nothing is made up, and there is no end."""
    for text in (
        '<tool_call>{"name": "search", "arguments": {"query": "x',
        '<tool_call>{"name": "search", "arguments": {',
    ):
        found = heard(output_format("", "hermes", "none").parser("", TOOLS), [text], stopped=False)
        assert found.num_ended == 0
        assert [each for _, each in found.calls] == [text.partition('"arguments": ')[2]]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_model_writes_arguments_are_json(seed):
    """Pieces of all formats in random order: at a stop, each call that was begun has JSON and an end."""
    rng = random.Random(seed)
    parts = [text for stream in (*STREAMS.values(), *WILD.values()) for text in _parts(stream.text, rng)]
    for name in TOOL_NAMES:
        for _ in range(4):
            text = "".join(rng.choices(parts, k=10))
            found = heard(output_format("", name, "qwen3").parser("<|start|>assistant", TOOLS), [text])
            assert found.num_ended == len(found.calls), (name, text)
            for _, arguments in found.calls:
                json.loads(arguments)


def _parts(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text)), 3))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(
    "text", ["{}", ' {"a" : [1 , -2.5e3,\n"x\\u00e9\\n"] , "b":{"c":null,"d":true}}', '["\\ud800", "\\/"]', '"x"', "3"]
)
def test_json_goes_through_as_it_is(text):
    assert mended(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("{'a': 'it\\'s'}", {"a": "it's"}),
        ('{"a": "x\ty", "b": [1,, 2,]}', {"a": "x\ty", "b": [1, 2]}),
        ('{"a" 1 "b": }', {"a": 1, "b": None}),
        ('{"a", "b": [{"c": 1]}', {"a": None, "b": [{"c": 1}]}),
        ("{a: New York, b: True, 3: Infinity}", {"a": "New York", "b": True, "3": "Infinity"}),
        ('{"a": "\\x41 \\u12 \\', {"a": "\\x41 \\u12 "}),
        ("[[[{", [[[{}]]]),
        ("{[1]: 2}", {"": [1], "2": None}),
    ],
)
def test_what_is_no_json_is_put_right(text, means):
    assert json.loads(mended(text)) == means


@pytest.mark.parametrize(
    ("text", "admits", "said"),
    [
        ("['a', \"it's\", None, (1, 2)]", {"array"}, '["a", "it\'s", null, [1, 2]]'),
        ("{'a': [1, True]}", {"object", "null"}, '{"a": [1, true]}'),
        ("{'a': true,}", {"object"}, '{"a": true}'),
        ("['a']", {"string"}, "\"['a']\""),
        ("['a']", {"array", "string"}, "\"['a']\""),
        ("['a']", set(), "\"['a']\""),
        ("__import__('os')", {"array"}, json.dumps("__import__('os')")),
    ],
)
def test_lists_and_objects_of_python_are_read_where_one_is_meant(text, admits, said):
    assert as_json(text, frozenset(admits)) == said


NUM_TOOLS, NUM_STEPS = 46, 12


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_46_tools_and_12_growing_steps_leave_no_call_in_the_text(name):
    """Each step calls more tools than the one before, and comes in pieces of one token or several, as rounds accept
    them: the calls are the same, and no mark of one is in the content of an output that stops (spark-playbooks-89,
    vllm-46249).
    """
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}
    tools = Tools({f"tool_{i}": schema for i in range(NUM_TOOLS)})
    write = coder if name == "qwen3_coder" else lambda tool, **said: hermes(tool, {**said, "lines": [1]})
    rng = random.Random(46)
    for step in range(1, NUM_STEPS + 1):
        called = [f"tool_{i % NUM_TOOLS}" for i in range(step * 5)]
        blocks = [write(tool, path=f"a/<b>/{tool}.py", lines="[1]") for tool in called]
        if name == "qwen3_coder":  # as smaller ones write them, and with a tag missing
            blocks[0] = blocks[0].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
            blocks[-1] = blocks[-1].replace("</function>\n", "")
        text = f"Step {step}.\n" + "\n".join(blocks)
        plain = _read(name, tools, [text[at : at + 3] for at in range(0, len(text), 3)])
        assert plain.content == f"Step {step}."
        assert "<function=" not in plain.content
        assert [tool for tool, _ in plain.calls] == called
        for tool, said in plain.calls:
            assert json.loads(said) == {"path": f"a/<b>/{tool}.py", "lines": [1]}
        for _ in range(4):
            cuts = [*itertools.accumulate(3 * rng.randint(1, 7) for _ in range(len(text) // 3))]
            pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts]) if start < len(text)]
            assert _read(name, tools, pieces).same() == plain.same()


def _read(name: str, tools: Tools, pieces: list[str]) -> Heard:
    return heard(output_format("", name, "none").parser("", tools), pieces)


def test_named_qwen3_waits_for_the_tag_and_a_template_does_not():
    """An output without tags comes at its end where the operator says that the model reasons, and else as it comes."""
    named = output_format("", "none", "qwen3").parser("<|im_start|>assistant\n")
    assert named.push("It is 3.") == []
    assert [each.text for each in named.finish()] == ["It is 3."]
    told = output_format("{{ content.split('</think>') }}").parser("<|im_start|>assistant\n")
    assert [each.text for each in told.push("It is 3.")] == ["It is 3."]
    closed = output_format("", "none", "qwen3").parser("<think>\n\n</think>\n\n")
    assert [each.text for each in closed.push("It is 3.")] == ["It is 3."]


def test_an_output_is_closed_at_a_stop_alone():
    """What the server says of an output's end reaches its parser."""
    for reason, ended in (("stop", True), ("length", False)):
        parser = output_format("", "hermes", "none").parser("", TOOLS)
        turn = Turn([], None, [parser])
        text = '<tool_call>{"name": "search", "arguments": {"query": "x'
        delta = SimpleNamespace(index=0, text=text, output=SimpleNamespace(finish_reason=reason))
        assert any(isinstance(each, CallEnd) for each in turn.read(delta)) == ended
