"""Where the requests that have not ended stand: waiting, prefilling, decoding."""

from collections import deque

from treetop.scheduler.request import Request
from treetop.types.ids import RequestId


class Queues:
    """Every request that has not ended stands in `by_id` and in one of the three queues.

    waiting: the next first. prefilling, decoding: oldest admission first.
    """

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        self.waiting.append(request)

    def admitted(self, request: Request) -> None:
        """The first that waits has been given a row."""
        first = self.waiting.popleft()
        assert first is request
        self.prefilling.append(request)

    def prefilled(self, request: Request) -> None:
        """Its last chunk is planned."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    def put_back(self, request: Request) -> None:
        """From its row to the head of the queue."""
        self._of(request).remove(request)
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """It has ended."""
        del self.by_id[request.request_id]
        if request.running is None:
            self.waiting.remove(request)
        else:
            self._of(request).remove(request)

    def _of(self, request: Request) -> list[Request]:
        """Where a running request stands."""
        return self.prefilling if request in self.prefilling else self.decoding
