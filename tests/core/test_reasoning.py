"""Reasoning before an answer where its marks are special tokens, as most models have them; the rest is in
tests/engine/test_tree_masks.py, whose tokenizer has none.
"""

import json

import pytest

from treetop import InputError, Reasoning, StructuredOutput
from treetop.core.grammars import GrammarCompiler
from treetop.core.output_parser import OutputParser
from treetop.models.folder import resolve_folder

SIZE, OPENS, CLOSES = 4098, 4096, 4097
ANSWER = StructuredOutput("regex", "[ab]{2}")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> GrammarCompiler:
    """Of the embedded tokenizer with two special tokens more."""
    folder = tmp_path_factory.mktemp("marks")
    said = json.loads((resolve_folder("builtin:nestling") / "tokenizer.json").read_text())
    for token, name in ((OPENS, "<think>"), (CLOSES, "</think>")):
        said["added_tokens"].append({**said["added_tokens"][0], "id": token, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(said))
    return GrammarCompiler(folder, SIZE, (0,))


def allowed(parser: OutputParser) -> set[int]:
    mask = parser.mask()
    return {*range(SIZE)} if mask is None else {t for t in range(len(mask) * 8) if mask[t // 8] >> t % 8 & 1}


def after(grammars, asked, *pieces: str | int) -> set[int]:
    """What may follow these texts and tokens, each of which was allowed before."""
    parser, tokenizer = grammars.parser(asked), grammars.load()
    for piece in pieces:
        for token in [piece] if isinstance(piece, int) else tokenizer.tokenize_str(piece):
            assert token in allowed(parser), tokenizer.decode_str([token])
            parser.follow([token])
    return allowed(parser)


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
