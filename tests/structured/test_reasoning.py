"""Reasoning before an answer where its marks are special tokens, as most models have them; the rest is in
tests/engine/test_tree_masks.py, whose tokenizer has none.
"""

import json

import pytest

from treetop import InputError, Reasoning, StructuredOutput
from treetop.checkpoints.folder import resolve_folder
from treetop.parsers import harmony
from treetop.parsers.strict import StrictTools, harmony_calls
from treetop.structured.grammars import GrammarCompiler
from treetop.structured.output_parser import OutputParser

SIZE, OPENS, CLOSES = 4098, 4096, 4097
START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = range(4096, 4103)
ANSWER = StructuredOutput("regex", "[ab]{2}")


def with_special(folder, *names: str) -> GrammarCompiler:
    """Of the embedded tokenizer with special tokens more."""
    said = json.loads((resolve_folder("builtin:nestling") / "tokenizer.json").read_text())
    for token, name in enumerate(names, start=4096):
        said["added_tokens"].append({**said["added_tokens"][0], "id": token, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(said))
    return GrammarCompiler(folder, 4096 + len(names), (0,))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> GrammarCompiler:
    return with_special(tmp_path_factory.mktemp("marks"), "<think>", "</think>")


@pytest.fixture(scope="module")
def harmonies(tmp_path_factory) -> GrammarCompiler:
    return with_special(tmp_path_factory.mktemp("harmony"), *harmony.WORDS)


def allowed(parser: OutputParser, size: int = SIZE) -> set[int]:
    mask = parser.mask()
    return {*range(size)} if mask is None else {t for t in range(len(mask) * 8) if mask[t // 8] >> t % 8 & 1}


def after(grammars, asked, *pieces: str | int) -> set[int]:
    """What may follow these texts and tokens, each of which was allowed before."""
    parser, tokenizer = grammars.parser(asked), grammars.load()
    for piece in pieces:
        for token in [piece] if isinstance(piece, int) else tokenizer.tokenize_str(piece):
            assert token in allowed(parser, grammars.vocab_size), tokenizer.decode_str([token])
            parser.follow([token])
    return allowed(parser, grammars.vocab_size)


def texts(grammars, tokens: set[int]) -> set[str]:
    return {grammars.load().decode_str([token]) for token in tokens}


@pytest.mark.parametrize("end", [[CLOSES], ["</think>"], ["</th", CLOSES], [CLOSES, "\n\n"]])
def test_the_structure_begins_behind_either_spelling_of_the_mark(grammars, end):
    asked = StructuredOutput(ANSWER.kind, ANSWER.spec, Reasoning("</think>"))
    free = after(grammars, asked, "a {thought}\n")
    assert len(free) > 3000
    assert CLOSES in free
    assert not {0, OPENS} & free
    assert (
        {"a", "b"} <= texts(grammars, after(grammars, asked, "a thought", *end)) <= {"a", "b", "ab", "aa", "\n", "\n\n"}
    )
    assert after(grammars, asked, "a thought", *end, "a", "b") == {0}


@pytest.mark.parametrize("begin", [[OPENS], ["<think>"], ["\n", OPENS]])
def test_there_may_be_no_reasoning_where_the_output_would_open_it(grammars, begin):
    asked = StructuredOutput(ANSWER.kind, ANSWER.spec, Reasoning("</think>", "<think>"))
    assert after(grammars, asked, "a", "b") == {0}
    assert CLOSES not in after(grammars, asked)
    assert CLOSES in after(grammars, asked, *begin, "x")
    assert after(grammars, asked, *begin, "x", CLOSES, "a", "b") == {0}


@pytest.mark.parametrize("kind", ["text", "regex"])
def test_a_budget_forces_the_special_token_or_what_is_left_of_its_text(grammars, kind):
    asked = StructuredOutput(kind, "" if kind == "text" else ANSWER.spec, Reasoning("</think>", budget=2))
    one, two, three = grammars.load().tokenize_str("one two three")[:3]
    assert len(after(grammars, asked, one)) > 3000
    assert after(grammars, asked, one, two) == {CLOSES}
    assert after(grammars, asked, one, two, CLOSES) == after(grammars, StructuredOutput(kind, asked.spec)) | (
        set() if kind == "text" else after(grammars, asked, CLOSES)
    )
    begun = grammars.load().tokenize_str("</th")
    assert len(begun) == 2
    assert texts(grammars, after(grammars, asked, *begun)) == {"in"}
    bytes_of_snowman = grammars.load().tokenize_bytes("\u2603".encode())
    assert len(bytes_of_snowman) == 3
    assert len(after(grammars, asked, three, *bytes_of_snowman[:1])) > 20
    assert after(grammars, asked, three, *bytes_of_snowman) == {CLOSES}


def test_what_follows_may_end_reasoning_that_is_never_closed(grammars):
    call = grammars.load().tokenize_str("<call>")
    for also, left in (((), {CLOSES}), (("<call>",), {*range(SIZE)})):
        asked = StructuredOutput("text", reasoning=Reasoning("</think>", "<think>", len(call), also))
        assert after(grammars, asked, OPENS, *call) == left
    assert len(after(grammars, asked, *"abcdefghijk")) == SIZE, "an output that opens no reasoning has no budget"


@pytest.mark.parametrize(
    "said", [{"closes": ""}, {"closes": "x", "budget": -1}, {"closes": "x" * 300}, {"closes": "x", "opens": "\ud800"}]
)
def test_what_is_no_reasoning_is_an_input_error(said):
    with pytest.raises(InputError, match="reasoning: "):
        Reasoning(**said)


# -------------------------------------------------------------------------------------------------------- Harmony

ANALYSIS, AGAIN = (CHANNEL, "analysis", MESSAGE), (END, START, "assistant", CHANNEL)


@pytest.mark.parametrize("begin", [ANALYSIS, ()])
def test_a_budget_ends_the_analysis_of_harmony_and_no_other_follows(harmonies, begin):
    """All its messages together, whether the prompt opens the first or not."""
    tail = "<|start|>assistant" + ("" if begin else "<|channel|>analysis<|message|>")
    asked = StructuredOutput("text", reasoning=harmony.reasoning(tail, 3))
    one, two, three = harmonies.load().tokenize_str("one two three")[:3]
    assert len(after(harmonies, asked, *begin, one, two)) == harmonies.vocab_size
    assert after(harmonies, asked, *begin, one, two, three) == {END}
    assert after(harmonies, asked, *begin, one, *AGAIN, "analysis", MESSAGE, two, three) == {END}
    early = after(harmonies, asked, *begin, one, two, *AGAIN)
    assert len(early) == harmonies.vocab_size
    left = {*range(harmonies.vocab_size)} - after(harmonies, asked, *begin, one, two, three, *AGAIN)
    assert {"a", "an", "analysis"} & texts(harmonies, left)
    assert all((text and "analysis".startswith(text)) or text.startswith("analysis") for text in texts(harmonies, left))
    spent = (*begin, one, two, three, *AGAIN, "final", MESSAGE)
    assert len(after(harmonies, asked, *spent, "analysis")) == harmonies.vocab_size


def test_an_answer_of_harmony_without_analysis_may_be_followed_by_one_of_the_budget(harmonies):
    asked = StructuredOutput("text", reasoning=harmony.reasoning("<|start|>assistant", 1))
    (one, *_) = harmonies.load().tokenize_str("one two")
    assert after(harmonies, asked, CHANNEL, "commentary", MESSAGE, "x", *AGAIN, "analysis", MESSAGE, one) == {END}


@pytest.mark.parametrize("kind", ["answer", "call"])
def test_in_harmony_a_schema_stands_in_a_message_behind_the_analysis(harmonies, kind):
    special = {word: token for token, word in enumerate(harmony.WORDS, start=4096)}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools = StrictTools({"f": schema}, special, False, None, True)
    head: tuple = (CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE)
    if kind == "answer":
        tools, head = StrictTools({}, special, True, schema), (CHANNEL, "final", MESSAGE)
    asked = StructuredOutput("grammar", harmony_calls(tools), harmony.reasoning("<|start|>assistant", 2))
    assert after(harmonies, asked, *head, '{"n": 2}') == {0}
    one, two = harmonies.load().tokenize_str("one two")[:2]
    assert after(harmonies, asked, *ANALYSIS, one, two) == {END}
    assert after(harmonies, asked, *ANALYSIS, one, two, *AGAIN, *head[1:], '{"n": 1}') == {0}
    assert 0 not in after(harmonies, asked, *ANALYSIS, one)
    assert not {"a", "analysis"} & texts(harmonies, after(harmonies, asked, *ANALYSIS, one, two, *AGAIN))
