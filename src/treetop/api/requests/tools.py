"""Tools of a chat: what they may be, and the structure that a forced call has."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from treetop.api.requests.fields import Body
from treetop.parsers.arguments import Tools
from treetop.parsers.forced import listed_calls, named_call
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


class FunctionName(Body):
    """A function by its name."""

    name: str = Field(pattern=_NAME)


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolList = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Calls:
    """What a chat's request says of tools. Raises InputError for what does not fit together."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool) -> None:
        self._functions = {tool.function.name: tool.function for tool in tools}
        if len(self._functions) < len(tools):
            raise InputError("tools: two have one name")
        self._parallel = parallel
        self.named = choice.function.name if isinstance(choice, NamedTool) else None
        self.required = choice == "required"
        if self.forced and not tools:
            raise InputError("tool_choice: there are no tools to choose from")
        if self.named is not None and self.named not in self._functions:
            raise InputError(f"tool_choice: there is no tool {shown(self.named)}")
        self._shown = [] if choice == "none" else [*tools]

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
        return [tool.model_dump(exclude_none=True) for tool in self._shown]

    @property
    def known(self) -> Tools:
        return Tools({name: function.parameters for name, function in self._functions.items()})

    @property
    def structure(self) -> StructuredOutput | None:
        """What a forced call is held to: the arguments of a named tool, or a list of calls, as vLLM has it."""
        if self.named is not None:
            return _schema(self._parameters(self.named))
        if not self.required:
            return None
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
            for i, name in enumerate(self._functions)
        ]
        listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
        return _schema(listed if self._parallel else {**listed, "maxItems": 1})

    @property
    def may_be(self) -> bool:
        """The model may call, and need not."""
        return bool(self._shown) and not self.forced

    @property
    def are_strict(self) -> bool:
        """Calls that are not forced are held to schemas all the same."""
        return self.may_be and any(tool.function.strict for tool in self._shown)

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
        if answer is not None and answer.whitespace is not None:
            raise InputError("guided_whitespace_pattern: not where the output may be a call, too; leave it out")
        schemas = {
            name: self._parameters(name) if each.strict or self.forced else None
            for name, each in self._functions.items()
            if self._shown and self.named in (None, name)
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
        if self.named is not None:
            return named_call(self.named)
        return listed_calls if self.required else None

    def _parameters(self, name: str) -> dict[str, Any]:
        said = self._functions[name].parameters
        return cast(dict[str, Any], _moved(_NOTHING if said is None else said or _ANYTHING, "#"))


def _schema(schema: dict[str, Any]) -> StructuredOutput:
    try:
        return StructuredOutput("json_schema", json.dumps({**SPACING, **schema}))
    except (InputError, RecursionError) as error:
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
