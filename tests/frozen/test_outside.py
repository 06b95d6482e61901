"""The suite stays outside: it knows the public package and the command line, and shares nothing with other tests."""

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = {"pytest", "torch", "safetensors", "tokenizers", "treetop", "frozen"}


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            names.add(node.module)
    return names


def test_the_suite_imports_the_public_package_alone():
    """No module below `treetop`, no helper of the other tests, and only public names."""
    public = set()
    for path in FOLDER.glob("*.py"):
        for name in imported(path):
            top = name.split(".")[0]
            assert top in LIBRARIES or top in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert top != "treetop" or name == "treetop", f"{path.name} imports {name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "treetop":
                public |= {alias.name for alias in node.names}
    assert public == {"LLM", "SamplingParams"}


def test_the_suite_asks_an_engine_for_nothing_but_outputs():
    """`scheduler`, `engine` and their like are attributes that may go."""
    inside = {"scheduler", "engine", "launcher", "device", "config"}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "llm":
                assert node.attr not in inside, f"{path.name}:{node.lineno} reads llm.{node.attr}"


def test_golden_files_are_small():
    """Under 300 kB together."""
    assert sum(path.stat().st_size for path in (FOLDER / "golden").iterdir()) < 300_000
