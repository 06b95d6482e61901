"""White space between tokens of JSON has an end: a model cannot go on with it until its tokens are used up."""

import json

import pytest
from llguidance import LLMatcher

from treetop import LLM, SamplingParams, StructuredOutput
from treetop.checkpoints.folder import resolve_folder
from treetop.structured.grammars import GrammarCompiler
from treetop.structured.json_spacing import spaced
from treetop.types.errors import InputError

FOLDER, VOCAB = resolve_folder("builtin:nestling"), 4096
SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["z", "n"],
    "additionalProperties": False,
}
DENSE, USUAL, MIXED = '{"z":"a","n":1}', '{"z": "a", "n": 1}', '{ "z" :\n"a" ,\n"n": 1\n}'
WIDE = ['{"z":  "a", "n": 1}', '{\n\n"z": "a", "n": 1}', '{\n  "z": "a",\n  "n": 1\n}', '{"z":\t"a", "n": 1}']
JSON = StructuredOutput("json_schema", json.dumps(SCHEMA))


def takes(text, asked=JSON, mode="bounded") -> bool:
    grammars = GrammarCompiler(FOLDER, VOCAB, (0,), mode)
    matcher: LLMatcher = grammars._matcher(asked)
    return matcher.consume_tokens(grammars.load().tokenize_str(text)) and matcher.is_accepting()


def held(schema=SCHEMA, **options) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema), **options)


def test_no_prompt_leaves_a_model_in_white_space():
    """Greedy, two short fields: with any white space three of these ended by length within it."""
    asked = SamplingParams(structured_output=JSON, max_tokens=60, temperature=0.0)
    prompts = ["def area(r):", "{", "class A:\n", "The answer is"]
    for output in LLM().generate(prompts, asked):
        assert output.finish_reason == "stop", output.text
        assert {*json.loads(output.text)} == {"z", "n"}


def test_what_the_option_says_holds():
    for mode, taken, refused in (
        ("bounded", [DENSE, USUAL, MIXED], WIDE),
        ("fixed", [USUAL], [DENSE, MIXED, *WIDE]),
        ("any", [DENSE, USUAL, MIXED, *WIDE], []),
    ):
        assert all(takes(text, mode=mode) for text in taken), mode
        assert not any(takes(text, mode=mode) for text in refused), mode


@pytest.mark.parametrize(
    ("asked", "before", "behind"),
    [
        (StructuredOutput("json_object"), "", ""),
        (
            StructuredOutput(
                "structural_tag",
                json.dumps({"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}),
            ),
            "So <a>",
            "</a>",
        ),
        (held({"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}), "", ""),
    ],
)
def test_every_structure_with_a_schema_has_the_bound(asked, before, behind):
    assert takes(before + USUAL + behind, asked)
    assert not any(takes(before + text + behind, asked) for text in WIDE[:3])
    assert takes(before + WIDE[0] + behind, asked, "any")


def test_a_structure_may_say_what_white_space_there_is():
    """A pattern of the request's comes before the schema's word, and that before the option."""
    blanks = held(whitespace=r" {0,3}")
    assert takes(DENSE, blanks)
    assert takes('{"z":   "a", "n": 1}', blanks)
    assert not takes('{"z":\n"a", "n": 1}', blanks)
    assert takes(DENSE, held(whitespace=""))
    assert not takes(USUAL, held(whitespace=""))
    own = {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}
    assert takes(WIDE[0], held(own))
    assert not takes(USUAL, held(own, whitespace=""))
    assert not takes(WIDE[0], held({**SCHEMA, "x-guidance": {"lenient": True}}))


def test_a_schema_that_is_no_object_keeps_its_meaning():
    assert spaced(False, "bounded") is False
    assert takes('{"a": 1}', StructuredOutput("json_schema", "true"))
    assert not takes('{"a":  1}', StructuredOutput("json_schema", "true"))


def test_a_pattern_that_cannot_be_kept_is_refused_by_name():
    with pytest.raises(InputError, match="unclosed group"):
        takes(DENSE, held(whitespace="("))
    for kind, spec, pattern in (("regex", "a", " "), ("json_object", "", 3), ("json_object", "", " " * 201)):
        with pytest.raises(InputError, match=r"structured_output: whitespace"):
            StructuredOutput(kind, spec, whitespace=pattern)
