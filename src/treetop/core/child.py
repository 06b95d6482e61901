"""A process of ours: its parent says on stdin what it is to do, and its stdin ends when the parent does."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from shutil import rmtree
from typing import TypeVar

import msgspec

Options = TypeVar("Options", bound=msgspec.Struct)

_SEEN_S = 0.5
"""Within which all processes of a parent see that it has ended."""
_AT_MOST_S = 3
"""How long one may take to end then, whatever it is in the middle of."""


def start_child(module: str, options: msgspec.Struct) -> "subprocess.Popen[bytes]":
    """Run a module that calls `begin`, in a process which ends with this one."""
    command, told = [sys.executable, "-P", "-m", module], msgspec.json.encode(options)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(told + b"\n")
    process.stdin.flush()
    return process


def begin(kind: type[Options], folder: Callable[[Options], str | None]) -> tuple[Options, threading.Thread]:
    """What the parent says in the first line, and a thread that ends this process when the parent has ended.

    folder: what goes with both, for the parent may have had no time to remove it. Ctrl-C and SIGTERM are the parent's
    to act on, who ends a process by SIGKILL if it lives on itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=kind)
    watch = threading.Thread(target=_end_with_parent, args=(stdin, folder(options)), name="treetop-parent", daemon=True)
    watch.start()
    return options, watch


def _end_with_parent(stdin: io.FileIO, folder: str | None) -> None:
    """The alarm is the system's: it also ends a process whose main thread holds the interpreter's lock for long.

    torch's FileStore does, for five minutes, if the folder of its file is gone: the folder stays until all are warned.
    """
    while stdin.read(1):
        pass
    signal.alarm(_AT_MOST_S)
    time.sleep(_SEEN_S)
    if folder is not None:
        rmtree(folder, ignore_errors=True)
    os._exit(0)  # also out of a call that never returns
