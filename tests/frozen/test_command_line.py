"""What the command line says: exit codes, stdout and stderr, times and folders apart."""

import json

import pytest

from frozen import golden
from frozen.command_line import LINES, fault_table, transcripts


@pytest.fixture(scope="module")
def said(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen-lines")
    return transcripts(pairs, folder), folder


@pytest.mark.parametrize("name", [line.name for line in LINES])
def test_a_command_says_what_it_said(said, name):
    """Line for line; a help text is not among them, for options will grow."""
    assert said[0][name] == golden.load("command_line")[name]


def test_bad_input_is_one_line_without_a_traceback(said):
    """Exit code 2, nothing on stdout."""
    refused = {name: each for name, each in said[0].items() if each["exit"] == 2}
    assert len(refused) >= 12
    for each in refused.values():
        assert each["stdout"] == []
        assert len(each["stderr"]) == 1
        assert each["stderr"][0].startswith("treetop")


def test_json_lines_are_json(said):
    """Each line of stdout is an object with the documented keys."""
    lines = said[0]["json, sampled, stop strings"]["stdout"]
    assert len(lines) == 2
    for line in lines:
        parsed = json.loads(line.replace('"tokens_per_second": N', '"tokens_per_second": 1'))
        assert set(parsed) == {"text", "token_ids", "finish_reason", "usage", "metrics"}


def test_trace_writes_a_page(said):
    """An HTML page with the prompt in it."""
    page = (said[1] / "page.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "def f(" in page


@pytest.mark.slow  # each by itself: tests/debug/test_faults.py
def test_each_fault_is_caught_by_its_guard(doctor):
    """Fault, guard and level, as `treetop doctor --faults` prints them. There may be more faults than there were."""
    out, err = doctor.communicate(timeout=600)
    assert (doctor.returncode, err) == (0, ""), out
    of_one_rank = out.partition("\nfaults: ")[0]  # a table of those of several ranks follows
    found, known = fault_table(of_one_rank), golden.load("faults")["cpu"]
    assert [row for row in known if row not in found] == []
    assert f"faults: {len(found)} of {len(found)} caught on cpu" in out
