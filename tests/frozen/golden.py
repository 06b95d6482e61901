"""The golden files: compact JSON, a run a line, so that a change shows as the lines that changed."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def exists(name: str) -> bool:
    return (FOLDER / f"{name}.json").is_file()


def save(name: str, value: dict[str, Any]) -> None:
    """Lists of a table's entries get a line an item, everything else a line an entry."""
    lines = [f"{json.dumps(key)}: {_entry(each)}" for key, each in value.items()]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _entry(value: Any) -> str:
    if isinstance(value, list):
        return "[\n " + ",\n ".join(_compact(each) for each in value) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
