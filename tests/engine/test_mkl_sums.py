"""MKL's mode for `--exactness bits`: chosen in time in a fresh process, and named where it is too late."""

import os
import subprocess
import sys

import pytest

from treetop.engine import mkl_sums

SCRIPT = """
import torch
from treetop import LLM
{before}
LLM("builtin:nestling", exactness="bits", dtype="float32", device="cpu", context_length=64).close()
"""


@pytest.mark.skipif(mkl_sums.choose_mode() is None, reason="MKL needs no mode on this CPU")
@pytest.mark.parametrize(("before", "code"), [("", 0), ("torch.randn(40, 40) @ torch.randn(40, 40)", 1)])
def test_the_mode_is_chosen_before_the_first_product_or_named(before, code):
    env = {name: value for name, value in os.environ.items() if name != mkl_sums.VARIABLE}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (mkl_sums.VARIABLE in done.stderr) == bool(code)
