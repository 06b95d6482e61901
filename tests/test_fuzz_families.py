"""The fuzz of `scripts/fuzz_families.py`, short: families are equal under drawn configs, and it can tell."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from treetop.models.registry import FAMILIES


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "fuzz_families", Path(__file__).parent.parent / "scripts" / "fuzz_families.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(script, capsys, code, *argv):
    assert script.main([*argv]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_cases_are_equal_and_a_seed_repeats_one(script, capsys):
    """Each case's line says what was drawn; the summary says the seeds and how many were what."""
    first, second, summary = lines(script, capsys, 0, "--cases", "2", "--seed", "3", "--only", "qwen3", "--verbose")
    assert (first["outcome"], second["outcome"]) == ("equal", "equal")
    assert summary == {"first_seed": 3, "cases": 2, "equal": 2}
    again, _ = lines(script, capsys, 0, "--cases", "1", "--seed", "4", "--only", "qwen3", "--verbose")
    assert again == second


@pytest.mark.parametrize("seed", [2, 5])
def test_a_family_that_reads_a_key_otherwise_is_found(script, capsys, monkeypatch, seed):
    """Another epsilon in all norms, as if a key were overlooked: exit code 1, and a line with the seed."""
    family = FAMILIES["LlamaForCausalLM"]
    overlooks = replace(family, read=lambda config, where: family.read({**config, "rms_norm_eps": 0.05}, where))
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", overlooks)
    found, summary = lines(script, capsys, 1, "--cases", "1", "--seed", str(seed), "--only", "llama 3")
    assert (found["seed"], found["family"]) == (seed, "llama 3")
    assert found["outcome"].startswith("logits of prompt 0")
    assert summary["different"] == 1


@pytest.mark.parametrize("argv", [("--minutes", "0"), ("--cases", "0"), ("--only", "no such family")])
def test_what_cannot_work_is_refused(script, capsys, argv):
    assert script.main([*argv]) == 2
    assert argv[0] in capsys.readouterr().err
