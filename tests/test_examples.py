"""Examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.grids import few_of

ROOT = Path(__file__).parent.parent
SAY = {
    "serve_and_stream.py": "",
    "schema_along_trees.py": "rounds of the target",
    "new_family.py": "no draft: 47 rounds",
}
"""What must be in their output. `on_policy.py` takes minutes, for it trains: it is run by hand, docs/exactness.md."""


@pytest.mark.parametrize("name", few_of(SAY, 0))
def test_an_example_runs_as_it_says(name):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, f"examples/{name}"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(ran.stdout.split()) > 3
    assert SAY[name] in ran.stdout


@pytest.mark.slow
def test_trees_serve_the_rollouts_of_what_is_trained_meanwhile():
    """Policy and head go to the engine after each step, and its log-probabilities are the policy's each time."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "examples/policy_gradient.py", "--steps=2", "--group=2", "--max-tokens=8"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    steps = [line for line in ran.stdout.splitlines() if line.startswith("step ")]
    assert [line.partition("weights ")[2].partition(",")[0] for line in steps] == ["{0}", "{1}"]
    assert all(float(line.split("ratio ")[1].split()[0]) < 1e-3 for line in steps)
