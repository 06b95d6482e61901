"""Parsers of outputs: whatever a format's stream holds is found, and no cut of it changes anything."""

import ast
import itertools
import json
import random
import time

import pytest

from support.examples import EVERYTHING
from support.tool_streams import STREAMS, TOOLS, Stream, heard
from treetop.parsers.arguments import Tools, as_json, json_of_python
from treetop.parsers.events import CallEnd, CallStart
from treetop.parsers.forced import listed_calls, named_call
from treetop.parsers.registry import REASONING_NAMES, TOOL_NAMES, output_format
from treetop.parsers.text_parser import TextParser

NAMED = pytest.mark.parametrize("name", STREAMS)


@NAMED
def test_a_stream_is_what_it_holds(name):
    stream = STREAMS[name]
    found = heard(stream.parser(), [stream.text])
    assert found.content == stream.content
    assert found.reasoning == stream.reasoning
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [*stream.calls]
    assert found.num_ended == len(stream.calls)
    assert len({*found.ids}) == len(found.calls)
    assert not stream.ids or tuple(found.ids) == stream.ids


@NAMED
def test_no_cut_of_a_stream_changes_what_it_holds(name):
    """Every single cut, single characters, and random pieces (vllm-41967, -42781, -43221, -55082)."""
    stream = STREAMS[name]
    text, whole = stream.text, heard(stream.parser(), [stream.text]).same()
    assert heard(stream.parser(), [*text]).same() == whole
    for at in range(0, len(text) + 1, 1 if EVERYTHING else 2):
        assert heard(stream.parser(), [text[:at], text[at:]]).same() == whole, at
    rng = random.Random(len(text))
    for _ in range(80):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 40)))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        assert heard(stream.parser(), pieces).same() == whole


@pytest.mark.slow
@NAMED
def test_no_pair_of_cuts_of_a_stream_changes_what_it_holds(name):
    stream = STREAMS[name]
    text, whole = stream.text, heard(stream.parser(), [stream.text]).same()
    for first, second in itertools.combinations(range(1, len(text)), 2):
        assert heard(stream.parser(), [text[:first], text[first:second], text[second:]]).same() == whole


@NAMED
def test_a_stream_that_is_cut_off_gives_a_beginning_of_what_it_holds(name):
    """At every place: arguments are beginnings, no call is there that the whole has not."""
    stream = STREAMS[name]
    whole = heard(stream.parser(), [stream.text])
    for end in range(len(stream.text)):
        part = heard(stream.parser(), [stream.text[:end]], stopped=False)
        assert len(part.calls) <= len(whole.calls), end
        for (called, said), (whole_called, whole_said) in zip(part.calls, whole.calls, strict=False):
            assert called == whole_called
            assert whole_said.startswith(said[:-20]), end  # half a mark at the end of the text is text


@NAMED
def test_where_a_stream_stops_what_is_open_is_closed(name):
    """Wherever the model says no more, each call has an end and arguments that are an object of JSON."""
    stream = STREAMS[name]
    for end in range(0, len(stream.text), 1 if EVERYTHING else 3):
        part = heard(stream.parser(), [stream.text[:end]])
        assert part.num_ended == len(part.calls), end
        assert all(isinstance(json.loads(said), dict) for _, said in part.calls), end
        assert heard(stream.parser(), [*stream.text[:end]]).same() == part.same()


@NAMED
def test_what_comes_is_not_held_back(name):
    """Read by character, the end gives a few characters and at most one call's end."""
    parser = STREAMS[name].parser()
    for each in STREAMS[name].text:
        parser.push(each)
    late = [each for each in parser.finish() if not isinstance(each, CallEnd)]
    assert sum(len(each.text) for each in late if not isinstance(each, CallStart)) < 10 or "llama" in name
    assert not any(isinstance(each, CallStart) for each in late)


