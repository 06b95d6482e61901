"""White space between the tokens of JSON: how much of it an output may have.

A model that may go on with blanks or line ends for ever sometimes does, until its tokens are used up. The schema says
so in the member `x-guidance`, as llguidance reads it.
"""

from typing import Any

from treetop.types.constraint import JsonWhitespace

FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""To llguidance: white space only as JSON is mostly written, and always there."""
_OF_MODE: dict[JsonWhitespace, dict[str, Any]] = {
    "bounded": {"whitespace_pattern": r"[ \n]"},  # it may be left out, and does not come twice
    "fixed": FIXED,
    "any": {},
}
_SAYS = ("whitespace_flexible", "whitespace_pattern")
"""Members of `x-guidance` that say what white space there may be."""


def spaced(schema: Any, mode: JsonWhitespace, pattern: str | None = None) -> Any:
    """A JSON schema, and with it the white space that its texts may have between tokens.

    pattern: a regular expression of it, None to go by the mode; "" for none. A schema whose own `x-guidance` speaks of
    white space stays as it is, unless there is a pattern.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        return schema  # the library says what is wrong with it
    if pattern is not None:
        said = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
        return {**schema, "x-guidance": {**{name: own[name] for name in own if name not in _SAYS}, **said}}
    if any(name in own for name in _SAYS):
        return schema
    return {**schema, "x-guidance": {**_OF_MODE[mode], **own}}
