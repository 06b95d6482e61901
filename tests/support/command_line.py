"""What tests of the command line share: running it in this process, or in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

from treetop.cli import main

SOURCE = Path(__file__).parents[2] / "src"
PROMPT = "def add(a, b):\n"


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line, in this process."""
    capsys.readouterr()
    try:
        code = main([str(each) for each in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


def spawn(*argv, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "treetop.cli", *map(str, argv)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def lines(text) -> list[str]:
    return text.splitlines()


def refused(capsys, argv, *parts):
    """Exit code 2, nothing on stdout, one line on stderr that holds all parts and no traceback."""
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("treetop: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err
