"""A core and its clients: whom to tell of each request, and who waits for what is in flight. One thread calls it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from treetop.types.errors import InputError, TreetopError, UserError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreLoad, EngineRequest, RequestUpdate

if TYPE_CHECKING:  # needs an extra
    from treetop.disaggregation.connector import Connector

Deliver = Callable[[list[RequestUpdate]], None]
"""Takes a step's updates of one client, on the core's thread; it must not wait and not raise."""


class Core(Protocol):
    """What turns requests into updates, step by step; see `EngineCore`, which is one."""

    @property
    def busy(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def load(self) -> CoreLoad: ...

    @property
    def num_launched(self) -> int: ...

    @property
    def num_committed(self) -> int: ...

    @property
    def stalled(self) -> bool: ...

    def add(self, request: EngineRequest, remote: bool = False) -> None: ...

    def abort(self, request_id: RequestId) -> RequestUpdate | None: ...

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None: ...

    def step(self) -> list[RequestUpdate]: ...

    def fail(self, error: BaseException) -> list[RequestUpdate]: ...


class Inbox(Protocol):
    """Where a loop's commands come from: a queue of this process (`core/thread.py`), or a socket."""

    def take(self, loop: "CoreLoop") -> bool:
        """Apply what has come, and wait for something to come if the loop is idle. False ends the loop."""
        ...


class Peers(Protocol):
    """Other ranks, in whose steps this one takes part also without requests of its own; see `Lockstep`."""

    def called(self) -> bool: ...

    def rest(self) -> None: ...


class CoreLoop:
    """Applies the commands of clients between steps, and delivers each step's updates.

    role: the worker's KV connector, if it has one. peers: other ranks, if there are any.
    """

    def __init__(self, core: Core, role: "Connector | None" = None, peers: Peers | None = None) -> None:
        self.core, self.role, self.peers = core, role, peers
        self._clients: dict[RequestId, Deliver] = {}
        self._flushes: list[tuple[int, threading.Event]] = []  # set once so many steps have been committed

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until something comes."""
        return self.core.stalled or not self.core.busy

    def run(self, inbox: Inbox) -> None:
        """Until the inbox says that it is over. Raises nothing of the engine's: its failures are told in updates."""
        while inbox.take(self):
            if self.role is not None:  # before the step, which does what the role tells the scheduler
                self.role.poll(time.monotonic())
            if self.core.busy:
                self.step()
            if self.peers is not None and self.idle and self.peers.called():
                self.peers.rest()

    @property
    def load(self) -> CoreLoad:
        return self.core.load if self.role is None else self.core.load._replace(handover=self.role.load)

    def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """Queue requests together. One that can never run, or not here, is told so in its last update."""
        refused = None if self.role is None else self.role.refuses
        if refused is not None:
            deliver([RequestUpdate(each.request_id, (), None, "abort", refused) for each in requests])
            return
        for request in requests:
            try:
                self.core.add(request, self.role is not None and self.role.asks)
            except TreetopError as error:
                refusal = RequestUpdate(request.request_id, (), finish_reason="abort", error=str(error))
                failed, asked = not isinstance(error, UserError), isinstance(error, InputError)
                deliver([refusal._replace(engine_failed=failed, user_error=asked)])
            else:
                self._clients[request.request_id] = deliver

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        ended = [self.core.abort(request_id) for request_id in request_ids]
        self._tell([update for update in ended if update is not None])

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        if self.core.finish(request_id, num_tokens) is not None:
            del self._clients[request_id]

    def leave(self, deliver: Deliver) -> None:
        """A client has gone: its requests end."""
        self.abort([request_id for request_id, each in self._clients.items() if each is deliver])

    def flush(self, done: threading.Event) -> None:
        """Set `done` once nothing is in flight that is now."""
        self._flushes.append((self.core.num_launched, done))
        self._wake()

    def step(self) -> None:
        self._tell(self.core.step())
        if self._flushes:
            self._wake()

    def end(self, error: BaseException) -> None:
        """End every request with this error."""
        self._tell(self.core.fail(error))
        self._wake()

    def _tell(self, updates: Sequence[RequestUpdate]) -> None:
        """Each client its own updates, in one call. A request that was given to the scheduler itself has no client."""
        by_client: dict[Deliver, list[RequestUpdate]] = {}
        for update in updates:
            request_id = update.request_id
            known = self._clients.get if update.finish_reason is None else self._clients.pop
            deliver = known(request_id, None)
            if deliver is not None:
                by_client.setdefault(deliver, []).append(update)
        for deliver, mine in by_client.items():
            deliver(mine)

    def _wake(self) -> None:
        committed = self.core.num_committed
        for _, done in (flush for flush in self._flushes if flush[0] <= committed):
            done.set()
        self._flushes = [flush for flush in self._flushes if flush[0] > committed]
