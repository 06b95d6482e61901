"""Where tests stand: folders mirror the packages of `src`, what several files share is in `support`, and no test file
imports another.
"""

import ast
import itertools
import os
import shutil
import subprocess
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import treetop
from treetop.drafts.registry import DRAFTERS
from treetop.models.registry import FAMILIES

TESTS = Path(__file__).parent
ROOMS = {path.name for path in Path(treetop.__file__).parent.iterdir() if path.is_dir()}
OTHERS = {"gpu", "frozen", "checkpoints", "support"}
"""Folders without a package: what needs a GPU, what is recorded from outside, trained weights, and what is shared."""


@cache
def imported(path: Path) -> set[str]:
    """Modules that a file names in an import, wherever in it, source within strings included."""
    found = set()
    sources = [path.read_text(encoding="utf-8")]
    while sources:
        try:
            nodes = [*ast.walk(ast.parse(sources.pop()))]
        except SyntaxError:  # a string that is no Python
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
                sources.append(node.value)
    return found


def importing_a_test(path: Path) -> set[str]:
    return {name for name in imported(path) if any(part.startswith("test_") for part in name.split("."))}


def test_no_test_is_imported():
    """What two test files need stands in `tests/support/`."""
    found = {path.relative_to(TESTS).as_posix(): importing_a_test(path) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


ASKS = {"Client", "AsyncClient", "request", "stream", "get", "head", "options", "post", "put", "patch", "delete"}


def impatient(path: Path) -> list[int]:
    """Lines in which httpx is asked for a client or an answer without a `timeout`: it has one of five seconds."""
    source = path.read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)] if "httpx." in source else []
    found = []
    for call in calls:
        module, _, name = ast.unparse(call.func).rpartition(".")
        if module == "httpx" and name in ASKS and not any(each.arg in ("timeout", None) for each in call.keywords):
            found.append(call.lineno)
    return found


def test_no_client_gives_up_while_a_machine_stands_still():
    """In five seconds a busy machine may answer nothing."""
    found = {path.relative_to(TESTS).as_posix(): impatient(path) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_folder_is_a_room_of_the_source():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert folders - OTHERS <= ROOMS


def test_support_holds_no_test_and_every_file_beside_it_is_one():
    """A helper beside the tests would be found by them only as long as they stand in its folder."""
    assert not [*(TESTS / "support").rglob("test_*.py")]
    beside = [path for folder in (ROOMS - OTHERS | {"gpu", "."}) for path in (TESTS / folder).glob("*.py")]
    assert {path.name for path in beside if not path.name.startswith("test_")} == {"conftest.py"}


def test_names_of_files_are_unique():
    """Docs name a test by its file alone."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py") if path.parent.name != "frozen")
    assert [name for name, count in names.items() if count > 1] == []


def test_an_import_of_a_test_is_found(tmp_path):
    path = tmp_path / "test_this.py"
    test = "test_that"  # a name that no import here has
    path.write_text(f"import os\nCODE = '''\nfrom {test} import x\n'''\ndef f():\n    from gpu import {test}\n")
    assert importing_a_test(path) == {"test_that", "test_that.x", "gpu.test_that"}


def test_no_contract_of_imports_lets_others_know_a_family():
    """`make check` forbids both rooms whole but for files by name; what reads one family's config is none of these."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (rule,) = (each for each in contracts if "treetop.models" in each.get("forbidden_modules", ()))
    known = {each.partition(" -> ")[2] for each in rule["ignore_imports"]}
    readers = [*(family.read for family in FAMILIES.values()), *DRAFTERS.values()]
    assert not {reader.__module__ for reader in readers} & known
    assert "treetop.models.registry" in known


# ------------------------------------------------------------------------------------------------ what `make` runs


def sessions_of(target: str, folder: Path, failing: str) -> tuple[list[tuple[bool, str, bool]], int]:
    """What `make` starts in place of pytest: (whether it interprets, expression of marks, whether it looks at every
    folder); and the exit code of make where a session whose TRITON_INTERPRET is `failing` fails.
    """
    python, log = folder / "python", folder / "log"
    python.write_text(
        f'#!/bin/sh\necho "$TRITON_INTERPRET|$*" >>{log}\necho "said by $TRITON_INTERPRET"\n'
        f'[ "$TRITON_INTERPRET" != "{failing}" ]\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own_log = folder / "interpreted.log"  # that of the session which runs this test is still written to
    command = ["make", "-s", target, f"BIN={folder}", "DEV=", f"INTERPRETED_LOG={own_log}"]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, check=False, capture_output=True, text=True)
    assert own_log.read_text(encoding="utf-8") == "said by 1\n"
    assert done.stdout.splitlines() == ["said by ", "said by 1"], "what the interpreted session says comes last"
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        interprets, _, rest = line.partition("|")
        options, _, marks = rest.removeprefix("-m pytest ").partition(" -m ")
        folders = {word for word in options.split() if word.startswith("tests")}
        assert folders <= {"tests/kernels"}
        found.append((interprets == "1", marks, not folders))
    return found, done.returncode


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("target", "with_slow"), [("test", False), ("test-all", True)])
def test_each_test_is_run_by_one_session_and_a_failure_of_either_fails_the_whole(tmp_path, target, with_slow):
    """By its marks; what is marked `interpreted` by the one that interprets, which looks at its folder alone."""
    codes = []
    for place, failing in enumerate(("neither", "1", "")):
        (tmp_path / str(place)).mkdir()
        found, code = sessions_of(target, tmp_path / str(place), failing)
        codes.append(code != 0)
        assert [every for interprets, _, every in found if not interprets] == [True]
        for slow, interpreted in itertools.product((False, True), repeat=2):
            marks = {"slow": slow, "interpreted": interpreted}
            chosen = [interprets for interprets, expression, _ in found if eval(expression, {}, marks)]
            assert chosen == ([interpreted] if with_slow or not slow else []), marks
    assert codes == [False, True, True]


def test_what_is_marked_interpreted_stands_where_that_session_looks():
    names = {"support.interpreted.interpreted", "support.interpreted.on_gpu_or_interpreted"}
    files = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    marked = [path for path in files if imported(path) & names or "mark.interpreted" in path.read_text("utf-8")]
    assert {path.parent for path in marked} == {TESTS / "kernels"}


def conditional_tests(source: str) -> list[str]:
    """Names of tests that a file defines only if something holds."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    others = (node for node in ast.parse(source).body if not isinstance(node, definitions))
    inner = (each for node in others for each in ast.walk(node) if isinstance(each, definitions))
    return [each.name for each in inner if each.name.lower().startswith("test")]


def test_a_test_that_cannot_run_is_skipped_not_left_undefined():
    """So that it has a reason, and is counted."""
    found = {path.name: conditional_tests(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")}
    assert {name: tests for name, tests in found.items() if tests} == {}
    assert conditional_tests("if True:\n    def test_this(): ...\n") == ["test_this"]


MOST = 30
"""Files in a folder of the source: more, and nobody sees what is there."""


def test_no_folder_of_the_source_is_crowded():
    source = Path(treetop.__file__).parent
    folders = [source, *(path for path in source.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    crowded = {folder.relative_to(source).as_posix(): len([*folder.glob("*.py")]) for folder in folders}
    assert {folder: count for folder, count in crowded.items() if count > MOST} == {}
