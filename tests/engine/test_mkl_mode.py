"""MKL's mode for `--exactness bits`: its own where probes pass, else the strict one in time, named where it is late."""

import os
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest

from treetop.engine.startup import mkl_probe
from treetop.exact import mkl_mode

SCRIPT = """
import torch
from treetop import LLM
{before}
LLM("builtin:nestling", exactness="bits", dtype="float32", device="cpu", context_length=64).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "code"), [("", 0), ("torch.randn(40, 40) @ torch.randn(40, 40)", 1)])
def test_the_strict_mode_is_chosen_before_the_first_product_or_named(monkeypatch, before, code):
    """Where MKL's own mode is one whose sums depend on the batch, as with the instructions of an older CPU."""
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    monkeypatch.delenv(mkl_mode.VARIABLE, raising=False)
    if mkl_probe.suffices(None) is not False or not mkl_probe.suffices(mkl_mode.MODE):
        pytest.skip("MKL needs no other mode on this CPU, or has none that helps")
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, check=False, env=os.environ, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (mkl_mode.VARIABLE in done.stderr) == bool(code)


LATE, IN_FORCE = 1, 0x10002
"""What MKL answers of its mode: none was chosen in time, or the one that is asked for."""


STRICT, NONE = f"with {mkl_mode.VARIABLE}={mkl_mode.MODE} ", f"without {mkl_mode.VARIABLE} "


@pytest.mark.parametrize(("given", "answer", "own", "strict", "chosen", "helps"), [
    (None, LATE, True, True, None, STRICT),  # a probe of other sizes failed
    (None, LATE, True, False, None, None),
    (None, LATE, False, True, mkl_mode.MODE, STRICT),
    (None, IN_FORCE, False, True, mkl_mode.MODE, None),
    (None, LATE, False, False, None, None),
    (None, LATE, None, None, None, STRICT),
    ("AVX2", LATE, False, True, "AVX2", STRICT),
    ("AVX2", LATE, True, True, "AVX2", NONE),
    ("AVX2", LATE, True, False, "AVX2", NONE),
    (mkl_mode.MODE, IN_FORCE, True, True, mkl_mode.MODE, None),
])  # fmt: skip
def test_a_mode_is_chosen_where_it_helps_and_advised_where_it_is_not_in_force(
    monkeypatch, given, answer, own, strict, chosen, helps
):
    """Where a probe fails in the very mode, a message that advises it would send its reader in a circle."""
    for each in (mkl_mode.choose_mode, mkl_mode.needs_another, mkl_mode._given):
        monkeypatch.setattr(mkl_mode, each.__name__, cache(each.__wrapped__))
    monkeypatch.setattr(mkl_mode.torch.backends.mkl, "is_available", lambda: True)
    library = SimpleNamespace(mkl_serv_cbwr_set=lambda mode: 0, mkl_serv_cbwr_get=lambda which: answer)
    monkeypatch.setattr(mkl_mode.ctypes, "CDLL", lambda path: library)
    monkeypatch.setenv(mkl_mode.VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(mkl_mode.VARIABLE)

    def suffices(mode):
        return own if mode is None else strict

    said = mkl_mode.choose_mode(suffices)
    assert said == (None if chosen is None else f"sums of MKL by {mkl_mode.VARIABLE}={chosen}")
    advised = mkl_mode.remedy(suffices)
    assert advised is None if helps is None else f"start the process {helps}" in advised
    assert os.environ.get(mkl_mode.VARIABLE) == chosen


def test_a_mode_is_asked_of_a_new_process_once(monkeypatch):
    """That has the mode; and what was not found is asked again."""
    asked, answers = [], ["", OSError("no process")]

    def run(command, env, **rest):
        asked.append((command[-2:], env.get(mkl_mode.VARIABLE)))
        answer = answers[len(asked) > 1]
        if isinstance(answer, OSError):
            raise answer
        return SimpleNamespace(stdout=f'"{answer}"')

    monkeypatch.setattr(mkl_probe.subprocess, "run", run)
    monkeypatch.setattr(mkl_probe, "_WEIGHTS", ((7, 7),))
    monkeypatch.setenv(mkl_mode.VARIABLE, "AVX2")
    assert [mkl_probe.suffices(mkl_mode.MODE), mkl_probe.suffices(mkl_mode.MODE)] == [True, True]
    assert [mkl_probe.suffices(None), mkl_probe.suffices(None)] == [None, None]
    own = ["treetop.engine.startup.mkl_probe", "1"]
    assert asked == [(own, mkl_mode.MODE), (own, None), (own, None)]
