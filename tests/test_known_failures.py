"""`KNOWN_FAILURES.md` lists every expected failure of the suite, and nothing else."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def marked(path: Path) -> tuple[set[str], int]:
    """Tests of a file with an xfail mark, and how often the file says `xfail` in all."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mentions = sum(isinstance(node, ast.Attribute) and node.attr == "xfail" for node in ast.walk(tree))
    found, counted = set(), 0
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.ClassDef):
            inside = [node for each in function.decorator_list for node in ast.walk(each)]
            count = sum(isinstance(node, ast.Attribute) and node.attr == "xfail" for node in inside)
            counted += count
            if count:
                found.add(f"{path.relative_to(ROOT).as_posix()}::{function.name}")
    assert counted == mentions, f"{path.name}: an expected failure is a decorator of its test, so that it can be listed"
    return found, mentions


def test_the_list_and_the_marks_name_the_same_tests():
    """A mark without a line, a line without a mark, and a line for a test that is gone are all errors."""
    suite = set().union(*(marked(path)[0] for path in sorted(Path(__file__).parent.rglob("test_*.py"))))
    text = (ROOT / "KNOWN_FAILURES.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)) == suite


def test_an_expected_failure_is_strict():
    """A test that was expected to fail and passes fails the suite."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["tool"]["pytest"]["ini_options"]["xfail_strict"] is True
    for path in Path(__file__).parent.rglob("test_*.py"):
        assert "strict=" + "False" not in path.read_text(encoding="utf-8")
