"""What pydantic says of a body as OpenAI tells it: a path such as `messages[30].content[0].text`, a text and a code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Problem = tuple[str | None, str, str]
"""The path, what is wrong there, and the code. What was sent stays out: it may be a prompt, or large."""
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "misspelled": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "union_tag_invalid": "unsupported_parameter",
    "json_invalid": "invalid_json",
}
"""By what pydantic calls a problem, or we do. One that ends in `_type` is `invalid_type`."""
_LONGEST_NAME = 100


def problems_of(errors: Sequence[dict[str, Any]], body: Any) -> list[Problem]:
    """The problems of a body, without those of alternatives that it was not meant to be.

    Where a value may be of several kinds, pydantic tells what each of them lacks: that it is no text is no news where
    something is wrong inside it.
    """
    placed = [(_path(each, body), each) for each in errors]
    paths = [path for (path, _), _ in placed]
    return [
        _problem(error, path)
        for (path, is_alternative), error in placed
        if not (is_alternative and any(_is_inside(other, path) for other in paths))
    ]


def _is_inside(path: str, other: str) -> bool:
    return path.startswith((f"{other}.", f"{other}["))


def _path(error: dict[str, Any], body: Any) -> tuple[str, bool]:
    """Where the problem is, and whether it is that of one alternative of several."""
    kind, loc = str(error["type"]), list(error["loc"][1:])
    if kind in ("missing", "extra_forbidden") and loc:
        *loc, name = loc
        owners = [way for way in _ways(loc, body) if isinstance(way.value, dict)]
        fitting = [way for way in owners if (name in way.value) == (kind == "extra_forbidden")]
        return _joined([*_best(fitting or owners or _ways(loc, body)).steps, name]), False
    way = _best(_ways(loc, body))
    at = ".type" if kind.startswith("union_tag_") else str(error.get("ctx", {}).get("at", ""))
    return (_joined(way.steps) + at).removeprefix("."), way.ends_aside


@dataclass(frozen=True, slots=True)
class _Way:
    """A location as steps into a body.

    value: what they lead to. num_skipped: parts of the location that are names of alternatives and no steps.
    ends_aside: the last part is one.
    """

    steps: tuple[str | int, ...]
    value: Any
    num_skipped: int = 0
    ends_aside: bool = False


def _ways(loc: Sequence[str | int], body: Any) -> list[_Way]:
    """All readings of a location: the name of an alternative (`text`) may be that of a member, too."""
    ways = [_Way((), body)]
    for step in loc:
        longer = list[_Way]()
        for way in ways:
            is_item = isinstance(way.value, list) and isinstance(step, int) and step < len(way.value)
            if is_item or (isinstance(way.value, dict) and step in way.value):
                longer.append(_Way((*way.steps, step), way.value[step], way.num_skipped))
            longer.append(_Way(way.steps, way.value, way.num_skipped + 1, True))
        ways = longer
    return ways


def _best(ways: Sequence[_Way]) -> _Way:
    return min(ways, key=lambda way: (way.num_skipped, way.ends_aside))


def _joined(steps: Sequence[str | int]) -> str:
    parts = (f"[{step}]" if isinstance(step, int) else f".{step[:_LONGEST_NAME]}" for step in steps)
    return "".join(parts).removeprefix(".")


def _problem(error: dict[str, Any], path: str) -> Problem:
    kind, about = str(error["type"]), error.get("ctx", {})
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "json_invalid":
        return None, f"the body is not JSON: {about.get('error', '')}", code
    if (kind == "missing" and not path) or (kind == "model_attributes_type" and not path):
        return None, "the body must be a JSON object, with Content-Type: application/json", "invalid_json"
    if kind == "extra_forbidden":
        return path, "unknown field", code
    if kind == "union_tag_invalid":
        return path, f"{str(about['tag'])[:_LONGEST_NAME]!r} is not supported, only {about['expected_tags']}", code
    return path or None, str(error["msg"]), code
