"""The corpus: the source of the running Python's standard library, split by a hash of the path.

`python recipes/nestling/corpus.py` writes prompts.jsonl: function prefixes of the held-out files.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import PROMPTS

TEST_FOLDERS = {"test", "tests", "idle_test"}
TABLE_FOLDERS = {"encodings", "pydoc_data"}
SKIPPED_FOLDERS = {"site-packages", "__pycache__"}
SKIPPED_PREFIX = "_sysconfigdata"  # generated when Python is built: it describes one machine
HELDOUT_PER_MILLE = 30

CONTEXT_LINES = (4, 24)
PROMPT_CHARACTERS = (260, 1150)
PROMPTS_PER_FILE = 12
MIN_BODY_LINES = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One source file. group: library, tests, tables or heldout; path is relative, with forward slashes."""

    path: str
    group: str
    text: str


def digest(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def group_of(path: Path) -> str:
    """The group of a file, given its path relative to the standard library."""
    folders = set(path.parts[:-1])
    if folders & TEST_FOLDERS:
        return "tests"
    if folders & TABLE_FOLDERS:
        return "tables"
    return "heldout" if digest(path.as_posix()) % 1000 < HELDOUT_PER_MILLE else "library"


def collect(stdlib: Path) -> list[Document]:
    """Every readable, non-empty source file of the standard library, sorted by path."""
    documents = []
    for file in sorted(stdlib.rglob("*.py")):
        path = file.relative_to(stdlib)
        if set(path.parts) & SKIPPED_FOLDERS or path.name.startswith(SKIPPED_PREFIX):
            continue
        try:
            with tokenize.open(file) as source:  # honours the file's own encoding declaration
                text = source.read()
        except (SyntaxError, UnicodeDecodeError):  # broken on purpose, for the tests of the parser
            continue
        if text.strip():
            documents.append(Document(path.as_posix(), group_of(path), text))
    return documents


def functions(text: str) -> Iterator[tuple[int, int]]:
    """For each function long enough to be worth completing: (line of its def, last line of the prompt), from 1.

    The prompt ends after the docstring, or after the first statement where there is none.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.body[0].end_lineno
            if node.end_lineno - last >= MIN_BODY_LINES:
                yield node.lineno, last


def prefix(lines: list[str], first: int, last: int, name: str) -> str | None:
    """The prompt that ends at line `last`, with some lines before the def, or None if its size does not fit."""
    low, high = CONTEXT_LINES
    context = low + digest(f"{name}:{first}") % (high - low + 1)
    start = max(0, first - 1 - context)
    while start < first and sum(map(len, lines[start:last])) > PROMPT_CHARACTERS[1]:
        start += 1
    text = "".join(lines[start:last]).strip("\n")
    return text if PROMPT_CHARACTERS[0] <= len(text) <= PROMPT_CHARACTERS[1] else None


def prompts(documents: list[Document], count: int) -> list[dict[str, str]]:
    """Function prefixes of the held-out documents, at most PROMPTS_PER_FILE a file, chosen by hash."""
    candidates = []
    for document in documents:
        if document.group != "heldout":
            continue
        lines = document.text.splitlines(keepends=True)
        found = [(first, prefix(lines, first, last, document.path)) for first, last in functions(document.text)]
        found = [(first, text) for first, text in found if text is not None]
        found.sort(key=lambda item: digest(f"{document.path}#{item[0]}"))
        candidates += [(digest(text), document.path, text) for _, text in found[:PROMPTS_PER_FILE]]
    chosen = sorted(sorted(candidates)[:count], key=lambda item: (item[1], item[0]))
    return [{"file": path, "prompt": text} for _, path, text in chosen]


def main() -> None:
    """Write prompts.jsonl and print what the corpus holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--count", type=int, default=64, help="prompts to write")
    parser.add_argument("--out", type=Path, default=PROMPTS)
    args = parser.parse_args()

    documents = collect(args.stdlib)
    for group in ("library", "tests", "tables", "heldout"):
        sizes = [len(document.text) for document in documents if document.group == group]
        print(f"{group:8} {len(sizes):5} files {sum(sizes):9} characters")
    chosen = prompts(documents, args.count)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in chosen), encoding="utf-8")
    print(f"{len(chosen)} prompts, {args.out.stat().st_size} bytes, from {len({p['file'] for p in chosen})} files")


if __name__ == "__main__":
    main()
