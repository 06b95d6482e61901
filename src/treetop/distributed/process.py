"""Child processes: started with options on stdin, watched, ended; several of them fail and end as one.

parent --options, one line of JSON--> stdin of the child, which ends when that does: its parent has died
parent <--`Failed`, one line of JSON-- stdout of a child that knows why it ends
"""

import io
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from subprocess import PIPE, Popen
from typing import Any, TypeVar

import msgspec

from treetop.types.errors import ConfigError, EngineError, TreetopError, UserError

Options = TypeVar("Options", bound=msgspec.Struct)

_SEEN_S = 0.5
"""Within which all processes of a parent see that it has ended."""
_AT_MOST_S = 3
"""How long one may take to end then, whatever it is in the middle of."""
FAILURE_REPORT_S = 1.0
"""How long others may take to say why, or to be seen dead, once one has said why a group ends."""
_READ_S = 0.5
"""How long it may take then, once they are killed, until all is read that they said."""
_LONGEST_PATH = 90

log = logging.getLogger("treetop.distributed")


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why a process ends.

    user_error: whoever started it can change that.
    died: it ended without a word.
    killed: by somebody, and not by the system for want of memory.
    at_s: when that was known, in monotonic seconds, which all processes of a machine share.
    """

    reason: str
    user_error: bool = False
    died: bool = False
    killed: bool = False
    at_s: float = msgspec.field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        reason = str(error) if isinstance(error, TreetopError) else f"{type(error).__name__}: {error}"
        return cls(reason, isinstance(error, UserError))


# ---------------------------------------------------------------- in the child


def begin(kind: type[Options], folder: Callable[[Options], str | None]) -> tuple[Options, threading.Thread]:
    """What the parent says in the first line, and a thread that ends this process when the parent has ended.

    folder: what goes with both, for the parent may have had no time to remove it. Ctrl-C and SIGTERM are the parent's
    to act on, who ends a process by SIGKILL if it lives on itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    line = stdin.readline()
    if not line:  # a spare that nobody needed
        sys.exit(0)
    options = msgspec.json.decode(line, type=kind)
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


def report_failure(why: Failed) -> None:
    """Tell the parent. Any thread may."""
    with suppress(OSError):  # it has ended
        os.write(1, msgspec.json.encode(why) + b"\n")


# ---------------------------------------------------------------- in the parent


def start_process(module: str, options: msgspec.Struct, arguments: Sequence[str] = (), **given: Any) -> "Popen[bytes]":
    """Run a module in a process which ends with this one, and tell it its options."""
    process = open_process(module, arguments, **given)
    send_line(process, options)
    return process


def open_process(module: str, arguments: Sequence[str] = (), **given: Any) -> "Popen[bytes]":
    """A process that waits for its options.

    Its threads that wait leave the cores to others, unless OMP_WAIT_POLICY says otherwise.
    """
    given["env"] = {"OMP_WAIT_POLICY": "PASSIVE", **given.get("env", os.environ)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True, **given)


SPARE = "--spare"
"""Argument of a process that is to import all that it may need before it waits for its options."""


class SpareProcesses:
    """Processes of a module that wait for their options: what takes the place of one that died starts sooner."""

    def __init__(self, module: str) -> None:
        self._module, self._waiting = module, list["Popen[bytes]"]()
        self.close = weakref.finalize(self, SpareProcesses._close, self._waiting)
        """End all; any number of times."""

    def keep(self, count: int) -> None:
        """So many wait from now on."""
        self._waiting[:] = [process for process in self._waiting if process.poll() is None]
        while len(self._waiting) < count:
            self._waiting.append(open_process(self._module, [SPARE]))

    def take(self) -> "Popen[bytes] | None":
        """One that waits; None if none does."""
        while self._waiting:
            process = self._waiting.pop(0)
            if process.poll() is None:
                return process
        return None

    @staticmethod
    def _close(waiting: "list[Popen[bytes]]") -> None:
        while waiting:
            process = waiting.pop()
            process.kill()
            process.communicate()


def send_line(process: "Popen[bytes]", what: msgspec.Struct) -> None:
    """Write a line of JSON to its stdin, if it lives."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(msgspec.json.encode(what) + b"\n")
        process.stdin.flush()


class Child:
    """A child process and a thread that watches it. ended: its exit code, once there is one."""

    def __init__(self, process: "Popen[bytes]", on_line: Callable[[bytes], object]) -> None:
        """on_line: told each line that it writes to stdout, on the watching thread."""
        self.process = process
        self.ended: Future[int] = Future()
        self._on_line = on_line
        threading.Thread(target=self._watch, name="treetop-watch", daemon=True).start()

    def _watch(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self._on_line(line)
        self.ended.set_result(self.process.wait())

    def kill(self) -> None:
        """SIGKILL: nothing of it has to be saved, and it may have been stopped."""
        with suppress(OSError):
            self.process.kill()

    def close(self, patience_s: float = 0.0) -> None:
        """End it and wait. patience_s: how long it may take to end of its own, once its stdin has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        if patience_s:
            with suppress(TimeoutError):
                self.ended.result(patience_s)
        self.kill()
        self.process.wait()


