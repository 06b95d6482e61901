"""Runs a test file in Triton's interpreter: Triton decides at import, so that takes a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""


def require_interpreted_pass(file: str, *options: str) -> None:
    """Start pytest on `file` with TRITON_INTERPRET=1 and options; fail with its output if it fails."""
    pytest.importorskip("triton", reason="Triton is not installed; its interpreter runs on any CPU")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
