"""`KNOWN_FAILURES.md` lists every expected failure of the suite, what has not run for long, and nothing else."""

import ast
import importlib.util
import re
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import get_args

import pytest

from treetop.types.config import Backend

ROOT = Path(__file__).parent.parent
NOT_RUN = "## Did not run"


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


def pages() -> tuple[str, str]:
    """Two parts of the list: what fails, and what did not run."""
    fails, _, rest = (ROOT / "KNOWN_FAILURES.md").read_text(encoding="utf-8").partition(NOT_RUN)
    return fails, rest.partition("\n## ")[0]


def rows_of(text: str) -> list[list[str]]:
    """Cells of a page's tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def files_that_try(name: str) -> set[str]:
    """Files of `tests/gpu/` in which something is called by this name."""
    found = set()
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.Constant) and node.value == name for node in nodes):
            found.add(path.relative_to(ROOT).as_posix())
    return found


def test_the_list_and_the_marks_name_the_same_tests():
    """A mark without a line, a line without a mark, and a line for a test that is gone are all errors."""
    suite = set().union(*(marked(path)[0] for path in sorted(Path(__file__).parent.rglob("test_*.py"))))
    expected, _ = pages()
    assert set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", expected)) == suite


def test_an_expected_failure_is_strict():
    """A test that was expected to fail and passes fails the suite."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["tool"]["pytest"]["ini_options"]["xfail_strict"] is True
    for path in Path(__file__).parent.rglob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "xfail":
                assert all(keyword.arg != "strict" for keyword in call.keywords), path.name


def test_what_did_not_run_is_listed_with_its_tests_and_a_date():
    """All files that try it, since when it has not run, and what is in the way. What has no test has never run."""
    rows = rows_of(pages()[1])
    assert rows
    for what, tests, last, why, mend in rows:
        files = set(re.findall(r"`(tests/[\w/]+\.py)`", tests))
        if files:
            assert files == files_that_try(what.strip("`")), what
            assert date.fromisoformat(last) < date.today(), what
        else:
            assert (tests, last) == ("none", "never"), what
        assert why, what
        assert mend, what


def test_backends_that_did_not_run_are_listed_until_they_do():
    """`benchmarks/backends.py` writes which of them ran, on a machine with as many libraries as it had."""
    page = (ROOT / "KNOWN_FAILURES.md").read_text(encoding="utf-8")
    written = rows_of(page.partition("<!-- written by")[2].partition("<!-- until here")[0])
    assert {"triton", "fa4"} <= {name for name, *_ in written} <= {*get_args(Backend)}
    absent = {name for name, *cells in written if set(cells) == {"not run"}}
    listed = {what.strip("`") for what, *_ in rows_of(pages()[1])}
    assert listed & {*get_args(Backend)} == absent


@pytest.mark.parametrize("missing", ["compressed_tensors", "loguru"])
@pytest.mark.parametrize("file", ["test_gpu_packed.py", "test_gpu_fp8_activations.py"])
def test_where_a_library_is_missing_tests_skip_by_its_name(file, missing, monkeypatch):
    """The file is collected: what needs no library runs. `compressed-tensors` itself needs loguru."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("compressed_tensors", missing) or name == "support.quantized":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    spec = importlib.util.spec_from_file_location("collected", ROOT / "tests" / "gpu" / file)
    collected = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(collected)
    skipped = []
    for make in collected.FORMATS.values():
        try:
            make()
        except pytest.skip.Exception as skip:
            skipped.append(str(skip))
    assert len(skipped) == len(collected.FORMATS) - 1, "blocks of FP8 are written without a library"
    assert all(missing in each for each in skipped)