class ProcessGroup:
    """Processes that start, fail and end as one, and a private folder in which they meet.

    The first that dies, or reports why it ends, ends the others. A process that died without a report explains most:
    others see only that it is gone. Then comes what was said first, however late it is read: whoever waited in vain for
    the one that failed says so after it.

    ended: why, from then on.
    """

    def __init__(self, on_end: Callable[[], object] = lambda: None) -> None:
        """on_end: called as soon as one has ended, on some thread: whoever waits for the others is to give up.

        Raises ConfigError for a folder whose path is too long for a socket's.
        """
        self.folder = private_folder()
        self.ended: Future[Failed] = Future()
        self._children: list[Child] = []
        self._reported: list[Failed] = []
        self._lock, self._over, self._on_end = threading.Lock(), threading.Event(), on_end
        self._oom_kills = oom_kills()
        self.close = weakref.finalize(self, ProcessGroup._close, self._children, self._over, self.folder)
        """End all processes, remove all files; any number of times."""

    def start(
        self,
        name: str,
        module: str,
        options: msgspec.Struct,
        prefix: str = "",
        spare: "Popen[bytes] | None" = None,
        **given: Any,
    ) -> None:
        """name, prefix: `rank 1`, and what comes before its own words. spare: that waits for its options."""
        if spare is None:
            process = start_process(module, options, **given)
        else:
            process = spare
            send_line(process, options)
        me = weakref.ref(self)

        def on_line(line: bytes) -> None:
            group = me()
            if group is not None:
                group._on_failure(prefix, line)

        child = Child(process, on_line)
        self._children.append(child)
        child.ended.add_done_callback(lambda code: _died(me, name, code.result()))

    @property
    def failure(self) -> TreetopError | None:
        """Why the group has ended, None while it lives."""
        return as_error(self.ended.result()) if self.ended.done() else None

    def end(self, seen: Failed, patience_s: float = 0.0) -> Failed:
        """End the group. Returns why: another reason, if it ends for one within this time, or what was seen of it."""
        with suppress(TimeoutError):
            return self.ended.result(patience_s)
        self._end(seen)
        return self.ended.result()

    def _on_failure(self, prefix: str, line: bytes) -> None:
        try:
            why = msgspec.json.decode(line, type=Failed)
        except (msgspec.MsgspecError, ValueError):
            return  # a library's
        self._reported.append(why if why.user_error else msgspec.structs.replace(why, reason=prefix + why.reason))
        threading.Thread(target=self._explain, name="treetop-why", daemon=True).start()

    def _explain(self) -> None:
        """One has said why: for a moment others may be seen to have died without a word."""
        if not self._over.wait(FAILURE_REPORT_S if len(self._children) > 1 else 0.0):
            self._end(None)

    def _has_died(self, name: str, code: int) -> None:
        if code not in (EXIT_REPORTED, EXIT_USER_ERROR) or not self._reported:
            killed = code == -signal.SIGKILL and self._oom_kills is not None and oom_kills() == self._oom_kills
            self._end(Failed(f"{name} has ended with exit code {code}", died=True, killed=killed))

    def _end(self, why: Failed | None) -> None:
        """why: None is what was said first."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        for child in self._children:
            child.kill()
        if why is None:
            wait([child.ended for child in self._children], _READ_S)
            why = min(self._reported, key=lambda said: said.at_s)
        self.ended.set_result(why)
        self._on_end()

    @staticmethod
    def _close(children: list[Child], over: threading.Event, folder: str) -> None:
        over.set()
        for child in children:
            child.kill()
        for child in children:
            child.close()
        rmtree(folder, ignore_errors=True)


EXIT_REPORTED, EXIT_USER_ERROR = 1, 2
"""Exit codes of a process that has told why it ends."""


def _died(group: "weakref.ref[ProcessGroup]", name: str, code: int) -> None:
    alive = group()
    if alive is not None:
        alive._has_died(name, code)


def oom_kills() -> int | None:
    """How many processes of this machine the system has killed for want of memory; None where that is not told."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def private_folder() -> str:
    """A new folder of this user alone (mode 0700). Raises ConfigError if sockets in it would have too long a path."""
    folder = tempfile.mkdtemp(prefix="treetop-")
    if len(folder) > _LONGEST_PATH:
        rmtree(folder, ignore_errors=True)
        raise ConfigError(f"the path of temporary files is too long for a socket: {folder}; set TMPDIR")
    return folder


def as_error(why: Failed) -> TreetopError:
    return ConfigError(why.reason) if why.user_error else EngineError(why.reason)
