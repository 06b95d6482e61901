"""`treetop run-batch`: engines and the application without connections, and a file of requests between two kills."""

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from treetop.api.api_state import ApiState
from treetop.api.app import make_app
from treetop.api.batches.lines import BatchLine, answered_ids, read_input
from treetop.api.batches.runner import BatchRunner
from treetop.core.wire import ProcessOptions
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.in_flight import InFlightCounter
from treetop.distributed.log_lines import FORMAT, say
from treetop.serve.run import first_seed, log_server
from treetop.serve.serve import started_engines, watched
from treetop.serve_options import ServeOptions
from treetop.types.errors import EngineError, InputError


def run(process: ProcessOptions, options: ServeOptions, input_file: str, output_file: str) -> int:
    """Answer each request that the output does not. Returns the exit code. Raises UserError and EngineError."""
    os.environ[FORMAT] = options.log_format
    log_server()
    for name in (input_file, output_file):
        if "://" in name:
            raise InputError(f"{name}: files of this machine only; fetch it first")
    with _opened(input_file, "rb") as asked, _opened(output_file, "ab") as answers:
        lines = read_input(asked)
        lines.check(input_file)
        try:
            fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{output_file}: another run writes to it") from None
        done = {*answered_ids(Path(output_file))}
        if strange := done - {each.custom_id for each in lines.lines}:
            raise InputError(f"{output_file}: has an answer to {min(strange)!r}, which {input_file} does not ask")
        left = [each for each in lines.lines if each.custom_id not in done]
        with _Bar(len(lines.lines), len(done), options.log_interval) as bar:
            return asyncio.run(_run(process, options, left, asked, answers, bar)) if left else 0


async def _run(
    process: ProcessOptions,
    options: ServeOptions,
    left: list[BatchLine],
    asked: BinaryIO,
    answers: BinaryIO,
    bar: "_Bar",
) -> int:
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            stopped.set_result(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)

    def keep(line: BatchLine, status: int, answer: bytes) -> None:
        answers.write(answer)
        answers.flush()
        bar.advance(status < 400)

    async with started_engines(process, options, stopped) as (core, engines):
        if stopped.done():
            return stopped.result()
        api = _application(core, options, process)
        runner = BatchRunner(make_app(api), 2 * core.info.max_requests)  # one waits for each that runs
        try:
            with watched(engines):
                running = asyncio.ensure_future(
                    runner.run(left, asked, "", keep, lambda: core.failure is None and not stopped.done())
                )
                waited: set[asyncio.Future[object]] = {running, stopped}  # type: ignore[arg-type]  # of two kinds
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
        finally:
            api.close()
            os.fsync(answers.fileno())
        if stopped.done():
            return stopped.result()
        if core.failure is not None:
            raise EngineError(f"{core.failure}; the same command goes on where this one has ended")
        return 0


def _application(core: EngineProcessClient, options: ServeOptions, process: ProcessOptions) -> ApiState:
    return ApiState(core, options, process.config.model, first_seed(process.config.seed), InFlightCounter())


@contextmanager
def _opened(name: str, mode: str) -> Iterator[BinaryIO]:
    """Raises InputError for what cannot be opened."""
    try:
        file = open(name, mode)  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    with file:
        yield file  # type: ignore[misc]  # of bytes, in any of these modes


class _Bar:
    """How far a run has come: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, done: int, interval_s: float) -> None:
        self._total, self._done, self._failed = total, done, 0
        self._begun, self._began_s = done, time.monotonic()
        self._interval_s, self._told_s = interval_s, time.monotonic()
        columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task = TaskID(0)

    def __enter__(self) -> "_Bar":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("requests", total=self._total, completed=self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._tell()

    def advance(self, well: bool) -> None:
        self._done += 1
        self._failed += not well
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._interval_s and time.monotonic() - self._told_s >= self._interval_s:
            self._told_s = time.monotonic()
            self._tell()

    def _tell(self) -> None:
        rate = (self._done - self._begun) / max(time.monotonic() - self._began_s, 1e-3)
        failed = f", {self._failed} with an error" if self._failed else ""
        say(f"treetop: {self._done} of {self._total} requests{failed} ({rate:.1f} a second)")