def test_long_string_arguments_stream_in_every_format_that_has_them():
    """A quarter of the text may come at most in one event."""
    long = "word " * 400
    for name, text in {
        "hermes": f'<tool_call>{{"name": "search", "arguments": {{"query": "{long}"}}}}</tool_call>',
        "qwen3_coder": f"<tool_call><function=search><parameter=query>\n{long}\n</parameter></function></tool_call>",
        "glm45": f"<tool_call>search<arg_key>query</arg_key><arg_value>{long}</arg_value></tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="search"><parameter name="query">{long}</parameter></invoke>',
        "openai": f'<|channel|>commentary to=functions.search<|message|>{{"query": "{long}"}}',
        "mistral": f'[TOOL_CALLS]search[ARGS]{{"query": "{long}"}}',
    }.items():
        stream = Stream(name, text, tail="<|start|>assistant")
        pieces = [text[start : start + 50] for start in range(0, len(text), 50)]
        parser = stream.parser()
        longest = max((len(each.text) for p in pieces for each in parser.push(p) if hasattr(each, "text")), default=0)
        assert 0 < longest < len(long) / 4, name


HOSTILE = {
    "brackets": '<tool_call>{"name": "a", "arguments": ' + "[" * 12_000,
    "half tags": "<tool_cal" * 6_000,
    "less than": "<" * 50_000,
    "spaces": " " * 50_000,
    "spaces in a call": "<tool_call>" + "\n" * 50_000,
    "escapes": '<tool_call>{"name": "a", "arguments": {"x": "' + "\\\\\\n" * 12_000,
    "opened again": "<tool_call>" * 5_000,
    "thoughts": "<think>" + "</thin" * 8_000,
    "parameters": "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 1_500,
    "keys": "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 1_200,
    "a long name": "<tool_call>{" + '"a": 1, ' * 4_000 + '"name": "' + "x" * 20_000,
    "headers": "<|channel|>" * 5_000,
    "lists": "[TOOL_CALLS][" + ", " * 12_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_takes_linear_time(kind):
    """In pieces of a few characters, for every format: a 1 MB output takes seconds in all, at most."""
    text = HOSTILE[kind]
    for name in TOOL_NAMES:
        parser = output_format("", name, "qwen3").parser("<|start|>assistant", TOOLS)
        began = time.process_time()
        for start in range(0, len(text), 7):
            parser.push(text[start : start + 7])
        parser.finish()
        took = time.process_time() - began
        assert took < 0.5 + len(text) * 2e-5, (name, took)


@pytest.mark.parametrize("seed", range(20))
def test_any_text_gives_the_same_however_it_is_cut(seed):
    """Marks of all formats in random order, with pieces missing: no error, and the same from any pieces."""
    rng = random.Random(seed)
    parts = [text for stream in STREAMS.values() for text in _parts(stream.text, rng)]
    for name in TOOL_NAMES:
        for reasoning in rng.sample(REASONING_NAMES, 2):
            text = "".join(rng.choices(parts, k=12))
            form = output_format("", name, reasoning)
            whole = heard(form.parser("", TOOLS), [text]).same()
            assert heard(form.parser("", TOOLS), [*text]).same() == whole, (name, reasoning, text)


def _parts(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text)), 3))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def test_calls_that_a_structure_forces_are_read():
    for text, reader, calls in (
        ('{"query": "x"}', named_call("search"), [["search", '{"query": "x"}']]),
        ('[{"name": "now", "parameters": {}}, {"name": "search", "parameters": {"query": "]"}}]', listed_calls, None),
        ("", named_call("search"), []),
        ('[{"name": "now", "parame', listed_calls, []),
    ):
        whole = heard(TextParser(reader), [text])
        assert heard(TextParser(reader), [*text]).same() == whole.same()
        assert whole.calls == (calls if calls is not None else [["now", "{}"], ["search", '{"query": "]"}']])
        assert whole.content == ""


def test_only_so_many_calls_come_as_are_wanted():
    stream = STREAMS["hermes: text and two calls"]
    parser = output_format("", "hermes", "none").parser("", TOOLS, most_calls=1)
    found = heard(parser, [*stream.text])
    assert [name for name, _ in found.calls] == ["get_weather"]
    assert found.num_ended == 1


