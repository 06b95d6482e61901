"""`examples/on_policy.py`: with `bits` every token's probability is the trainer's."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import treetop

SCRIPT = Path(__file__).parents[1] / "examples/on_policy.py"


def test_the_sampler_draws_by_trees_on_every_device(monkeypatch):
    """The default on a GPU may choose plain rounds."""
    llm = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(treetop, "LLM", llm)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert llm.call_args.kwargs["speculative_policy"] == "fixed"


@pytest.mark.slow
def test_ratios_are_one_under_bits_and_the_next_weights_are_those_of_both():
    asked = [sys.executable, str(SCRIPT), "--device", "cpu", "--max-tokens", "12"]
    out = subprocess.run(asked, env=os.environ, capture_output=True, text=True, check=True).stdout
    said = re.findall(r"exactness (\w+), .* step (\d): (\d+) tokens, .* (\d+) ratios other than 1, farthest (\S+)", out)
    assert [(exactness, step) for exactness, step, *_ in said] == [
        (exactness, step) for exactness in ("bits", "ties") for step in "01"
    ]
    for exactness, _, tokens, other, farthest in said:
        assert int(tokens) > 40
        if exactness == "bits":
            assert (other, farthest) == ("0", "1.0")
        else:
            assert abs(float(farthest) - 1) < 1e-3
