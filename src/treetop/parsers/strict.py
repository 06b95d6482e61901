"""Structures of outputs in which a model may call tools, and whose calls have their tools' schemas: `strict`.

    text, free until a call begins --> head, call (joined, call ...), close --> text ...

Where an answer has a schema, too, there is no free text: an output is calls, or an answer.

They are grammars in Lark's syntax as llguidance reads it. A mark that is a special token is that token alone: its
spelling as text would be read as the mark, too, so it does not come.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetop.parsers.arguments import Tools
from treetop.structured.json_spacing import FIXED
from treetop.structured.one_of import with_exclusive_branches
from treetop.types.errors import InputError

SPACING = {"x-guidance": FIXED}
"""Of a call's arguments, and of an answer beside calls."""
NAME, NUMBER, IS_TEXT = "\0", "\1", "\2"
"""Stand in a `CallForm` for the tool's name, for any number, and for whether an argument is a text."""
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")
"""What a schema may say of a text that is checked only where the text stands in JSON."""


_ANY = {NUMBER: "/[0-9]{1,6}/", IS_TEXT: '("true" | "false")'}


@dataclass(frozen=True, slots=True)
class Member:
    """How an argument is written where arguments are text between tags: before, value, gap, mark, after.

    before: with `NAME` for the argument's name, and perhaps `IS_TEXT`. A text ends at `mark`; `gap` may belong to it.
    """

    before: str
    gap: str
    mark: str
    after: str = "\n"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a block of calls is written.

    opens: ends the free text before it.
    begins, ends: of one call, around its arguments. joined: may stand between two; None if a block has one call.
    member: None where arguments are an object of JSON.
    loose: what begins a call for the parser, too: the free text does not have it.
    """

    opens: str
    head: str
    begins: str
    ends: str
    close: str
    joined: str | None = None
    member: Member | None = None
    loose: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StrictTools:
    """The tools of a request.

    schemas: of the arguments, by name; None for a tool that is not strict.
    special: ids of special tokens by their names.
    several: whether an output may have more than one block.
    answer: a schema of what is said in place of calls; None for any text.
    required: there is a call. Only Harmony holds outputs to that.
    """

    schemas: Mapping[str, Any]
    special: Mapping[str, int]
    several: bool = True
    answer: Mapping[str, Any] | None = None
    required: bool = False


Held = Callable[[StrictTools], str]
"""Makes the grammar of a format. Raises InputError for schemas that it cannot hold its calls to."""


def in_blocks(form: CallForm) -> Held:
    """A format whose calls stand in blocks within text."""

    def made(tools: StrictTools) -> str:
        lark = _Lark(tools)
        calls = [
            f"{lark.words(form.begins.replace(NAME, name))} {lark.arguments(name, form.member)} {lark.words(form.ends)}"
            for name in tools.schemas
        ]
        more = "" if form.joined is None else f"({lark.maybe(form.joined)} call)*"
        opens = lark.until(form.opens, form.loose) if tools.answer is None else lark.words(form.opens)
        block = f"{opens} {lark.words(form.head)} call {more} {lark.words(form.close)}"
        lark.rules += [f"call: {' | '.join(calls)}", f"block: {block}"]
        if tools.answer is not None:
            lark.rules.append(r"GAP: /[ \n]{0,2}/")
            return lark.text(f"{lark.answer} | block {'(GAP block)*' if tools.several else ''}")
        lark.rules.append(f"FREE: {_without(form.opens, *form.loose)}")
        return lark.text(f"block{'*' if tools.several else '?'} FREE")

    return made


_LLAMA_BEGIN = r"""\{[ \t\r\n]*["'](name|function|type|id|arguments|parameters|\\)"""
"""What begins an object that may be a call for the parser, within a text."""


def llama3_calls(tools: StrictTools) -> str:
    """Llama's: an output that begins with an object is calls, and any other is text."""
    lark, apart = _Lark(tools), tools.answer is not None  # an answer's object begins with the same characters
    calls = [f'{_llama_head(name, apart)} {lark.arguments(name, None)} "}}"' for name in tools.schemas]
    more = r'(";" GAP call)*' if tools.several else ""
    tag, free = "<|python_tag|>", lark.answer
    lark.rules += [f"call: {' | '.join(calls)}", r"GAP: /[ \n]?/"]
    if tools.answer is None:
        lark.rules.append(rf"FREE: /([ \t\r\n]*[^ \t\r\n{{](.|\n)*)?/ & ~/(.|\n)*{_LLAMA_BEGIN}(.|\n)*/")
        free = "FREE"
    return lark.text(f"{lark.maybe(tag)} call {more} | {free}")


def _llama_head(name: str, apart: bool) -> str:
    """apart: in the lexemes that the library reads JSON by."""
    words = ("{", '"name"', ": ", f'"{name}"', ", ", '"parameters"', ": ")
    return " ".join(map(_quoted, words)) if apart else _quoted("".join(words))


def harmony_calls(tools: StrictTools) -> str:
    """Harmony's, of an output that begins behind `<|start|>assistant`; its last token is an end of sequence."""
    lark = _Lark(tools)
    begin = "<|channel|>commentary to=functions."
    calls = [
        f"{lark.words(f'{begin}{name} <|constrain|>json<|message|>')} {lark.arguments(name, None)}"
        for name in tools.schemas
    ]
    analysis, commentary, final = (
        lark.words(f"<|channel|>{channel}<|message|>") for channel in ("analysis", "commentary", "final")
    )
    again, last = lark.words("<|end|><|start|>assistant"), list[str]()
    lark.rules += [r"TEXT: /(.|\n)*/", *([f"called: {' | '.join(calls)}"] if calls else [])]
    if calls:
        last.append(f"called {f'({again} called)*' if tools.several else ''}")
    if tools.answer is not None:
        last.append(f"{final} {lark.answer}")
    if tools.answer is not None or tools.required:
        return lark.text(f"(({analysis} | {commentary}) TEXT {again})* ({' | '.join(last)})")
    lark.rules.append(f"message: ({analysis} | {commentary} | {final}) TEXT | called")
    return lark.text(f"message ({again} message)*")


class _Lark:
    """A grammar as it grows."""

    def __init__(self, tools: StrictTools) -> None:
        self._tools, self._known = tools, Tools(tools.schemas)
        self.rules = list[str]()
        names = sorted(tools.special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, [*names, *_ANY])))

    def text(self, start: str) -> str:
        return "\n".join(("%llguidance {}", f"start: {start}", *self.rules))

    @property
    def answer(self) -> str:
        """What is said in place of calls, where that has a schema."""
        return f"%json {written({**SPACING, **(self._tools.answer or {})})}"

    def words(self, text: str) -> str:
        """A text that comes as it is, special tokens of it as tokens."""
        return " ".join(self._words(text))

    def _words(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._names.finditer(text):
            if found.start() > at:
                yield _quoted(text[at : found.start()])
            yield _ANY.get(found[0]) or f"<[{self._tools.special[found[0]]}]>"
            at = found.end()
        if at < len(text):
            yield _quoted(text[at:])

    def maybe(self, text: str) -> str:
        return f"({self.words(text)})?" if text else ""

    def until(self, mark: str, loose: Sequence[str] = ()) -> str:
        """Any text up to a mark, and it. loose: what the text does not have."""
        name, found = f"to_{len(self.rules)}", self._names.search(mark)
        head, rest = mark, ""
        if found is not None:
            head, rest = mark[: found.start()], mark[found.start() :]
        if found is not None and found[0] not in _ANY:
            self.rules.append(rf"{name.upper()}: /(.|\n)*{_escaped(head)}/ & {_without(found[0], *loose)}")
            return f"{name.upper()} {self.words(rest)}"
        if loose:
            self.rules.append(f"{name.upper()}: {_without(*loose)}")
        free = name.upper() if loose else r"/(.|\n)*/"
        self.rules.append(f"{name}[lazy]: {free} {_quoted(head)}")
        return f"{name} {self.words(rest)}"

    def arguments(self, tool: str, member: Member | None) -> str:
        """Those of a call."""
        schema = self._tools.schemas[tool]
        if member is None:
            return f"%json {written({**SPACING, **(schema or {'type': 'object'})})}"
        if schema is None:
            name = self.until(member.before.partition(NAME)[2])
            return f"({self.words(member.before.partition(NAME)[0])} {name} {self._rest(member)})*"
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(properties, dict) or not isinstance(required, list | tuple):
            raise InputError(f"tools: {tool}: parameters must be an object's schema")
        listed = list[str]()
        for key, said in properties.items():
            value = self._value(tool, schema, key, said, member)
            listed.append(value if key in required else f"({value})?")
        return " ".join(listed)

    def _value(self, tool: str, schema: Mapping[str, Any], key: str, said: Any, member: Member) -> str:
        before = member.before.replace(NAME, key)
        text, other = (self.words(before.replace(IS_TEXT, is_text)) for is_text in ("true", "false"))
        end = self.words(member.gap + member.mark + member.after)
        values = said.get("enum", [said["const"]] if "const" in said else None) if isinstance(said, dict) else None
        if isinstance(values, list) and values:
            listed = (
                f"{text} {_quoted(each)}" if isinstance(each, str) else f"{other} {_quoted(json.dumps(each))}"
                for each in values
            )
            return f"({' | '.join(listed)}) {end}"
        if "string" not in self._known.admits(tool, key):
            defined = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            own = {**SPACING, **defined, **(said if isinstance(said, dict) else {})}
            return f"{other} %json {written(own)} {end}"
        limits = [name for name in _OF_TEXT if name in said]
        if limits:
            raise InputError(
                f"tools: {tool}.{key}: this model writes texts without quotes, which strict cannot hold to {limits[0]};"
                " leave it or strict out"
            )
        return f"{text} {self._rest(member)}"

    def _rest(self, member: Member) -> str:
        """A text and what ends it."""
        return f"{self.until(member.mark)} {self.words(member.after)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def written(schema: Mapping[str, Any]) -> str:
    """A schema as it stands in a grammar."""
    return json.dumps(with_exclusive_branches(json.loads(json.dumps(schema))))


def _without(*marks: str) -> str:
    """Any text that none of the marks is in."""
    return rf"/(.|\n)*/ & ~/(.|\n)*({'|'.join(map(_escaped, marks))})(.|\n)*/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


_TOOL_CALL = CallForm("<tool_call>", "\n", f'{{"name": "{NAME}", "arguments": ', "}", "\n</tool_call>")
_PARAMETER = Member(f"<parameter={NAME}>\n", "\n", "</parameter>")


def _functions(tag: str) -> Held:
    """Of Qwen3-Coder and those who took its form."""
    return in_blocks(
        CallForm(
            f"<{tag}>",
            "\n",
            f"<function={NAME}>\n",
            "</function>\n",
            f"</{tag}>",
            member=_PARAMETER,
            loose=("<function=",),
        )
    )


HERMES = in_blocks(_TOOL_CALL)


def _in_lists(opens: str, head: str, close: str, loose: tuple[str, ...] = ()) -> Held:
    """Of those whose calls are a list of JSON."""
    begins = f'{{"name": "{NAME}", "arguments": '
    return in_blocks(CallForm(opens, head, begins, "}", close, joined=", ", loose=loose))


GRANITE = _in_lists("<|tool_call|>", "[", "]", ("<tool_call>",))
PHI4_MINI = _in_lists("functools[", "", "]", ("<|tool_call|>",))
HUNYUAN_A13B = _in_lists("<tool_calls>", "[", "]</tool_calls>")
QWEN3_CODER, SEED_OSS = _functions("tool_call"), _functions("seed:tool_call")
_ARGUMENT = Member(f"<arg_key>{NAME}</arg_key>\n<arg_value>", "", "</arg_value>")
GLM45 = in_blocks(CallForm("<tool_call>", "", f"{NAME}\n", "", "</tool_call>", member=_ARGUMENT))
HY_V3 = in_blocks(
    CallForm(
        "<tool_calls>",
        "\n",
        f"<tool_call>{NAME}<tool_sep>\n",
        "</tool_call>\n",
        "</tool_calls>",
        joined="",
        member=_ARGUMENT,
        loose=("<tool_call>",),
    )
)


def _invokes(block: str, prefix: str = "", kind: str = "") -> Held:
    """Of those whose calls are tags `invoke`. kind: what a parameter says of its value behind its name."""
    return in_blocks(
        CallForm(
            f"<{prefix}{block}>",
            "\n",
            f'<{prefix}invoke name="{NAME}">\n',
            f"</{prefix}invoke>\n",
            f"</{prefix}{block}>",
            joined="",
            member=Member(f'<{prefix}parameter name="{NAME}"{kind}>', "", f"</{prefix}parameter>"),
        )
    )


MINIMAX_M2 = _invokes("minimax:tool_call")
DEEPSEEK_V32, DEEPSEEK_V4 = (
    _invokes(block, "｜DSML｜", f' string="{IS_TEXT}"') for block in ("function_calls", "tool_calls")
)
KIMI_K2 = in_blocks(
    CallForm(
        "<|tool_calls_section_begin|>",
        "",
        f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        joined="",
        loose=("<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    )
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_V31 = in_blocks(
    CallForm(_DEEPSEEK[0], "", f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>", _DEEPSEEK[1], _DEEPSEEK[2], joined="")
)
DEEPSEEK_V3 = in_blocks(
    CallForm(
        _DEEPSEEK[0],
        "",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        f"\n```{_DEEPSEEK[1]}",
        _DEEPSEEK[2],
        joined="\n",
    )
)
_LISTED = CallForm("[TOOL_CALLS]", " [", f'{{"name": "{NAME}", "arguments": ', "}", "]", joined=", ")
_MARKED = CallForm("[TOOL_CALLS]", "", f"{NAME}[ARGS]", "", "")


def mistral_calls(tools: StrictTools) -> str:
    """With a marker before each call where the tokenizer has one, else a list."""
    return in_blocks(_MARKED if "[ARGS]" in tools.special else _LISTED)(tools)
