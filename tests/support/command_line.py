"""What tests of the command line share: running it in this process, or in one of its own."""

import os
import subprocess
import sys

from support.warm import Popen
from treetop.cli import main

PROMPT = "def add(a, b):\n"


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line, in this process.

    A context that nobody names is short: a start proves that it fits, whose worst rounds are most of what it costs.
    """
    if argv[0] in ("generate", "chat") and "--context-length" not in argv:
        argv += ("--context-length", 512)
    return _said(capsys, argv)


def _said(capsys, argv):
    capsys.readouterr()
    try:
        code = main([str(each) for each in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


def spawn(*argv, start: type[subprocess.Popen[str]] = Popen, environment: dict[str, str] | None = None):
    """Its streams are pipes of text.

    start: `subprocess.Popen` for a process whose start and end are all Python's. environment: beside that of the tests.
    """
    command = [sys.executable, "-m", "treetop.cli", *map(str, argv)]
    env = {**os.environ, **(environment or {})}
    return start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def lines(text) -> list[str]:
    return text.splitlines()


def refused(capsys, argv, *parts):
    """Exit code 2, nothing on stdout, one line on stderr that holds all parts and no traceback."""
    code, out, err = _said(capsys, argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("treetop: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err
