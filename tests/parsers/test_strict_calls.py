"""Strict tools where the model decides: free text, and calls that have their schema, in every format."""

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from support.tool_streams import coder, dsml, glm, harmony_call, hermes, hy3, kimi, listed, minimax, v31
from support.tool_streams import said as arguments
from treetop.api.requests.tools import Calls, Function, Tool
from treetop.checkpoints.folder import resolve_folder
from treetop.parsers import harmony
from treetop.parsers.registry import TOOL_PARSERS, OutputParsers
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError

BASE = json.loads((resolve_folder("builtin:nestling") / "tokenizer.json").read_text())
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
SAY = {
    "hermes": hermes,
    "qwen3_coder": lambda name, said: coder(name, **{key: str(value) for key, value in said.items()}),
    "seed_oss": lambda name, said: coder(name, "seed:tool_call", **{key: str(value) for key, value in said.items()}),
    "glm45": lambda name, said: glm(name, **{key: str(value) for key, value in said.items()}),
    "minimax_m2": lambda name, said: (
        f"<minimax:tool_call>\n{minimax(name, **{k: str(v) for k, v in said.items()})}</minimax:tool_call>"
    ),
    "deepseek_v3": lambda name, said: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments(said)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda name, said: f"<｜tool▁calls▁begin｜>{v31(name, said)}<｜tool▁calls▁end｜>",
    "deepseek_v32": dsml,
    "deepseek_v4": lambda name, said: dsml(name, said, "tool_calls"),
    "kimi_k2": lambda name, said: SECTION.format(kimi(name, 0, said)),
    "llama3_json": lambda name, said: json.dumps({"name": name, "parameters": said}, ensure_ascii=False),
    "mistral": lambda name, said: f"[TOOL_CALLS]{name}[ARGS]{arguments(said)}",
    "granite": lambda name, said: f"<|tool_call|>{listed((name, said))}",
    "phi4_mini_json": lambda name, said: f"functools{listed((name, said))}",
    "hunyuan_a13b": lambda name, said: f"<tool_calls>{listed((name, said))}</tool_calls>",
    "hy_v3": lambda name, said: (
        f"<tool_calls>\n{hy3(name, **{key: str(value) for key, value in said.items()})}</tool_calls>"
    ),
    "openai": lambda name, said: harmony_call(name, said).removesuffix("<|call|>"),  # which ends the output
}


@cache
def tokenizer_of(words: tuple[str, ...]) -> tuple[LLTokenizer, dict[str, int]]:
    """The embedded one, with special tokens of these names more."""
    special = {word: 4096 + place for place, word in enumerate(words)}
    more = [{**BASE["added_tokens"][0], "id": token, "content": word} for word, token in special.items()]
    said = {**BASE, "added_tokens": [*BASE["added_tokens"], *more]}
    return LLTokenizer(arguments(said), n_vocab=4096 + len(special)), special


def calls_of(parameters=PARAMETERS, strict=True, parallel=True) -> Calls:
    function = Function(name="f", parameters=parameters, strict=strict)
    loose = Tool(type="function", function=Function(name="loose"))
    return Calls([Tool(type="function", function=function), loose], None, parallel)


