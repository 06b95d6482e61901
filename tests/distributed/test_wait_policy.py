"""Threads that wait leave the cores to others: the variable reaches processes before they import PyTorch."""

import os
import subprocess
import sys

import msgspec
import pytest

from treetop.distributed import process

VARIABLE = "OMP_WAIT_POLICY"


class Nothing(msgspec.Struct):
    pass


@pytest.mark.parametrize(("given", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize("own", [False, True])
def test_a_process_is_started_with_it_unless_it_is_set(monkeypatch, given, seen, own):
    """What it starts with, for OpenMP reads it once; own: the caller hands an environment on."""
    monkeypatch.delenv(VARIABLE, raising=False)
    environment = dict(os.environ) | ({VARIABLE: given} if given else {})
    if given and not own:
        monkeypatch.setenv(VARIABLE, given)
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, command, **options):
            started.append(options["env"][VARIABLE])
            super().__init__([sys.executable, "-c", f"import os; print(os.environ['{VARIABLE}'])"], **options)

    monkeypatch.setattr(process, "Popen", Noted)
    child = process.start_process("unused", Nothing(), **({"env": environment} if own else {}))
    assert child.communicate(timeout=60)[0].decode().strip() == seen == started[0]


def test_the_command_line_sets_it_before_pytorch_is_imported():
    script = "import sys, treetop.cli.command_line; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
