"""The site of docs/: its pages and all that they link to, where they stand in the repository, built strictly.

    python scripts/docs_site.py [--serve]

A copy is made in build/site-source, for pages link to files outside of docs/, too. A link to what is not there, or to a
heading that no page has, is an error. The site is build/site. Needs mkdocs-material (`make docs`).
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "KNOWN_FAILURES.md")
WIDE = ("docs/options.md", "docs/operations.md")
"""Pages whose tables have the room of the table of contents, too."""
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`[^`\n]*`")


def links(page: Path) -> Iterator[str]:
    """Relative ones, without their headings."""
    text = _SPAN.sub("", _CODE.sub("", page.read_text(encoding="utf-8")))
    yield from (found.group(1) for found in _LINK.finditer(text))


def files() -> set[Path]:
    """Pages, pictures, and all that a page links to. Raises SystemExit for dead links."""
    found, dead = set[Path](), list[str]()
    ahead = [ROOT / name for name in FIRST] + [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found.add(path)
        for link in links(path) if path.suffix == ".md" else ():
            target = (path.parent / link).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                dead.append(f"{path.relative_to(ROOT)}: {link} is not there")
            elif target.is_file():
                ahead.append(target)
    if dead:
        raise SystemExit("\n".join(sorted(dead)))
    return found


def main(arguments: list[str]) -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in files():
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name in WIDE:
        page = SOURCE / name
        page.write_text("---\nhide: [toc]\n---\n" + page.read_text(encoding="utf-8"), encoding="utf-8")
    what = ["serve"] if "--serve" in arguments else ["build", "--strict", "--quiet"]
    return subprocess.run([sys.executable, "-m", "mkdocs", *what], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
