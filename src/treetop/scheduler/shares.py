"""Fair shares of the rows: of tenants, and within each of requests, whose choices share as one.

A row that is free goes to the tenant that holds fewest, and there to the request that holds fewest, of several alike to
the one that came first; all of them of the most urgent priority that waits. Where nobody is alone with many rows, that
is the order of their coming. When no row is free, whoever holds at least two more than the next in turn gives one way:
its request that is last in order goes back to the queue, with what it has, until no row that is moved would make shares
more equal. So one request's choices, or one key's requests, have all rows only while nobody else waits.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from treetop.types.ids import RequestId

if TYPE_CHECKING:  # they count themselves here
    from treetop.scheduler.adapters import Adapter
    from treetop.scheduler.queues import Queues
    from treetop.scheduler.request import Request
    from treetop.scheduler.rows import Rows


class Tally:
    """How many of some requests are each tenant's, by its name, and each group's; whoever has none is not in it.

    groups: of each tenant.
    """

    def __init__(self) -> None:
        self.tenants, self.groups = Counter[str](), dict[str, Counter[RequestId]]()

    def add(self, request: "Request", count: int) -> None:
        name = request.tenant.name
        groups = self.groups.setdefault(name, Counter())
        self.tenants[name] += count
        groups[request.group] += count
        if not groups[request.group]:
            del groups[request.group]
        if not groups:
            del self.groups[name], self.tenants[name]

    def of_group(self, request: "Request") -> int:
        return self.groups[request.tenant.name][request.group] if request.tenant.name in self.groups else 0

    @property
    def has_more_than_one_each(self) -> bool:
        """Whether there are several of a group, or several tenants: else each is alone, and has as much as any."""
        return len(self.tenants) > 1 or any(len(self.groups[name]) < count for name, count in self.tenants.items())

    def copy(self) -> "Tally":
        twin = Tally()
        twin.tenants = self.tenants.copy()
        twin.groups = {name: groups.copy() for name, groups in self.groups.items()}
        return twin


class Shares:
    """Who has the next row, and who gives one way."""

    def __init__(self, queues: "Queues", rows: "Rows") -> None:
        self._queues, self._rows = queues, rows

    def first(self, blocked: "Collection[Adapter]" = ()) -> "Request | None":
        """The waiting request that has the next row; None if none waits, or all tenants of those that do have as many
        as they may. blocked: adapters whose requests are passed over.
        """
        return self._next(self._rows.tally, frozenset(), blocked)

    def first_few(self, count: int) -> "list[Request]":
        """Requests that may have the next row before others that wait; one, where who comes next depends on shares."""
        few = self._by_order(count)
        return [each for each in (self.first(),) if each is not None] if few is None else few

    def in_turn(self, count: int, coming: "Sequence[Request]") -> "list[Request]":
        """Those that have the next rows, in their order, if all of them are given. coming: who has rows before them."""
        few = self._by_order(count)
        if few is not None or not count:
            return few or []
        held = self._rows.tally.copy()
        taken: dict[Request, None] = {}
        for each in coming:
            held.add(each, 1)
        while len(taken) < count and (request := self._next(held, taken.keys())) is not None:
            taken[request] = None
            held.add(request, 1)
        return [*taken]

    def _by_order(self, count: int) -> "list[Request] | None":
        """The first that wait; None where who comes next depends on shares."""
        waiting, of_each = self._queues.waiting, [*self._queues.waiting_tally.groups.values()]
        alone = len(of_each) == 1 and len(of_each[0]) == len(waiting) and waiting[0].tenant.max_rows is None
        return waiting[:count] if alone else None

    def over(self, lacks_pages: "Request | None", blocked: "Collection[Adapter]" = ()) -> "list[Request]":
        """The running requests that give way to some that wait, no step of which may be out then.

        lacks_pages: who would come next if there were pages, though a row is free. blocked: as of `first`.
        """
        held = self._rows.tally
        if not self._queues.waiting or not held.has_more_than_one_each:
            return []
        claimant = self.first(blocked)
        num_free = 0 if claimant is lacks_pages else self._rows.num_free
        if num_free or claimant is None:
            return []
        held = held.copy()
        taken: set[Request] = set()
        given: list[Request] = []
        while claimant is not None and (victim := self._fullest(claimant, held, given)) is not None:
            given.append(victim)
            taken.add(claimant)
            held.add(victim, -1)
            held.add(claimant, 1)
            claimant = self._next(held, taken, blocked)
        return given

    def _next(
        self, held: Tally, taken: "AbstractSet[Request]", blocked: "Collection[Adapter]" = ()
    ) -> "Request | None":
        """As `first`, where rows are held so, and without those that are taken."""
        heads = [self._next_of(name, held, taken, blocked) for name in self._queues.waiting_of]
        able = [each for each in heads if each is not None]
        return min(able, key=lambda each: (each.order[0], held.tenants[each.tenant.name], each.order), default=None)

    def _next_of(
        self, name: str, held: Tally, taken: "AbstractSet[Request]", blocked: "Collection[Adapter]"
    ) -> "Request | None":
        """The same among requests of one tenant. It looks at no more of them than come before the one, but where that
        has rows, or is taken.
        """
        best, fewest, maximum = None, 0, self._queues.waiting_of[name][-1].tenant.max_rows  # what holds today
        if maximum is not None and held.tenants[name] >= maximum:
            return None
        holding, waiting = held.groups.get(name, Counter()), self._queues.waiting_tally.groups[name]
        both = [count for group, count in holding.items() if group in waiting]
        least = 0 if len(both) < len(waiting) else min(both)
        for request in self._queues.waiting_of[name]:
            if best is not None and request.order[0] != best.order[0]:
                break
            count = holding[request.group]
            if (best is not None and count >= fewest) or request in taken or request.adapter in blocked:
                continue
            best, fewest = request, count
            if count == least:
                break
        return best

    def _fullest(self, claimant: "Request", held: Tally, given: "list[Request]") -> "Request | None":
        """Who gives way to a request, but for those that have; None if shares are as equal as they can be."""
        name = claimant.tenant.name

        def rank(request: "Request") -> tuple[int, int, tuple[int, int]]:
            return held.tenants[request.tenant.name], held.of_group(request), request.order

        loose = [each for each in self._loose(claimant) if each not in given]
        other = max((each for each in loose if each.tenant.name != name), key=rank, default=None)
        if other is not None and held.tenants[other.tenant.name] >= held.tenants[name] + 2:
            return other
        own = max((each for each in loose if each.tenant.name == name), key=rank, default=None)
        return own if own is not None and held.of_group(own) >= held.of_group(claimant) + 2 else None

    def _loose(self, claimant: "Request") -> "Iterator[Request]":
        """Those that may be put back for a request: not more urgent, and not prefilled for another worker."""
        for queue in (self._queues.prefilling, self._queues.decoding):
            for each in queue:
                if each.order[0] >= claimant.order[0] and not each.keeps_its_pages and each.export_from is None:
                    yield each
