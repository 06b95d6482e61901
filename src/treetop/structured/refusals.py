"""Errors of the library `llguidance` in plain words."""

from treetop.types.errors import InputError

_MAX_WORDS = 300
"""Characters of an error that is handed on."""
_TOO_COMPLEX = ("fuel exhausted", "too many", "TooComplex", "max is", "precomputation failed", "lexer error")
"""What the library says where one of its limits ends a structure."""


def refused(problem: str) -> InputError:
    """An error of the library, without its inner state."""
    return InputError(f"structured_output: {_in_words(problem)}")


def _in_words(problem: str) -> str:
    for end in ("<state>", "<non-verbose/>", "<backtrace>", "<grammar>"):
        problem = problem.split(end, maxsplit=1)[0]
    text = " ".join(problem.split())[:_MAX_WORDS]
    if "NoExtension" in text:
        return "no text has this structure"
    if "oneOf constraints are not supported" in text:
        return (
            "oneOf: its branches must exclude one another; give each a property with a const of its own, or write anyOf"
        )
    if any(word in text for word in _TOO_COMPLEX):
        return f"the structure is too complex ({text})"
    if text.startswith("panic"):
        return f"the structure cannot be read ({text})"
    return text
