"""Where the requests that have not ended stand: waiting for a grammar, loading, waiting, prefilling, importing,
decoding or exporting.
"""

from bisect import insort
from operator import attrgetter

from treetop.scheduler.request import Request
from treetop.scheduler.shares import Tally
from treetop.types.ids import RequestId

_ORDER = attrgetter("order")


class Queues:
    """Every request that has not ended stands in `by_id` and in one of the seven queues.

    waiting_for_grammar: they have no row and no answer of their constraints.
    loading: they have no row, and K/V of their prompts come from the host.
    waiting: the next first, by `Request.order`. The others: oldest admission first.
    waiting_of, waiting_tally: the same by tenant, and how many there are (`scheduler/shares.py`).
    importing: another worker prefills them.
    exporting: prefilled for another worker, which has not taken all of it.
    """

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.waiting_for_grammar: list[Request] = []
        self.loading: list[Request] = []
        self.waiting: list[Request] = []
        self.waiting_of: dict[str, list[Request]] = {}
        self.waiting_tally = Tally()
        self.prefilling: list[Request] = []
        self.importing: list[Request] = []
        self.decoding: list[Request] = []
        self.exporting: list[Request] = []

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        self._wait(request)

    def grammar_ready(self, request: Request) -> None:
        """It may have a row now."""
        self.waiting_for_grammar.remove(request)
        self._wait(request)

    def loads(self, request: Request) -> None:
        """It waited, and what it has in common with others is on its way."""
        self._wait_no_more(request)
        self.loading.append(request)

    def loaded(self, request: Request) -> None:
        """It may have a row now."""
        self.loading.remove(request)
        self._wait(request)

    def admitted(self, request: Request) -> None:
        """It waited, and has been given a row."""
        self._wait_no_more(request)
        (self.importing if request.remote else self.prefilling).append(request)

    def prefilled(self, request: Request) -> None:
        """Its last chunk is planned."""
        self.prefilling.remove(request)
        (self.decoding if request.export_from is None else self.exporting).append(request)

    def imported(self, request: Request) -> None:
        """All its tokens are in its pages."""
        self.importing.remove(request)
        self.decoding.append(request)

    def put_back(self, request: Request) -> None:
        """From its row to its place in the queue: before all that came later."""
        self._of(request).remove(request)
        self._wait(request)

    def remove(self, request: Request) -> None:
        """It has ended."""
        del self.by_id[request.request_id]
        if request.running is None:
            without_a_row = next((each for each in (self.waiting_for_grammar, self.loading) if request in each), None)
            if without_a_row is not None:
                without_a_row.remove(request)
            else:
                self._wait_no_more(request)
        else:
            self._of(request).remove(request)

    def _wait(self, request: Request) -> None:
        if request.asks:
            self.waiting_for_grammar.append(request)
        else:
            insort(self.waiting, request, key=_ORDER)
            insort(self.waiting_of.setdefault(request.tenant.name, []), request, key=_ORDER)
            self.waiting_tally.add(request, 1)

    def _wait_no_more(self, request: Request) -> None:
        self.waiting.remove(request)
        of_tenant = self.waiting_of[request.tenant.name]
        of_tenant.remove(request)
        if not of_tenant:
            del self.waiting_of[request.tenant.name]
        self.waiting_tally.add(request, -1)

    def _of(self, request: Request) -> list[Request]:
        """Where a running request stands."""
        return next(queue for queue in self.running if request in queue)

    @property
    def pending_grammars(self) -> list[Request]:
        """Those whose constraints have not said yet what may come next."""
        return [*self.waiting_for_grammar, *(request for request in self.decoding if request.asks)]

    @property
    def running(self) -> tuple[list[Request], ...]:
        """The queues of requests that hold rows."""
        return self.prefilling, self.importing, self.decoding, self.exporting