def taken(form: OutputParsers, words, text: str, answer=None, **options) -> int | None:
    """Characters of the text before the first token that the structure does not allow; None if it allows it all.

    answer: the schema of what is said in place of calls.
    """
    tokenizer, special = tokenizer_of(words)
    said = None if answer is None else StructuredOutput("json_schema", json.dumps(answer))
    matcher = LLMatcher(tokenizer, calls_of(**options).strict(form.strict, special, said).spec, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text, parse_special=True)
    for place, token in enumerate(ids):
        mask = matcher.compute_bitmask()
        if not mask[token // 8] >> token % 8 & 1:
            return len(tokenizer.decode_str(ids[:place]))
        assert matcher.consume_tokens([token])
    return None if matcher.is_accepting() else len(text)


def form_of(name: str) -> OutputParsers:
    return OutputParsers(is_harmony=True) if name == "openai" else OutputParsers(TOOL_PARSERS[name])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", SAY)
def test_a_call_has_its_schema_and_text_is_free(name, special):
    """Valid calls pass, and broken ones stop where they break, whether marks are special tokens or text."""
    form, say = form_of(name), SAY[name]
    words = form.words(True) if special or name in ("mistral", "openai") else ()
    lead = "" if name in ("llama3_json", "openai") else "Let me look.\n"
    for said in ({"city": "Zürich <b> é"}, {"city": "x", "days": 3, "unit": "f"}):
        assert taken(form, words, lead + say("f", said)) is None
    assert taken(form, words, lead + say("loose", {"any": "thing"})) is None
    free = "<|channel|>final<|message|>It is 3 < 4 [b] {c}." if name == "openai" else "It is 3 < 4 [b] {c}."
    assert taken(form, words, free) is None
    for said, at in (
        ({"city": "x", "days": "three"}, "three"),
        ({"city": "x", "unit": "kelvin"}, "kelvin"),
        ({"days": 3}, "days"),
        ({"city": "x", "other": 3}, "other"),
    ):
        broken = lead + say("f", said)
        stopped = taken(form, words, broken)
        assert stopped is not None, broken
        assert len(lead) < stopped <= broken.index(at) + len(at)
    assert taken(form, words, lead + say("g", {"city": "x"})) is not None


UNION = {
    "type": "object",
    "properties": {
        "of": {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
            ]
        }
    },
    "required": ["of"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", SAY)
def test_where_an_answer_has_a_schema_an_output_is_calls_or_that(name, special):
    """No free text, strict tools or not (openai-agents with output_type, response_format beside tools)."""
    form, say = form_of(name), SAY[name]
    words = form.words(True) if special or name in ("mistral", "openai") else ()
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    call, fits, wrong = say("f", {"city": "x"}), '{"of": {"kind": "b"}}', '{"of": {"kind": "c"}}'
    for strict in (True, False):
        assert taken(form, words, call, UNION, strict=strict) is None
        assert taken(form, words, final + fits, UNION, strict=strict) is None
        assert taken(form, words, final + wrong, UNION, strict=strict) == len(final) + wrong.index('c"}}')
        assert taken(form, words, f"{final}Well. {fits}", UNION, strict=strict) is not None
        assert taken(form, words, f"{final}Well. {call}", UNION, strict=strict) is not None
    again = {"openai": "<|end|><|start|>assistant", "llama3_json": "; "}.get(name, "\n")
    assert taken(form, words, call + again + call, UNION) is None
    assert taken(form, words, call + again + call, UNION, parallel=False) is not None or name == "openai"
    if name == "openai":
        thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
        assert taken(form, words, thought + final + fits, UNION) is None


@pytest.mark.parametrize(
    ("name", "loose"),
    [
        ("qwen3_coder", "<function=f>\n"),
        ("seed_oss", "<function=f>\n"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0"),
        ("kimi_k2", "<|tool_call_section_begin|>"),
        ("hy_v3", "<tool_call>f<tool_sep>"),
        ("granite", '<tool_call>[{"name"'),
        ("phi4_mini_json", "<|tool_call|>["),
        ("llama3_json", '{ "name": "f"'),
        ("llama3_json", "{'parameters'"),
    ],
)
def test_what_the_parser_would_read_as_a_call_is_not_in_free_text(name, loose):
    """A call that is recovered has no schema; so strict text has none, before a call or without."""
    form, call = form_of(name), SAY[name]("f", {"city": "x"})
    assert taken(form, (), "Let me look.\n" + loose[:3]) is None
    stopped = taken(form, (), f"Let me look.\n{loose} and")
    assert stopped is not None
    assert stopped < len(f"Let me look.\n{loose}")
    if name != "llama3_json":
        assert taken(form, (), f"Let me look.\n{loose}\n{call}") == stopped


def test_where_one_call_may_come_there_is_one():
    form, call = form_of("hermes"), hermes("f", {"city": "x"})
    assert taken(form, (), f"{call}\n{call}") is None
    assert taken(form, (), f"{call}\nIt is done.", parallel=False) is None
    assert taken(form, (), f"{call}\n{call}", parallel=False) == len(call) + len("\n<tool_call")


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "f.a: "),
        ("glm45", {"type": "object", "properties": [1]}, "an object's schema"),
        ("hermes", {"type": "object", "properties": {"a": {"enum": ["x" * 70000]}}}, "tools: 70"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_by_name(name, parameters, words):
    with pytest.raises(InputError, match=r"^tools: ") as raised:
        calls_of(parameters).strict(form_of(name).strict, {})
    assert words in str(raised.value)


def test_a_format_that_cannot_be_held_is_refused_by_name():
    assert not calls_of(strict=False).are_strict
    with pytest.raises(InputError, match="tools: strict: "):
        calls_of().strict(OutputParsers().strict, {})


def test_the_marks_of_harmony_are_those_of_its_parser():
    _, special = tokenizer_of(harmony.WORDS)
    lark = calls_of().strict(form_of("openai").strict, special).spec
    assert all(f"<[{special[word]}]>" in lark for word in ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"))
