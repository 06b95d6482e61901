"""One name of the distribution: what users are told to install is what this project publishes."""

import re
import tomllib
from pathlib import Path

from treetop.version import DISTRIBUTION

ROOT = Path(__file__).parent.parent
FOREIGN = re.compile(r"(?<![\w.])treetop\[[a-z]|pip install\s+[\"']?treetop(?![\w.-])")
"""An extra, or an installation, of `treetop`, which is somebody else's package."""


def test_the_project_and_its_extras_have_the_name_of_the_constant():
    """pyproject's name, its references to its own extras, and what the distribution of faults needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    needs = [need for extra in project["optional-dependencies"].values() for need in extra]
    assert f"{DISTRIBUTION}[serve]" in needs
    debug = tomllib.loads((ROOT / "src/treetop_debug/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [need.split("==")[0] for need in debug["dependencies"]] == [DISTRIBUTION]


def test_nobody_is_told_to_install_another_package():
    """Pages, sources, scripts and tests; the changelog's past releases say what was so."""
    pages = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    code = [path for folder in ("src", "scripts", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in (*pages, *code) if FOREIGN.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in found if path.name != "CHANGELOG.md"] == []
