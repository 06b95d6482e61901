"""`oneOf` whose branches exclude one another, as pydantic writes its unions: for these it says what `anyOf` says."""

from collections.abc import Sequence
from typing import Any

_MAX_HOPS = 16
"""References that are followed to find a branch."""


def with_exclusive_branches(schema: Any) -> Any:
    """A JSON schema with `anyOf` where its `oneOf` says the same; else as it is.

    Branches exclude one another if each has a property of the same name, whose values are listed (const, enum), and no
    value is listed twice. The property is required then: an object without it would fit every branch. A text of the
    schema that is returned is one of the schema that was given, which is changed. Raises ValueError and RecursionError.
    """
    _rewrite(schema, schema)
    return schema


def _rewrite(node: Any, root: Any) -> None:
    if isinstance(node, list):
        for each in node:
            _rewrite(each, root)
    elif isinstance(node, dict):
        for each in [*node.values()]:
            _rewrite(each, root)
        branches = node.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in node:
            exclusive = _exclusive(branches, root)
            if exclusive is not None:
                del node["oneOf"]
                node.pop("discriminator", None)  # beside it the library follows no circular reference
                node["anyOf"] = exclusive


def _exclusive(branches: Sequence[Any], root: Any) -> list[Any] | None:
    """The branches, each with the property required that tells them apart; None if there is no such property."""
    found = [_resolved(each, root) for each in branches]
    if not found or any(each is None for each in found):
        return None
    objects = [each for each in found if each is not None]
    for name in objects[0].get("properties", {}):
        values = [_listed(each, name) for each in objects]
        listed = [value for each in values for value in each]
        if all(values) and len({*listed}) == len(listed):
            return [_requiring(each, of, name) for each, of in zip(branches, objects, strict=True)]
    return None


def _resolved(branch: Any, root: Any) -> dict[str, Any] | None:
    """The object schema that a branch is or refers to; None for what is none, or whose keys would be merged."""
    for _ in range(_MAX_HOPS):
        if not isinstance(branch, dict):
            return None
        if "$ref" not in branch:
            properties, required = branch.get("properties"), branch.get("required", [])
            sound = branch.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list)
            return branch if sound else None
        target = branch["$ref"]
        if len(branch) > 1 or not isinstance(target, str) or not target.startswith("#/"):
            return None
        branch = root
        for step in target[2:].split("/"):
            branch = branch.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(branch, dict) else None
    return None


def _listed(schema: dict[str, Any], name: str) -> list[str]:
    """The values of a property, if they are listed and texts; numbers are equal in several spellings."""
    described = schema["properties"].get(name)
    if not isinstance(described, dict):
        return []
    values = [described["const"]] if "const" in described else described.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        return []
    return [*dict.fromkeys(values)]


def _requiring(branch: Any, schema: dict[str, Any], name: str) -> Any:
    required = schema.get("required", [])
    return branch if name in required else {**schema, "required": [*required, name]}
