"""Tools of a chat: what they may be, and the structure that a forced call has."""

import json
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from treetop.api.requests.fields import Body
from treetop.parsers.arguments import Tools
from treetop.parsers.custom import custom_call, parameters
from treetop.parsers.forced import listed_calls, listed_or_raw, listed_or_raw_grammar, named_call
from treetop.parsers.strict import SPACING, Held, StrictTools
from treetop.parsers.text_parser import Reader
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError, shown

MAX_TOOLS = 1024
_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
_DATA = ("const", "default", "enum", "example", "examples")
"""Members of a schema that hold values and no schemas."""
_NAMING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Members whose own members are schemas by names of the caller's."""
_ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}
_NOTHING: dict[str, Any] = {**_ANYTHING, "additionalProperties": False}
"""Of a tool without `parameters`: it takes none."""


class Function(Body):
    """A function that may be called. strict: calls that the model makes of its own will have its schema, too."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments, an object")
    strict: bool | None = None


class Tool(Body):
    """A tool, in the shape of chats."""

    type: Literal["function"]
    function: Function


class Grammar(Body):
    """Of a text: Lark's, as llguidance reads it, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str

    @property
    def structure(self) -> StructuredOutput:
        """Raises InputError."""
        return StructuredOutput(self.syntax, self.definition)


class AnyText(Body):
    """What a custom tool is given: any text."""

    type: Literal["text"]


class TextOfGrammar(Body):
    """The same: one of a grammar."""

    type: Literal["grammar"]
    grammar: Grammar


class CustomFunction(Body):
    """A tool that is given a text. A call that is forced is held to its grammar; the model is shown it in any case, in
    the description.
    """

    name: str = Field(pattern=_NAME)
    description: str | None = None
    format: Annotated[AnyText | TextOfGrammar, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> Grammar | None:
        return self.format.grammar if isinstance(self.format, TextOfGrammar) else None


class CustomTool(Body):
    """A tool that is given a text and no object."""

    type: Literal["custom"]
    custom: CustomFunction

    @property
    def function(self) -> Function:
        """As a model is shown it: a function with one text."""
        grammar, said = self.custom.grammar, [self.custom.description] if self.custom.description else []
        if grammar is not None:
            said.append(f"The input has this {grammar.syntax} grammar:\n{grammar.definition}")
        return Function(name=self.custom.name, description="\n\n".join(said) or None, parameters=parameters())


class FunctionName(Body):
    """A function by its name."""

    name: str = Field(pattern=_NAME)


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Body):
    """The same, of a custom tool."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


class Allowed(Body):
    """The tools that may be called; with `required`, one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool | NamedCustomTool, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


