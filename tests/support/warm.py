"""Processes of treetop that are forked from one which has imported PyTorch and treetop, instead of importing them anew.

`Popen` is `subprocess.Popen` for commands `python -m MODULE ...` of the modules below; any other command, and one whose
environment changes how Python or a library starts, is run as it stands. A process that it starts is like any other:
a child of whoever started it, with its own command line, standard streams, session and environment.

whoever starts --socket: what to run, descriptors--> fork server --fork--> in between, which ends --fork--> the process

Whoever starts it is a subreaper, so what is orphaned by the one in between becomes its child. A process that starts
others forks a fork server of its own before it has any thread. Linux only; elsewhere every start is cold.

    python tests/support/warm.py FD PADDING      the fork server; the padding is where command lines are written to
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

_STARTS_OTHERS = ("treetop.cli", "treetop.distributed.engine_process")
_API = "treetop.serve.worker"
_MODULES = (*_STARTS_OTHERS, "treetop.distributed.tp_worker", _API)
"""What can be started so, each with a `main`."""
_IMPORTED = (*_MODULES, "treetop.serve.serve", "treetop.core.mock", "treetop.distributed.open", "treetop.llm")
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "TRITON")
"""Beginnings of names that Python and libraries read as they start."""
_SAID_LATE = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch says it itself, once a test has had to do with its compiler, and reads it when it compiles."""
_WAITS = "OMP_WAIT_POLICY"
HELD = "TESTS_HELD"
"""Names the first folder of PYTHONPATH, whose `sitecustomize.py` says where the process is held (`holding.py`)."""
_PADDING = 8192
_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES, _MOST_FDS = 2**17, 64


class Popen(subprocess.Popen):
    """As `subprocess.Popen`."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        """Called by `subprocess.Popen.__init__` with the pipes that it has made; rest: those, then other options."""
        asked = _warm_command(args)
        given = dict(os.environ if env is None else env)
        if asked is None or not _starts_alike(given):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        _startupinfo, _creationflags, _shell, *pipes = rest[:9]
        session = rest[-2]
        own = [pipes[index] if pipes[index] >= 0 else fd for fd, index in enumerate((0, 3, 5))]
        request = {
            "module": asked[0],
            "arguments": asked[1:],
            "command": [os.fspath(each) for each in args],
            "environment": given,
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "session": session,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        self.pid = _fork_server().start(request, [*own, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _warm_command(args: Any) -> list[str] | None:
    """Module and arguments of a command that can be forked."""
    if sys.platform != "linux" or isinstance(args, str | bytes | os.PathLike) or args[0] != sys.executable:
        return None
    rest = [str(each) for each in args[1:]]
    while rest and rest[0] == "-P":
        del rest[0]
    return rest[1:] if len(rest) > 1 and rest[0] == "-m" and rest[1] in _MODULES else None


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the folder of `HELD`, which is looked at before the process's `main`."""
    early = {name: each for name, each in environment.items() if name.startswith(_READ_EARLY) and name != _SAID_LATE}
    if HELD in environment:
        path = early.pop("PYTHONPATH").removeprefix(environment[HELD]).removeprefix(os.pathsep)
        early |= {"PYTHONPATH": path} if path else {}
    return early


def _starts_alike(environment: Mapping[str, str]) -> bool:
    return {_WAITS: "PASSIVE", **_read_early(environment)} == _fork_server().read_early


class _ForkServer:
    """The other end of a fork server's socket."""

    def __init__(self, link: socket.socket, read_early: dict[str, str]) -> None:
        self._link, self._lock, self.read_early = link, threading.Lock(), read_early
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Returns the process id of a child of this process."""
        with self._lock:
            socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
            said = self._link.recv(64)
        if not said:
            raise RuntimeError("the fork server of the tests has ended")
        return int(said)


_own: list[_ForkServer] = []
"""Of a process that was forked itself: its fork server."""


def _fork_server() -> _ForkServer:
    return _own[0] if _own else _first_fork_server()


@cache
def _first_fork_server() -> _ForkServer:
    """That of the tests' process, which starts cold, once. Its imports take seconds."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {_WAITS: "PASSIVE", **os.environ}
    command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * _PADDING]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(),), start_new_session=True
    )
    theirs.close()

    def end() -> None:
        link.close()
        process.wait()

    atexit.register(end)
    return _ForkServer(link, _read_early(environment))


# ---------------------------------------------------------------- in the fork server


def _until_asked(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a process for each request, in which it returns: what it is to be, and its descriptors."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, _MOST_FDS)
        if not said:
            os._exit(0)
        heard, tell = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            for each in (heard, tell, link.detach()):
                os.close(each)
            return json.loads(said), descriptors
        for each in (tell, *descriptors):
            os.close(each)
        pid = os.read(heard, 64)
        os.close(heard)
        os.waitpid(between, 0)
        link.send(pid)


def _become(asked: dict[str, Any], descriptors: list[int]) -> None:
    """Take on what a cold start would have had from its beginning."""
    if asked["session"]:
        os.setsid()
    above = max(asked["descriptors"]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, asked["descriptors"], strict=True):
        os.dup2(each, number)
        os.close(each)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv, sys.orig_argv = [asked["module"], *asked["arguments"]], asked["command"]
    _write_command_line(asked["command"])


def _write_command_line(command: Sequence[str]) -> None:
    """Where /proc shows it, which is this process's memory."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    text = b"".join(each.encode() + b"\0" for each in command)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _fork_own_server(read_early: dict[str, str], passed: Sequence[int]) -> tuple[dict[str, Any], list[int]] | None:
    """What this process starts, it forks: before it has a thread. Returns what was asked for in such a process."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _own[:] = [_ForkServer(link, read_early)]
        return None
    link.close()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for each in (null, *passed):
        os.close(each)
    _own.clear()
    _write_command_line(["fork server"])
    return _until_asked(theirs)


def main() -> int | None:
    """The exit code of what this process has become."""
    link, read_early = socket.socket(fileno=int(sys.argv[1])), _read_early(os.environ)
    for name in _IMPORTED:
        with suppress(ImportError):  # of an extra that is not installed: a start will say so
            import_module(name)
    gc.freeze()  # what is imported stays, in each process that is forked
    asked: tuple[dict[str, Any], list[int]] | None = _until_asked(link)
    while asked is not None:
        said, descriptors = asked
        _become(said, descriptors)
        asked = None
        if said["module"] in _STARTS_OTHERS:
            asked = _fork_own_server(read_early, said["descriptors"][3:])
    from treetop.distributed import process

    process.Popen = Popen
    if said["module"] == _API:  # reads PROMETHEUS_MULTIPROC_DIR as it is imported, and it is said only now
        from prometheus_client import values

        values.ValueClass = values.get_value_class()
    if HELD in os.environ:
        runpy.run_path(os.path.join(os.environ[HELD], "sitecustomize.py"))
    return import_module(said["module"]).main()


def _run() -> int:
    """The exit code of what this process has become: the interpreter's, of whatever is raised."""
    try:
        return main() or 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(code: int) -> None:
    """As processes that `multiprocessing` forks end: what was imported is not taken apart, which takes a second.

    Threads are waited for, what is registered for the exit is done, and what was written is flushed, in this order, as
    an interpreter does.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            code = 120  # an interpreter's, whose reader has gone
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    _end(_run())
