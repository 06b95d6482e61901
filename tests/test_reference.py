"""The generated pages of docs/ are what `python scripts/reference.py` writes."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import reference  # noqa: E402

API = "".join(file.read_text(encoding="utf-8") for file in sorted(reference.API.rglob("*.py")))


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_what_the_script_writes(name):
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), f"docs/{name}: run python scripts/reference.py"


def test_every_code_of_an_error_is_told():
    """Those that the API's sources give, and no others."""
    usual = {code for _, code in reference.KINDS.values()}
    assert reference.codes_in_use() - usual <= set(reference.CODES)
    assert [code for code in reference.CODES if f'"{code}"' not in API and not code.endswith("_not_found")] == []


def test_a_route_without_words_is_refused():
    with pytest.raises(SystemExit, match="GET /x: its function needs a docstring"):
        reference._words({}, "get", "/x")
