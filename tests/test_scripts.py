"""Options of `scripts/` that cannot work end in one line on stderr and exit code 2, as those of `treetop` do."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def script(monkeypatch, name: str):
    monkeypatch.syspath_prepend(SCRIPTS)  # some import others
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("soak", ["engine", "--rounds", "-3"], ["--rounds must", "-3"]),
        ("soak", ["engine", "--rounds", "many"], ["--rounds", "many"]),
        ("soak", ["engine", "--sample", "-1"], ["--sample must", "-1"]),
        ("soak", ["engine", "--context-length", "4"], ["--context-length must", "4"]),
        ("soak", ["engine", "--context-length", "4096"], ["--context-length 4096", "2048"]),
        ("soak", ["engine", "--attention-backend", "bogus"], ["--attention-backend", "bogus"]),
        ("soak", ["engine", "--attention-backend", "fa3"], ["--attention-backend fa3", "CUDA device"]),
        ("soak", ["engine", "--device", "bogus"], ["--device", "bogus"]),
        ("soak", ["engine", "--graphs", "bogus"], ["--graphs", "bogus"]),
        ("soak", ["engine", "--page-size", "3"], ["--page-size", "3"]),
        ("soak", ["engine", "--check-level", "9"], ["--check-level", "9"]),
        ("soak", ["engine", "--speculative-draft-model-path", "x"], ["--speculative-draft-model-path"]),
        ("soak", ["kills", "--seconds", "0"], ["--seconds must", "0"]),
        ("soak", ["kills", "--every", "nan"], ["--every must", "nan"]),
        ("soak", ["kills", "--ranks", "1"], ["--ranks must", "1"]),
        ("soak", ["kills", "--clients", "0"], ["--clients must", "0"]),
        ("soak", ["kills", "--sample", "-1"], ["--sample must", "-1"]),
        ("soak", ["kills", "--kind", "dp"], ["--kind", "dp"]),
        ("soak", ["kills", "--tiny", "bogus"], ["--tiny", "bogus"]),
        ("soak", ["kills", "--speculative", "3,2"], ["--speculative must", "3,2"]),
        ("soak", ["kills", "--page-size", "3"], ["--page-size", "3"]),
        ("soak", ["kills", "--model", "/nowhere"], ["/nowhere"]),
        ("soak", ["roles", "--ranks", "1"], ["--ranks must", "1"]),
        ("soak", ["roles", "--seconds", "nan"], ["--seconds must", "nan"]),
        ("soak", ["all"], ["all", "engine"]),
        ("sanitize", ["--jobs", "0"], ["--jobs must", "0"]),
        ("sanitize", ["--limit-s", "-1"], ["--limit-s", "-1"]),
        ("sanitize", ["--only", "racecheck"], ["--only racecheck", "eager, memcheck"]),
        ("sanitize", ["--logs", __file__], ["--logs", __file__]),
        ("check_kernels", ["--cards", "sm_90,h100"], ["--cards h100", "sm_90"]),
        ("check_kernels", ["--jobs", "0"], ["--jobs must", "0"]),
        ("mutants", ["--count", "-1"], ["--count must", "-1"]),
        ("mutants", ["--limit-s", "0"], ["--limit-s must", "0"]),
        ("mutants", ["--only", "nowhere.py"], ["--only", "nowhere.py", "speculative/draft.py"]),
        ("mutants", ["--json", "/nowhere/x.json"], ["--json /nowhere/x.json"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_an_option_that_cannot_work_is_one_line(monkeypatch, capsys, name, options, parts):
    """Exit code 2, nothing on stdout, and the option in the line."""
    module = script(monkeypatch, name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    try:
        code = module.main()
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"{name}: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_the_groups_of_the_mutation_run_name_files_that_exist(monkeypatch):
    groups = script(monkeypatch, "mutants").GROUPS.values()
    source, tests = SCRIPTS.parent / "src" / "treetop", SCRIPTS.parent / "tests"
    assert not [file for group in groups for file in group.files if not (source / file).is_file()]
    assert not [file for group in groups for file in group.tests if not (tests / file).is_file()]


def test_the_site_takes_what_pages_link_to_and_refuses_what_is_not_there(monkeypatch, tmp_path):
    """Also beyond `docs/`; what stands in code is no link."""
    site = script(monkeypatch, "docs_site")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    for name in (*site.FIRST, "docs/a.md", "more/b.md", "more/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "docs/a.md").write_text(
        "[b](../more/b.md#top) [w](https://x/y.md) `[n](no.md)`\n```\n[n](no.md)\n```\n"
    )
    (tmp_path / "more/b.md").write_text("[c](c.py)")
    assert {*map(str, (each.relative_to(tmp_path) for each in site.files()))} == {
        *site.FIRST,
        "docs/a.md",
        "more/b.md",
        "more/c.py",
    }
    (tmp_path / "more/b.md").write_text("[c](d.py) [out](../../x)")
    with pytest.raises(SystemExit, match=r"x is not there\n.*d\.py is not there"):
        site.files()
