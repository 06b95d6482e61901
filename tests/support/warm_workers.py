"""Worker processes of pytest-xdist that are forked from one which has imported all files of tests.

xdist starts each with an interpreter of its own, which imports PyTorch, transformers, treetop and every test: as much
processor time as hundreds of tests take. Here xdist's own process imports them, once, before it has a thread, and forks
the workers. What execnet sends to a fresh interpreter such a worker reads from the same pipes; it collects by itself.
Linux only, and without a GPU, whose driver survives no fork. Elsewhere every start is cold, as is that of a worker
which takes the place of one that died.
"""

import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.python import importtestmodule
from execnet import gateway_io
from execnet.gateway_base import Popen2IO, get_execmodel
from xdist.workermanage import parse_tx_spec_config

from support import warm

WAS_FORKED = False
"""Whether this process is such a worker."""


class _ForkedIO(Popen2IO):
    """As execnet's `Popen2IOMaster`: the pipes of a process, which is forked as this is made."""

    def __init__(self, others: list["_ForkedIO"]) -> None:
        """others: forked before, whose pipes are theirs alone."""
        reads, write = os.pipe()
        read, writes = os.pipe()
        self.pid, self._code = os.fork(), None
        if not self.pid:
            for each in (write, read, *(file.fileno() for other in others for file in (other.outfile, other.infile))):
                os.close(each)
            _serve(reads, writes)
        os.close(reads)
        os.close(writes)
        super().__init__(os.fdopen(write, "wb"), os.fdopen(read, "rb"), get_execmodel("thread"))

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve(reads: int, writes: int) -> None:
    """What a fresh interpreter is told to do. Does not return."""
    global WAS_FORKED
    WAS_FORKED, code = True, 1
    try:
        for each, number in ((reads, 0), (writes, 1)):
            os.dup2(each, number)
            os.close(each)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        warm.end(code)


def fork_workers(config: pytest.Config) -> None:
    """In xdist's own process: import the tests that are asked for, fork the workers, and let execnet take those."""
    number = len(parse_tx_spec_config(config))
    if not may_fork(number):
        return
    for path in _files(config):
        _import(path, config)
    gc.collect()
    gc.freeze()  # pages that all share stay so
    forked: list[_ForkedIO] = []
    for _ in range(number):
        forked.append(_ForkedIO(forked))
    left, cold = deque(forked), gateway_io.create_io

    def create_io(spec, execmodel):
        return left.popleft() if left and spec.popen and not spec.python else cold(spec, execmodel)

    gateway_io.create_io = create_io


def may_fork(number: int) -> bool:
    """Whether so many workers are forked."""
    return number > 1 and sys.platform == "linux" and not Path("/proc/driver/nvidia").exists()


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def _import(path: Path, config: pytest.Config) -> None:
    """As pytest does. What cannot be imported, or skips itself, says so again to whoever collects it."""
    before = set(sys.modules)
    try:
        importtestmodule(path, config)
    except (Exception, pytest.skip.Exception):
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) == str(path):
                del sys.modules[name]
