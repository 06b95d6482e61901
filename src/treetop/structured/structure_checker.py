"""Structures are checked before anything is done for them, in processes that may be killed: `structure_process.py`.

A structure is compiled there with the model's tokenizer, and its first masks are computed. What was found is kept, so
each structure is checked once, and others that ask for it meanwhile wait for the same answer.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

from treetop.structured.grammars import check_installed
from treetop.structured.refusals import refused
from treetop.types.constraint import StructuredOutput, StructureLimits
from treetop.types.errors import EngineError, InputError
from treetop.types.requests import CoreInfo

_NUM_PROCESSES = 2
"""So that one structure that takes long does not hold up all others."""
_MAX_KEPT = 1024
"""Structures of which it is known whether they can be kept."""
_KILLED_S = 60.0
"""How long it counts that a process was killed: the machine may have been busy."""


class StructureChecker:
    """Checks the structures that are asked of one core. Its processes start with the first structure, and end with
    `close`, or when nothing holds this object any more. Any thread may use it.
    """

    def __init__(self, info: CoreInfo) -> None:
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._options = json.dumps(
            {
                "folder": info.model_path,
                "vocab_size": info.vocab_size,
                "eos_ids": info.eos_ids,
                **info.structure_limits._asdict(),
            }
        )
        self._limits = info.structure_limits
        self._pool = ThreadPoolExecutor(_NUM_PROCESSES, "treetop-structure")
        self._findings: OrderedDict[StructuredOutput, _Finding] = OrderedDict()
        self._entering = threading.Lock()
        self.close = weakref.finalize(self, _close, self._all)
        """End the processes; any number of times. What is asked later is an EngineError."""

    def check(self, asked: StructuredOutput) -> None:
        """Raise InputError for a structure that no text has, or that cannot be kept within the limits."""
        finding = self._enter(asked)
        try:
            _raise(finding.verdict.result())
        finally:
            self._leave(finding)

    async def checked(self, asked: StructuredOutput) -> None:
        """As `check`, for an event loop. What nobody waits for any more is not begun."""
        finding = self._enter(asked)
        try:
            _raise(await asyncio.shield(asyncio.wrap_future(finding.verdict)))
        finally:
            self._leave(finding)

    def _enter(self, asked: StructuredOutput) -> "_Finding":
        check_installed()
        with self._entering:
            finding = self._findings.get(asked)
            if finding is None or finding.is_over:
                finding = self._findings[asked] = _Finding(self._pool.submit(self._find, asked))
            self._findings.move_to_end(asked)
            if len(self._findings) > _MAX_KEPT:
                self._findings.popitem(last=False)
            finding.num_waiting += 1
        return finding

    def _leave(self, finding: "_Finding") -> None:
        with self._entering:
            finding.num_waiting -= 1
            if not finding.num_waiting:
                finding.verdict.cancel()  # nothing, once it has begun

    def _find(self, asked: StructuredOutput) -> "_Verdict":
        """On a thread of the pool: what a process says."""
        process = self._idle.pop() if self._idle else self._started()
        problem = process.ask(asked)
        if not self.close.alive:
            process.end()
            raise EngineError("structures are not checked any more: the core has been closed")
        if process.alive:
            self._idle.append(process)
            return _Verdict(problem)
        self._all.discard(process)
        process.end()
        return _Verdict(problem, time.monotonic() + _KILLED_S)

    def _started(self) -> "_Process":
        try:
            process = _Process(self._options, self._limits)
        except OSError as error:
            raise EngineError(f"no process that checks structures could be started: {error}") from None
        self._all.add(process)
        return process


class _Verdict(NamedTuple):
    """problem: what is wrong with a structure, None if nothing is.
    until_s: when it counts no more.
    """

    problem: str | None
    until_s: float = float("inf")


class _Finding:
    """A verdict, or its coming, and how many wait for it."""

    def __init__(self, verdict: "Future[_Verdict]") -> None:
        self.verdict, self.num_waiting = verdict, 0

    @property
    def is_over(self) -> bool:
        if not self.verdict.done():
            return False
        if self.verdict.cancelled() or self.verdict.exception() is not None:
            return True
        return time.monotonic() > self.verdict.result().until_s


class _Process:
    """A process that checks structures, one at a time. alive: it can check another."""

    def __init__(self, options: str, limits: StructureLimits) -> None:
        self._limits, self.alive = limits, True
        command = [sys.executable, "-P", "-m", "treetop.structured.structure_process"]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL  # where the library says how it crashed
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        self._cannot = self._exchange(options)

    def ask(self, asked: StructuredOutput) -> str | None:
        """What is wrong with a structure."""
        if self._cannot is not None:
            return self._cannot
        return self._exchange(json.dumps(asdict(asked)))

    def end(self) -> None:
        """Any number of times, from any thread."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _exchange(self, line: str) -> str | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        answer = b""
        with suppress(OSError, ValueError):  # it has ended, or is being closed
            stdin.write(line.encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        if answer:
            problem = json.loads(answer)
            return None if problem is None else str(problem)
        self.alive = False
        return str(refused(self._why(self._process.wait())))

    def _why(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return (
                f"the structure takes longer than {self._limits.timeout_s:g} s to compile; simplify it, or raise"
                " --structured-output-timeout"
            )
        return (
            f"the structure is too large: it takes more than {self._limits.memory_mib} MiB, or is too deep; simplify"
            " it, or raise --structured-output-memory"
        )


def _raise(verdict: _Verdict) -> None:
    if verdict.problem is not None:
        raise InputError(verdict.problem)


def _close(processes: set[_Process]) -> None:
    for process in [*processes]:
        process.end()
