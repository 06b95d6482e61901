"""Passages of texts with free licences, from which prompts are made: build/smollm2/passages.jsonl.

| source | what | licence |
|---|---|---|
| docs | the documentation of Python 3.11 (Debian's `python3.11-doc`) | PSF licence |
| docstring | docstrings of the standard library | PSF licence |
| code | functions of the standard library | PSF licence |
| man | manual pages (Debian's `manpages`, `manpages-dev` and what the machine has) | GPL, BSD, MIT and the like |
| bible | the King James Bible (Debian's `bible-kjv`), as a public-domain book | public domain |

    apt-get install --no-install-recommends python3.11-doc manpages manpages-dev bible-kjv man-db
    python recipes/smollm2/texts.py

No GPU, two minutes on a core. A passage is a run of paragraphs of 40 to 220 words; 8 % of them are held out, by a hash.
"""

import argparse
import ast
import gzip
import hashlib
import json
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BUILD = Path("build/smollm2")
DOCS = Path("/usr/share/doc/python3.11/html/_sources")
PAGES = Path("/usr/share/man")
SHORTEST, LONGEST = 40, 220  # words of a passage


def held_out(name: str) -> bool:
    """Whether what has this name is kept from training: one in twelve, by a hash."""
    return hashlib.sha256(name.encode()).digest()[0] % 12 == 0


def passages(text: str) -> Iterator[str]:
    """Runs of whole paragraphs of SHORTEST to LONGEST words."""
    run: list[str] = []
    for paragraph in (part.strip("\n") for part in re.split(r"\n\s*\n", text)):
        words = len(paragraph.split())
        if run and sum(len(p.split()) for p in run) + words > LONGEST:
            yield "\n\n".join(run)
            run = []
        if 3 <= words <= LONGEST:
            run.append(paragraph)
    if run:
        yield "\n\n".join(run)


def plain_rst(text: str) -> str:
    """reStructuredText without its roles and directives, roughly."""
    text = re.sub(r"(?m)^\s*\.\. .*$", "", text)
    text = re.sub(r":[a-z:]+:`~?!?([^`<]+)(?: <[^`]*>)?`", r"\1", text)
    return re.sub(r"(?m)^[=\-*~^#\"+]{3,}$", "", text.replace("``", "`"))


def docs() -> Iterator[tuple[str, str]]:
    """(name, passage) of Python's documentation."""
    for file in sorted(DOCS.rglob("*.rst.txt")):
        for number, passage in enumerate(passages(plain_rst(file.read_text(encoding="utf-8")))):
            yield f"{file.relative_to(DOCS)}#{number}", passage


def library() -> Iterator[tuple[str, str, str]]:
    """(source, name, text) of functions and docstrings of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        where = file.relative_to(root)
        if {"test", "tests", "site-packages", "idle_test", "lib2to3"} & set(where.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node)
                name = f"{where}:{getattr(node, 'name', '')}"
                if doc and SHORTEST <= len(doc.split()) <= LONGEST:
                    yield "docstring", name, doc
            if isinstance(node, ast.FunctionDef):
                code = ast.get_source_segment(source, node) or ""
                if 5 <= code.count("\n") <= 30 and len(code) < 1500:
                    yield "code", f"{where}:{node.name}", code


def manuals(most: int) -> Iterator[tuple[str, str]]:
    """(name, passage) of manual pages: sections 1, 2, 3, 5, 7 and 8, at most so many pages."""
    pages = [page for section in "123578" for page in sorted((PAGES / f"man{section}").glob("*.gz"))]
    random.Random(1).shuffle(pages)
    for page in pages[:most]:
        raw = gzip.decompress(page.read_bytes())
        if raw.startswith(b".so "):
            continue
        # groff lays the page out; col takes its overstrikes away.
        laid = subprocess.run(
            "groff -mandoc -Tascii -P-c 2>/dev/null | col -bx", shell=True, input=raw, capture_output=True, check=False
        ).stdout.decode("utf-8", "replace")
        for number, passage in enumerate(passages(re.sub(r"(?m)^ {1,12}", "", laid))):
            yield f"{page.name}#{number}", passage


def bible() -> Iterator[tuple[str, str]]:
    """(name, passage) of the King James Bible: eight verses each."""
    lines = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    verses = [line.split(" ", 1) for line in lines.splitlines() if " " in line]
    for start in range(0, len(verses) - 8, 8):
        yield verses[start][0], " ".join(text for _, text in verses[start : start + 8])


def main() -> None:
    """Write the passages, each once, in random order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=900, help="manual pages")
    args = parser.parse_args()
    found = [("docs", *each) for each in docs()] + list(library())
    found += [("man", *each) for each in manuals(args.pages)] + [("bible", *each) for each in bible()]
    unique = {text: (source, name) for source, name, text in found if len(text.split()) >= 12}
    rows = [
        {"source": source, "name": name, "text": text, "held_out": held_out(f"{source}:{name.split('#')[0]}")}
        for text, (source, name) in unique.items()
    ]
    random.Random(0).shuffle(rows)
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "passages.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for source in ("docs", "docstring", "code", "man", "bible"):
        some = [row for row in rows if row["source"] == source]
        print(f"{source}: {len(some)} passages, {sum(row['held_out'] for row in some)} held out")


if __name__ == "__main__":
    main()
