"""Processes of ours end with their parent, whatever they are in the middle of; why a group ends is what came first."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from support.waiting import WAIT_S
from treetop.distributed import process as processes
from treetop.distributed.process import EXIT_REPORTED, Failed, ProcessGroup
from treetop_debug.ranks import Nothing

MEETS_LATE = """
import msgspec
from pathlib import Path
from torch._C._distributed_c10d import FileStore
from treetop.distributed.process import begin

class Options(msgspec.Struct):
    folder: str

options, _ = begin(Options, lambda said: said.folder)
print("begun", flush=True)
while Path(options.folder).exists():
    pass
FileStore(options.folder + "/meeting", 2)
"""


def test_a_process_ends_with_its_parent_also_while_it_holds_the_interpreters_lock(tmp_path: Path):
    """FileStore looks for a folder that is gone for five minutes, and no thread of its process runs meanwhile."""
    folder = tmp_path / "group"
    folder.mkdir()
    child = subprocess.Popen([sys.executable, "-c", MEETS_LATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdin.write(b'{"folder": "%s"}\n' % str(folder).encode())
        child.stdin.flush()
        assert child.stdout.readline() == b"begun\n"
        child.stdin.close()
        child.wait(WAIT_S)
        assert not folder.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


class Said:
    """A child that has said its last words; `read` lets its parent read them, and so does its end."""

    def __init__(self, why: Failed) -> None:
        self.stdin, (out, self._out) = Nothing(), os.pipe()
        self.stdout = os.fdopen(out, "rb")
        self._why, self._told, self._ended = why, threading.Lock(), threading.Event()

    def read(self) -> None:
        if self._told.acquire(blocking=False):
            os.write(self._out, msgspec.json.encode(self._why) + b"\n")
            os.close(self._out)

    def poll(self) -> int | None:
        return EXIT_REPORTED if self._ended.is_set() else None

    def wait(self) -> int:
        self._ended.wait()
        return EXIT_REPORTED

    def kill(self) -> None:
        self.read()
        self._ended.set()


@pytest.mark.parametrize("late", ["a moment later", "only once it is killed"])
def test_a_group_ends_for_what_was_said_first_however_late_it_is_read(monkeypatch, late):
    """A busy parent may hear of the rank that waited in vain before it hears of the one that it waited for."""
    cause, effect = Said(Failed("ranks have agreed on another step", at_s=1.0)), Said(Failed("no answer", at_s=2.0))
    children = [effect, cause]
    monkeypatch.setattr(processes, "start_process", lambda *_: children.pop(0))
    group = ProcessGroup()
    try:
        group.start("rank 0", "", msgspec.Struct(), "rank 0: ")
        group.start("rank 1", "", msgspec.Struct(), "rank 1: ")
        effect.read()
        while not group._reported:
            pass
        if late == "a moment later":
            cause.read()
        assert group.ended.result(WAIT_S).reason == "rank 1: ranks have agreed on another step"
        assert str(group.failure) == "rank 1: ranks have agreed on another step"
    finally:
        group.close()


@pytest.mark.parametrize(
    ("number", "starved", "killed"),
    [(signal.SIGKILL, 0, True), (signal.SIGKILL, 1, False), (signal.SIGKILL, None, False), (signal.SIGSEGV, 0, False)],
)
def test_a_group_knows_whether_somebody_killed_it(monkeypatch, number, starved, killed):
    """SIGKILL comes from somebody, unless the system has killed for want of memory since, or does not say.

    starved: how many it has killed meanwhile.
    """
    counts = [7, None if starved is None else 7 + starved]
    monkeypatch.setattr(processes, "oom_kills", lambda: counts.pop(0))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group = ProcessGroup()
    try:
        group.start("the engine", "", msgspec.Struct(), spare=sleeper)
        sleeper.send_signal(number)
        assert group.ended.result(WAIT_S) == Failed(
            f"the engine has ended with exit code -{int(number)}",
            died=True,
            killed=killed,
            at_s=group.ended.result().at_s,
        )
    finally:
        group.close()
