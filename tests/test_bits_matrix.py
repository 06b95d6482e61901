"""The long matrix of `--exactness bits` in `scripts/bits_matrix.py`, short: nothing differs, and it can tell."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SLICE = [
    "--shapes",
    "4,5,16",
    "--requests",
    "2",
    "--chunks",
    "16",
    "--lengths",
    "17",
    "63",
    "--tokens",
    "8",
    "--rows",
    "2",
]


@pytest.fixture(scope="module")
def matrix():
    place = Path(__file__).parent.parent / "scripts" / "bits_matrix.py"
    spec = importlib.util.spec_from_file_location("bits_matrix", place)
    made = sys.modules["bits_matrix"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def lines_of(matrix, capsys, *more):
    """The exit code, the cells' lines and the summary."""
    code = matrix.main([*SLICE, *more])
    *cells, summary = map(json.loads, capsys.readouterr().out.splitlines())
    return code, cells, summary


def test_cells_are_equal_to_plain_decoding_and_are_not_run_twice(matrix, capsys, tmp_path):
    """A tree in a batch, masks along trees, K/V in FP8, and loose sums, which differ; what is done counts, whatever it
    was.
    """
    code, cells, summary = lines_of(matrix, capsys, "--family", "dense", "--kinds", "constrained", "fp8", "ties")
    assert code == 0, cells
    assert [cell["kind"] for cell in cells] == ["grid", "constrained", "fp8", "ties"]
    assert summary["other_tokens"] == summary["other_logprobs"] == 0
    assert summary["tokens"] == 8 * (2 + 4 + 4)
    assert summary["accepted"] > 0
    done = tmp_path / "done.jsonl"

    def again(*lines):
        """The exit code, and what is told, where these are done and there is no time for others."""
        done.write_text("\n".join(map(json.dumps, lines)))
        given = ["--family", "dense", "--kinds", "constrained", "fp8", "ties", "--done", str(done), "--seconds", "0"]
        code, new, told = lines_of(matrix, capsys, *given)
        assert new == []
        return code, told

    code, told = again(*cells[1:])
    assert (code, told["left"], told["done"]["good"]) == (1, 1, 3), "nothing was compared"
    code, told = again(*cells)
    assert (code, told["done"]["good"], told["done"]["tokens"]) == (0, 4, summary["tokens"])
    code, told = again(*cells[1:], {**cells[0], "other_tokens": 1})
    assert (code, told["done"]["bad"], told["done"]["other_tokens"]) == (1, 1, 1)


def test_a_difference_a_failure_and_what_did_not_happen_are_told(matrix, capsys, monkeypatch):
    """Sums of `ties` in all engines but that of plain decoding; prompts too short for a retraction."""
    make = matrix.Runs.engine
    loose = {"exactness": "ties"}
    monkeypatch.setattr(
        matrix.Runs, "engine", lambda runs, shape, **own: make(runs, shape, **own, **(loose if shape else {}))
    )
    code, cells, summary = lines_of(matrix, capsys, "--family", "dense", "--kinds", "retraction")
    assert code == 1
    assert [cell["outcome"] for cell in cells] == ["compared", "failed"]
    assert cells[0]["other_logprobs"] > 0
    assert "retraction did not happen" in cells[1]["why"]
    assert summary["bad"] == 2


def test_the_first_cells_have_every_mechanism_then_every_shape_chunk_and_number_of_requests(matrix):
    """Of a turn over the shapes; parts are disjoint and whole."""
    parsed = {
        "family": ["dense"],
        "dtype": ["bfloat16"],
        "kinds": list(matrix.MECHANISMS),
        "graphs": ["auto"],
        "rows": 8,
    }
    asked = {**parsed, "shapes": matrix.SHAPES, "requests": matrix.REQUESTS, "chunks": matrix.CHUNKS}
    cells = list(matrix.cells(type("Args", (), asked)))
    grid = [cell for cell in cells if cell.kind == "grid"]
    assert len(set(cells)) == len(cells) == 20 * 4 * 4 + 4 * len(matrix.MECHANISMS)
    assert [cell.kind for cell in cells[: 4 + len(matrix.MECHANISMS)]] == ["grid"] * 4 + list(matrix.MECHANISMS)
    first = grid[: 20 * 4]
    assert {cell.shape for cell in first} == set(matrix.SHAPES)
    assert {(cell.chunk, cell.requests) for cell in first} == {(c, r) for c in matrix.CHUNKS for r in matrix.REQUESTS}
    for k, steps, nodes in matrix.SHAPES:
        assert nodes <= min(64, 1 + k + (steps - 1) * k * k)
        assert k > 1 or nodes == steps + 1