class AllowedTools(Body):
    """A choice among some of the tools. The model is shown no others."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolList = Annotated[
    list[Annotated[Tool | CustomTool, Field(discriminator="type")]], Field(max_length=MAX_TOOLS, fail_fast=True)
]
ToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[NamedTool | NamedCustomTool | AllowedTools, Field(discriminator="type")]
)


class Calls:
    """What a chat's request says of tools. Raises InputError for what does not fit together."""

    def __init__(self, tools: Sequence[Tool | CustomTool], choice: ToolChoice | None, parallel: bool) -> None:
        self._functions = {tool.function.name: tool.function for tool in tools}
        if len(self._functions) < len(tools):
            raise InputError("tools: two have one name")
        self._parallel = parallel
        self._custom = {tool.custom.name: tool.custom.grammar for tool in tools if isinstance(tool, CustomTool)}
        chosen = [choice] if isinstance(choice, NamedTool | NamedCustomTool) else []
        allowed = choice.allowed_tools if isinstance(choice, AllowedTools) else None
        self.named = chosen[0].name if chosen else None
        self.required = choice == "required" or (allowed is not None and allowed.mode == "required")
        if self.forced and not tools:
            raise InputError("tool_choice: there are no tools to choose from")
        for each in chosen if allowed is None else allowed.tools:
            if each.name not in self._functions or (each.type == "custom") != (each.name in self._custom):
                kind = "custom tool" if each.type == "custom" else "tool"
                raise InputError(f"tool_choice: there is no {kind} {shown(each.name)}")
        if allowed is not None:
            self._functions = {each.name: self._functions[each.name] for each in allowed.tools}
        self._may_call = choice != "none"

    @property
    def forced(self) -> bool:
        return self.required or self.named is not None

    @property
    def most(self) -> int | None:
        """Calls in one output; None for any number."""
        return None if self._parallel else 1

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as templates expect them; none if none may be called."""
        if not self._may_call:
            return []
        return [
            {"type": "function", "function": function.model_dump(exclude_none=True)}
            for function in self._functions.values()
        ]

    @property
    def known(self) -> Tools:
        return Tools({name: function.parameters for name, function in self._functions.items()})

    @property
    def structure(self) -> StructuredOutput | None:
        """What a forced call is held to: the arguments of a named tool, or a list of calls, as vLLM has it."""
        if self._grammar is not None:
            return self._grammar.structure
        if self.named is not None:
            return _schema(self._parameters(self.named))
        if not self.required:
            return None
        raw = self._raw
        in_list = [name for name in self._functions if name not in raw]
        kinds = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "parameters": _moved(self._parameters(name), f"#/items/anyOf/{i}/properties/parameters"),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for i, name in enumerate(in_list)
        ]
        listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
        if not self._parallel:
            listed["maxItems"] = 1
        return _with_raw(listed if kinds else None, raw) if raw else _schema(listed)

    @property
    def may_be(self) -> bool:
        """The model may call, and need not."""
        return self._may_call and bool(self._functions) and not self.forced

    @property
    def are_strict(self) -> bool:
        """Calls that are not forced are held to schemas all the same."""
        return self.may_be and any(function.strict for function in self._functions.values())

    def strict(
        self, held: Held | None, special: Mapping[str, int], answer: StructuredOutput | None = None
    ) -> StructuredOutput:
        """What an output is held to that may call, or has to. Raises InputError.

        held: of the model's format. answer: what it is else, JSON.
        """
        if held is None:
            what = "strict" if answer is None else "a structure beside them"
            raise InputError(
                f"tools: {what}: calls in this model's format are held to no schema; leave it out, or give tool_choice"
                " required"
            )
        if self.forced and self._raw:
            raise InputError(
                "tool_choice: this model's calls stand in messages, where none is held to a lark grammar, which"
                f" {shown(next(iter(self._raw)))} has; leave the choice or the grammar out, or give a regex"
            )
        if answer is not None and answer.whitespace is not None:
            raise InputError("guided_whitespace_pattern: not where the output may be a call, too; leave it out")
        schemas = {
            name: self._parameters(name) if each.strict or self.forced else None
            for name, each in self._functions.items()
            if self._may_call and self.named in (None, name)
        }
        try:
            said = None if answer is None else json.loads(answer.spec or '{"type": "object"}')
            if said is not None and not isinstance(said, dict):
                raise InputError("structured_output: the schema of an answer beside tools must be an object")
            return StructuredOutput("grammar", held(StrictTools(schemas, special, self._parallel, said, self.forced)))
        except ValueError as error:
            raise InputError(f"response_format: the schema cannot be read as JSON: {error}") from None
        except RecursionError:
            raise InputError("tools: too deep") from None
        except InputError as error:
            raise InputError(str(error).replace("structured_output", "tools", 1)) from None

    @property
    def reader(self) -> Reader | None:
        """Of an output that is held to `structure`."""
        if self._grammar is not None and self.named is not None:
            return custom_call(self.named)
        if self.named is not None:
            return named_call(self.named)
        if not self.required:
            return None
        return listed_or_raw(self._raw.keys()) if self._raw else listed_calls

    @property
    def custom(self) -> Set[str]:
        """Names of the custom tools."""
        return self._custom.keys()

    @property
    def _grammar(self) -> Grammar | None:
        """Of the tool that is named."""
        return None if self.named is None else self._custom.get(self.named)

    @property
    def _raw(self) -> dict[str, str]:
        """Grammars in Lark's syntax of tools that may be called: no text in JSON is held to such a one."""
        return {
            name: grammar.definition
            for name, grammar in self._custom.items()
            if grammar is not None and grammar.syntax == "lark"
            if name in self._functions and self.named in (None, name)
        }

    def _parameters(self, name: str) -> dict[str, Any]:
        grammar = self._custom.get(name)
        if grammar is not None and grammar.syntax == "regex":
            return parameters(grammar.definition)
        said = self._functions[name].parameters
        return cast(dict[str, Any], _moved(_NOTHING if said is None else said or _ANYTHING, "#"))


def _schema(schema: dict[str, Any]) -> StructuredOutput:
    try:
        return StructuredOutput("json_schema", json.dumps({**SPACING, **schema}))
    except (InputError, RecursionError) as error:
        raise InputError(f"tools: {str(error).removeprefix('structured_output: ')}") from None


def _with_raw(listed: Mapping[str, Any] | None, raw: Mapping[str, str]) -> StructuredOutput:
    try:
        return StructuredOutput("grammar", listed_or_raw_grammar(listed and {**SPACING, **listed}, raw))
    except (InputError, ValueError, RecursionError) as error:
        raise InputError(f"tools: {str(error).removeprefix('structured_output: ')}") from None


def _moved(schema: Any, to: str, named: bool = False) -> Any:
    """A schema that stands elsewhere in a document: references into it follow.

    named: it is no schema, but has some by their names. litellm leaves the # of a reference out for Anthropic's API,
    which takes that.
    """
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _moved(each, to) for name, each in schema.items()}
    moved = {key: value if key in _DATA else _moved(value, to, key in _NAMING) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("/$defs/"):
        target = f"#{target}"
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = to + target[1:]
    return moved
