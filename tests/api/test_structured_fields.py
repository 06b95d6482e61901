"""Fields that say what white space JSON may have: honoured beside the field that asks for JSON, refused elsewhere."""

import pytest

from treetop.api.completions import CompletionRequest
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.requests.structured import structured_output
from treetop.types.errors import InputError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.mark.parametrize(
    "given",
    [
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        {"response_format": FORMAT, "guided_whitespace_pattern": " ?"},
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " ?"},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
    ],
)
def test_a_pattern_of_white_space_goes_with_its_structure(given):
    for body in (
        ChatRequest(messages=[{"role": "user", "content": "x"}], **given),
        CompletionRequest(prompt="x", **given),
    ):
        assert body.structure is not None
        assert body.structure[1].whitespace == " ?"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern: there is no JSON"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern: only of JSON"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern: there is no"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": 3}},
            "structured_outputs.whitespace_pattern must",
        ),
    ],
)
def test_a_pattern_without_json_is_refused_by_name(given, says):
    with pytest.raises(InputError) as raised:
        structured_output(given)
    assert str(raised.value).startswith(says)


def test_a_pattern_where_the_output_may_be_a_call_is_refused_by_name():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = ChatRequest(
        messages=[{"role": "user", "content": "x"}], tools=[tool], guided_json=SCHEMA, guided_whitespace_pattern=" ?"
    )
    assert body.answer is not None
    with pytest.raises(InputError, match=r"^guided_whitespace_pattern: not where"):
        body.calls.strict(lambda tools: "", {}, body.answer[1])
