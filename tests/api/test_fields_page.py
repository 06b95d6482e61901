"""docs/fields.md has every route, and says of each field what checking does."""

from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from support.scripted import scripted
from support.waiting import WAIT_S
from treetop.api.requests.fields_page import BODIES

FILE = Path(__file__).parents[2] / "docs" / "fields.md"
ROWS = [
    (path, *(cell.strip() for cell in line.split(" | ")[:2]))
    for path, part in ((each.split("`")[0], each) for each in FILE.read_text(encoding="utf-8").split("## `")[1:])
    for line in part.splitlines()
    if line.startswith("| `")
]
CASES = [(path, name.strip("|` ").split("."), kind) for path, name, kind in ROWS]


class Nothing:
    """A value of no kind that a body may hold."""


def problems(path: str, place: list[str], value: object) -> list[str]:
    """What checking a body that holds this value alone has against the field."""
    for name in reversed(place):
        value = {name: value}
    try:
        BODIES[path].model_validate(value)
    except ValidationError as error:
        told = [
            (".".join(map(str, each["loc"])) + each.get("ctx", {}).get("at", ""), each["type"])
            for each in error.errors()
        ]
        return [kind for at, kind in told if at.strip(".").startswith(".".join(place))]
    return []


def test_the_page_has_every_route_with_a_body(tmp_path):
    """As the OpenAPI schema has them; a form of a file is no object."""
    with scripted(lambda _: "a", batch_dir=str(tmp_path)) as (url, _):
        paths = httpx.get(url + "/openapi.json", timeout=WAIT_S).json()["paths"]
    bodies = {
        path: each["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, each in paths.items()
        if "application/json" in each.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert bodies == {path: kind.__name__ for path, kind in BODIES.items()}


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_taken_a_hint_or_refused_as_the_page_says(path):
    """What is taken is checked, what is a hint is let through, what is refused is so by name."""
    cases = [(place, kind) for at, place, kind in CASES if at == path]
    assert {".".join(place) for place, _ in cases} >= set(BODIES[path].neutral) | set(BODIES[path].hints)
    for place, kind in cases:
        found = problems(path, place, Nothing())
        if kind == "refused":
            assert found == ["unsupported"], place
            assert problems(path, place, None) == []
        elif kind == "hint":
            assert "unsupported" not in found, place
        else:
            assert found, place
            assert "unsupported" not in found, place
