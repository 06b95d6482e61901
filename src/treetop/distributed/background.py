"""Engine processes without a supervisor of the caller's: their client, on an event loop of its own thread."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from treetop.core.clients import Sink, Sinks
from treetop.core.loop import Deliver
from treetop.core.wire import ProcessOptions
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.supervisor import EngineSupervisor
from treetop.types.changes import Change
from treetop.types.errors import EngineError, TreetopError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreLoad, EngineRequest, RequestUpdate

Result = TypeVar("Result")
_LOOK_S = 1.0


class BackgroundClient:
    """An `EngineClient` for one event loop at a time over an `EngineProcessClient` on another.

    An engine that dies is not started again. Raises UserError, EngineError if it cannot start.
    """

    pause, is_stalled, num_restarts = None, False, 0

    def __init__(self, process: ProcessOptions) -> None:
        """process: what each engine process is told, but for address and rank."""
        self._loop, self._sinks = asyncio.new_event_loop(), Sinks()
        self._alive: dict[RequestId, Deliver] = {}  # of this client's thread
        self._thread = threading.Thread(target=self._loop.run_forever, name="treetop-client", daemon=True)
        self._thread.start()
        try:
            engines, watching = self._run(_started(process))
        except BaseException:
            _stop(self._loop, self._thread)
            raise
        self.core: EngineProcessClient = engines.core
        self.info = self.core.info
        self.close = weakref.finalize(self, _close, self._loop, self._thread, engines, watching)
        """End the engines and the thread; any number of times."""

    @property
    def load(self) -> CoreLoad:
        return self.core.load

    @property
    def failure(self) -> EngineError | None:
        if self.core.failure is not None:
            return self.core.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        return None if self.close.alive else EngineError("the engine core has been closed")

    async def until_failed(self) -> None:
        while self.failure is None:
            await asyncio.sleep(_LOOK_S)

    def next_id(self) -> RequestId:
        return self.core.next_id()

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure
        self.submit(requests, self._sinks.add(requests, sink))

    def submit(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """As `add`, without an event loop. deliver: is called on this client's thread."""
        core, alive = self.core, self._alive

        def take(update: RequestUpdate) -> None:
            if update.finish_reason is not None:
                alive.pop(update.request_id, None)
            deliver([update])

        def add() -> None:
            alive.update((request.request_id, deliver) for request in requests)
            try:
                core.add(requests, take)
            except TreetopError as error:
                failed = isinstance(error, EngineError)
                for request in requests:
                    take(RequestUpdate(request.request_id, (), None, "abort", str(error), failed))

        self._post(add)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """As `EngineClient.abort`; a `deliver` gets a last update, as `CoreThread` gives one."""
        self._sinks.drop(request_ids)
        core, alive = self.core, self._alive

        def abort() -> None:
            core.abort(request_ids)
            for request_id in request_ids:
                if (deliver := alive.pop(request_id, None)) is not None:
                    deliver([RequestUpdate(request_id, (), None, "abort")])

        self._post(abort)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._sinks.drop((request_id,))
        self._post(self.core.finish, request_id, num_tokens)

    async def change(self, change: Change) -> None:
        await asyncio.to_thread(self.change_now, change)

    def change_now(self, change: Change) -> None:
        """As `change`, for a thread that may wait."""
        self._run(self.core.change(change))

    def flush(self) -> None:
        """Wait until what was said before this has been sent; on this client's own thread for nothing."""
        if self.close.alive and threading.current_thread() is not self._thread:
            self._run(asyncio.sleep(0))

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # it has been closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _started(options: ProcessOptions) -> "tuple[EngineSupervisor, asyncio.Task[str]]":
    engines = EngineSupervisor(options, restarts=0)
    try:
        await engines.start()
    except BaseException:
        engines.core.close()
        await engines.close()
        raise
    return engines, asyncio.create_task(engines.watch())


def _close(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    engines: EngineSupervisor,
    watching: "asyncio.Task[str]",
) -> None:
    async def end() -> None:
        engines.core.engines[0].fail("the engine core has been closed")
        engines.core.close()
        watching.cancel()
        await engines.close()

    if thread is threading.current_thread():  # a collection on that thread
        loop.create_task(end()).add_done_callback(lambda _: loop.stop())
        return
    with suppress(EngineError):
        asyncio.run_coroutine_threadsafe(end(), loop).result()
    _stop(loop, thread)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
