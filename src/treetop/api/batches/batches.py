"""Batches as a server runs them: beside its other requests, over its restarts."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, BinaryIO, cast

from starlette.types import ASGIApp

from treetop.api.api_state import ApiState
from treetop.api.batches.lines import BatchInput, BatchLine, answered_ids, read_input, unasked_line
from treetop.api.batches.runner import BatchRunner
from treetop.api.batches.store import BatchStore, Record, new_id

log = logging.getLogger("treetop.server")

MOST_LINES = 50_000
"""Of a batch, as OpenAI has it."""
WINDOW, WINDOW_S = "24h", 24 * 3600
_SAVE_S = 1.0
"""Between two versions of a record that runs."""
_TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class Batches:
    """The batches that this process runs."""

    def __init__(self, api: ApiState, store: BatchStore, app: ASGIApp) -> None:
        at_a_time = api.options.batch_requests or max(api.core.info.max_requests // 2, 1)
        self._api, self._store, self._runner = api, store, BatchRunner(app, at_a_time)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, owner: str, input_file_id: str, endpoint: str, metadata: dict[str, str] | None) -> Record:
        """Its record. For a thread; whoever has called it calls `run`."""
        now_s = int(time.time())
        record: Record = {
            "id": new_id("batch"),
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": WINDOW,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now_s,
            "expires_at": now_s + WINDOW_S,
            **dict.fromkeys(_TIMES),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self._store.put(owner, record)
        return record

    def run(self, owner: str, record: Record) -> None:
        """Go on with a batch, unless another process does."""
        task = asyncio.ensure_future(self._run(owner, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def resume(self) -> None:
        """Go on with all that have not ended."""
        for owner, record in await asyncio.to_thread(lambda: [*self._store.unfinished()]):
            self.run(owner, record)

    async def _run(self, owner: str, record: Record) -> None:
        try:
            with self._store.held(record["id"]) as is_ours:
                if is_ours:
                    await _RunningBatch(self._store, self._runner, owner, record).run(self._goes_on)
        except Exception:  # the folder is gone, or a bug: it stays where it was, and the next start tries again
            log.exception("batch %s cannot go on", record["id"])

    def _goes_on(self) -> bool:
        return not self._api.leaving and self._api.core.failure is None


class _RunningBatch:
    """One batch, on its way to its end. Its record is this one's alone to change."""

    def __init__(self, store: BatchStore, runner: BatchRunner, owner: str, record: Record) -> None:
        self._store, self._runner, self._owner, self._record = store, runner, owner, record
        self._room = 0

    async def run(self, server_goes_on: Callable[[], bool]) -> None:
        """Until it has ended, or the server leaves: then the next start goes on."""
        record = self._record
        read = await asyncio.to_thread(self._read)
        if read.problems:
            data = [
                {"code": each.code, "line": each.line, "message": each.message, "param": each.param}
                for each in read.problems
            ]
            await self._end("failed", errors={"object": "list", "data": data})
            return
        if record["output_file_id"] is None:
            files = {"output_file_id": new_id("file"), "error_file_id": new_id("file")}
            record |= {**files, "status": "in_progress", "in_progress_at": int(time.time())}
        done = await asyncio.to_thread(self._answered)
        left = [each for each in read.lines if each.custom_id not in done]
        failed = record["request_counts"]["failed"]
        record["request_counts"] = {"total": len(read.lines), "completed": len(done) - failed, "failed": failed}
        self._room = await asyncio.to_thread(self._store.room)
        await self._save()
        with ExitStack() as files_open:
            asked, output, errors = (
                cast(BinaryIO, files_open.enter_context(self._store.data(record[name]).open(mode)))
                for name, mode in (("input_file_id", "rb"), ("output_file_id", "ab"), ("error_file_id", "ab"))
            )

            def keep(line: BatchLine, status: int, answer: bytes) -> None:
                file, count = (output, "completed") if status < 400 else (errors, "failed")
                file.write(answer)
                file.flush()
                record["request_counts"][count] += 1
                self._room -= len(answer)

            def goes_on() -> bool:
                return server_goes_on() and self._why_over() is None

            async with self._saved_meanwhile():
                await self._runner.run(left, asked, self._owner, keep, goes_on)
            counts = record["request_counts"]
            is_whole = counts["completed"] + counts["failed"] == counts["total"]
            why = None if is_whole else self._why_over()
            if why == "expired":
                known = {*self._answered()}
                for line in left:
                    if line.custom_id not in known:
                        errors.write(unasked_line(line.custom_id, "batch_expired", "its time was over"))
        if is_whole or why is not None:
            full = {"code": "storage_full", "line": None, "message": "--batch-bytes are used up", "param": None}
            more = {"errors": {"object": "list", "data": [full]}} if why == "failed" else {}
            await self._end(why or "completed", **more)

    def _why_over(self) -> str | None:
        if self._store.is_cancelled(self._record["id"]):
            return "cancelled"
        if time.time() > self._record["expires_at"]:
            return "expired"
        return "failed" if self._room <= 0 else None

    def _read(self) -> BatchInput:
        with self._store.data(self._record["input_file_id"]).open("rb") as file:
            return read_input(file, self._record["endpoint"], MOST_LINES)

    def _answered(self) -> set[str]:
        """Those with an answer; how many of them have failed is what the error file has."""
        well = {*answered_ids(self._store.data(self._record["output_file_id"]))}
        badly = {*answered_ids(self._store.data(self._record["error_file_id"]))}
        self._record["request_counts"]["failed"] = len(badly)
        return well | badly

    async def _end(self, status: str, **more: Any) -> None:
        record, now_s = self._record, int(time.time())
        if status == "cancelled":
            record["cancelling_at"] = record["cancelling_at"] or now_s
        record |= {"status": status, f"{status}_at": now_s, **more}
        if status == "completed":
            record["finalizing_at"] = now_s
        for name in ("output_file_id", "error_file_id"):
            if record[name] is not None and not await asyncio.to_thread(self._show, record[name], name):
                record[name] = None
        await self._save()

    def _show(self, file_id: str, name: str) -> bool:
        """Whether there is anything in it."""
        path = self._store.data(file_id)
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return False
        kind = name.removesuffix("_file_id")
        self._store.show_file(self._owner, file_id, f"{self._record['id']}_{kind}.jsonl", "batch_output")
        return True

    @asynccontextmanager
    async def _saved_meanwhile(self) -> AsyncIterator[None]:
        over = asyncio.Event()

        async def save_now_and_then() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), _SAVE_S)
                await self._save()

        saving = asyncio.ensure_future(save_now_and_then())
        try:
            yield
        finally:
            over.set()
            await saving

    async def _save(self) -> None:
        await asyncio.to_thread(self._store.put, self._owner, {**self._record})
