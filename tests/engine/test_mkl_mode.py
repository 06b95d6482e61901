"""MKL's mode for `--exactness bits`: chosen in time in a fresh process, and named where it is too late."""

import os
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest

from support.grids import few_of
from treetop.exact import mkl_mode

SCRIPT = """
import torch
from treetop import LLM
{before}
LLM("builtin:nestling", exactness="bits", dtype="float32", device="cpu", context_length=64).close()
"""


@pytest.mark.slow
@pytest.mark.skipif(mkl_mode.choose_mode() is None, reason="MKL needs no mode on this CPU")
@pytest.mark.parametrize(("before", "code"), few_of([("", 0), ("torch.randn(40, 40) @ torch.randn(40, 40)", 1)], 0))
def test_the_mode_is_chosen_before_the_first_product_or_named(before, code):
    env = {name: value for name, value in os.environ.items() if name != mkl_mode.VARIABLE}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (mkl_mode.VARIABLE in done.stderr) == bool(code)


LATE, IN_FORCE = 1, 0x10002
"""What MKL answers of its mode: none was chosen in time, or the one that is asked for."""


@pytest.mark.parametrize(("given", "answer", "helps"), [
    (None, LATE, True), (None, IN_FORCE, False), ("AVX2", LATE, True), (mkl_mode.MODE, IN_FORCE, False),
])  # fmt: skip
def test_a_mode_that_is_in_force_is_not_advised(monkeypatch, given, answer, helps):
    """Where a probe fails in the very mode, a message that advises it would send its reader in a circle."""
    for each in (mkl_mode.choose_mode, mkl_mode._given):
        monkeypatch.setattr(mkl_mode, each.__name__, cache(each.__wrapped__))
    monkeypatch.setattr(mkl_mode, "_is_intel", lambda: True)
    monkeypatch.setattr(mkl_mode.torch.backends.mkl, "is_available", lambda: True)
    library = SimpleNamespace(mkl_serv_cbwr_set=lambda mode: 0, mkl_serv_cbwr_get=lambda which: answer)
    monkeypatch.setattr(mkl_mode.ctypes, "CDLL", lambda path: library)
    monkeypatch.setenv(mkl_mode.VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(mkl_mode.VARIABLE)
    assert mkl_mode.choose_mode() == f"sums of MKL by {mkl_mode.VARIABLE}={given or mkl_mode.MODE}"
    assert (mkl_mode.remedy() is not None) == helps
    assert mkl_mode.os.environ[mkl_mode.VARIABLE] == (given or mkl_mode.MODE)
