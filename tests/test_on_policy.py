"""`examples/on_policy.py`: with `bits` every token's probability is the trainer's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ratios_are_one_under_bits_and_the_next_weights_are_those_of_both():
    script = Path(__file__).parents[1] / "examples/on_policy.py"
    asked = [sys.executable, str(script), "--device", "cpu", "--max-tokens", "12"]
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
