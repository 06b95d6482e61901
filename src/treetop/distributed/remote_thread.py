"""Engine processes behind the interface of a `CoreThread`: their client, on an event loop of its own thread."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

from treetop.core.loop import Deliver
from treetop.core.wire import ProcessOptions
from treetop.distributed.supervisor import EngineSupervisor
from treetop.types.errors import EngineError, TreetopError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate

Result = TypeVar("Result")


class RemoteThread:
    """See `CoreThread`. An engine that dies is not started again. Raises UserError, EngineError if it cannot start."""

    def __init__(self, process: ProcessOptions) -> None:
        """process: what each engine process is told, but for address and rank."""
        self._loop = asyncio.new_event_loop()
        self._ids, self._alive = count(), dict[RequestId, Deliver]()
        self._thread = threading.Thread(target=self._loop.run_forever, name="treetop-client", daemon=True)
        self._thread.start()
        try:
            engines, watching = self._call(_started(process))
        except BaseException:
            _stop(self._loop, self._thread)
            raise
        self.core = engines.core
        self.close = weakref.finalize(self, _close, self._loop, self._thread, engines, watching)
        """End the engines and the thread; any number of times."""

    @property
    def alive(self) -> bool:
        return self.close.alive

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """As `CoreThread.add`."""
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

        self._loop.call_soon_threadsafe(add)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """As `CoreThread.abort`."""
        core, alive = self.core, self._alive

        def abort() -> None:
            core.abort(request_ids)
            for request_id in request_ids:
                if (deliver := alive.pop(request_id, None)) is not None:
                    deliver([RequestUpdate(request_id, (), None, "abort")])

        if self.alive:
            self._loop.call_soon_threadsafe(abort)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._loop.call_soon_threadsafe(self.core.finish, request_id, num_tokens)

    def update_weights(self, model: str | None, draft: str | None) -> None:
        """As `CoreThread.update_weights`."""
        self._call(self.core.update_weights(model, draft))

    def flush(self) -> None:
        """Wait until what was said before this has been sent."""
        if self.alive and threading.current_thread() is not self._thread:
            self._call(asyncio.sleep(0))

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
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