def test_without_tools_a_call_is_text():
    text = STREAMS["hermes: text and two calls"].text
    assert heard(output_format("", "hermes", "none").parser(""), [text]).content == text


@pytest.mark.parametrize(
    ("text", "admits", "said"),
    [
        ("3", {"integer"}, "3"),
        ("3", {"number"}, "3"),
        ("3", {"string", "null"}, '"3"'),
        ("3", set(), "3"),
        ("True", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("x", {"integer"}, '"x"'),
        ("NaN", {"number"}, '"NaN"'),
        ("[" * 100_000, set(), json.dumps("[" * 100_000)),
        ("1" * 10_000, {"integer"}, json.dumps("1" * 10_000)),
        (' {"a": [1]}\n', {"object"}, '{"a": [1]}'),
        ("", {"string", "null"}, '""'),
    ],
)
def test_an_argument_that_is_text_is_json_of_its_type(text, admits, said):
    assert as_json(text, frozenset(admits)) == said


@pytest.mark.parametrize("text", [r'"\ud800"', r'["a\ud800", True]', r'{"\udfff": 1}'])
def test_an_escape_that_utf8_cannot_write_stays_one(text):
    said = json_of_python(text)
    said.encode()
    assert json.loads(said) == ast.literal_eval(text)


@pytest.mark.parametrize(
    "schema", [None, 3, [], {"properties": 3}, {"properties": {"a": 3}}, {"properties": {"a": {"type": {}}}}]
)
def test_whatever_a_schema_holds_there_is_an_answer(schema):
    assert Tools({"f": schema}).admits("f", "a") == frozenset()
    deep: dict = {"type": "string"}
    for _ in range(150):
        deep = {"anyOf": [deep, deep]}
    assert Tools({"f": {"properties": {"a": deep}}}).admits("f", "a") == frozenset()


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }} </think>", "hermes", True),
        ("<tool_call>\n<function=example>", "qwen3_coder", False),
        ("<tool_call>{name}<arg_key> </think>", "glm45", True),
        ("<｜tool▁sep｜>x\\n```json", "deepseek_v3", False),
        ("<｜tool▁sep｜> <think>", "deepseek_v31", True),
        ("<|tool_calls_section_begin|>", "kimi_k2", True),
        ("<minimax:tool_call> <think>", "minimax_m2", True),
        ("[TOOL_CALLS] [/THINK]", "mistral", True),
        ("<|python_tag|>", "llama3_json", False),
        (
            "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
            "pythonic",
            False,
        ),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic", False),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", False),
        ("<seed:tool_call> </seed:think>", "seed_oss", True),
        ("<|tool_call|> assistant_tool_call", "granite", False),
        ("functools[{name}]", "phi4_mini_json", False),
        ("<tool_calls>[{name}]</tool_calls> <answer> </think>", "hunyuan_a13b", True),
        ("<tool_calls><tool_call>{name}<tool_sep><arg_key> </think>", "hy_v3", True),
        ("<function_calls>\nf(a=1)\n</function_calls>", "olmo3", False),
        ("{{ '<|tool_call>call:' + name }} <|channel>thought", "gemma4", True),
        ("<tool_call>\n <response> </think>", "ernie45", True),
        ("{{ messages }}", "none", False),
    ],
)
def test_a_template_says_what_its_outputs_are(template, tools, thinks):
    form, named = output_format(template), output_format("", tools, "none")
    assert form.tools == named.tools
    assert (form.thinking is not None) == thinks
    assert output_format(template, "none", "none").parser("").push("<think>x")[0].text == "<think>x"


def test_harmony_is_told_by_either_name_or_its_template():
    for form in (output_format("<|channel|>"), output_format("", "openai"), output_format("", None, "openai_gptoss")):
        assert form.is_harmony
        assert form.has_calls
