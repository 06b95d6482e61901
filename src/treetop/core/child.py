"""A process of ours: its parent says on stdin what it is to do, and its stdin ends when the parent does."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from shutil import rmtree
from typing import TypeVar

import msgspec

Options = TypeVar("Options", bound=msgspec.Struct)


def start_child(module: str, options: msgspec.Struct) -> "subprocess.Popen[bytes]":
    """Run a module that calls `begin`, in a process which ends with this one."""
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options) + b"\n")
    process.stdin.flush()
    return process


def begin(kind: type[Options], folder: Callable[[Options], str | None]) -> tuple[Options, threading.Thread]:
    """What the parent says in the first line, and a thread that ends this process when the parent has ended.

    folder: what goes with both, for the parent may have had no time to remove it. Ctrl-C and SIGTERM are the parent's
    to act on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=kind)
    watch = threading.Thread(target=_end_with_parent, args=(stdin, folder(options)), name="treetop-parent", daemon=True)
    watch.start()
    return options, watch


def _end_with_parent(stdin: io.FileIO, folder: str | None) -> None:
    while stdin.read(1):
        pass
    if folder is not None:
        rmtree(folder, ignore_errors=True)
    os._exit(0)  # also out of a call that never returns
