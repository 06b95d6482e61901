"""A class's name says one thing: whoever searches for it finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def places(folder):
    """Where each class of a folder is defined, by its name."""
    found = defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{file.relative_to(folder)}:{node.lineno}")
    return found


def test_no_class_name_stands_twice():
    """Also not inside a function or with an underscore."""
    assert {name: where for name, where in places(SOURCE).items() if len(where) > 1} == {}


def test_twins_are_found(tmp_path):
    (tmp_path / "a.py").write_text("class Span: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class Span: ...\n")
    assert places(tmp_path) == {"Span": ["a.py:1", "b.py:2"]}
