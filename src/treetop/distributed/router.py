"""Which replica gets a request: the one that holds most of its prompt's pages, unless too many wait there.

What a replica holds is not asked but remembered: the pages of the prompts that were sent there, under the keys of its
prefix cache (`cache/prefix_cache.py`), the least recently used forgotten first, as many as its pool has. Being wrong
costs a prefill, never a token. Host code; `ray/router.py` puts it behind Ray's interface.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from treetop.cache.prefix_cache import page_tokens
from treetop.checks.host import check_alive
from treetop.types.requests import PrefixPages

MAX_PAGES = 2**18
"""Keys kept for a replica at most, about 100 bytes each."""
_SENT_S = 1.0
"""Seconds after which a request that was sent is in the replica's own count, or has gone another way."""

ReplicaId = TypeVar("ReplicaId", bound=Hashable)
Keys = Mapping[tuple[int, int], Sequence[int]]
"""Keys of a prompt's pages, by page size and lookahead."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that is alive.

    num_requests: that it has.
    max_requests: that it runs at a time.

    prefix: how it keeps pages; None if it keeps none, or has not said.
    """

    num_requests: int
    max_requests: int
    prefix: PrefixPages | None


@dataclass(slots=True, eq=False)
class _Replica:
    """What is known of a replica.

    pages: keys, least recently used first.
    turn: when it was chosen last.
    """

    load: ReplicaLoad
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)
    turn: int = 0

    def num_held(self, keys: Sequence[int]) -> int:
        """How many of a prompt's first pages it holds."""
        return next((index for index, key in enumerate(keys) if key not in self.pages), len(keys))

    def add(self, keys: Sequence[int]) -> None:
        """It has these pages from now on; a page is forgotten before those in front of it."""
        assert self.load.prefix is not None
        for key in reversed(keys):
            self.pages[key] = None
            self.pages.move_to_end(key)
        while len(self.pages) > min(self.load.prefix.capacity, MAX_PAGES):
            self.pages.popitem(last=False)


class PrefixRouter(Generic[ReplicaId]):
    """Chooses among replicas that are alive. Not thread-safe.

    A replica is near if it has at most `queue_bound` requests more than the one that has fewest. Among those that are
    near the one with most of the prompt's pages is chosen, then the one with fewest requests, then the one that was
    chosen longest ago.
    """

    def __init__(self, queue_bound: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """queue_bound: requests; None is a quarter of what the replica runs at a time, at least two. clock: seconds."""
        self._queue_bound, self._clock = queue_bound, clock
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._sent: OrderedDict[Hashable, tuple[ReplicaId, float]] = OrderedDict()
        self._num_chosen = 0

    def choose(
        self, request: Hashable, ids: Sequence[int], alive: Mapping[ReplicaId, ReplicaLoad], salt: str = ""
    ) -> list[ReplicaId]:
        """The replicas in the order in which the request is to be offered to them, none if none is alive.

        request: names it; it may be asked for again if none of them took it. salt: of its pages. Raises CheckError for
        a replica that is not alive.
        """
        for replica, load in alive.items():
            self._replicas.setdefault(replica, _Replica(load)).load = load
        self._forget_dead(alive)
        if not self._replicas:
            return []
        self._sent.pop(request, None)
        queue, keys = self._queues(), self._keys(ids, salt)
        shortest = min(queue.values())
        held = {name: known.num_held(self._own(known, keys)) for name, known in self._replicas.items()}

        def rank(name: ReplicaId) -> tuple[int, int, int]:
            near = queue[name] - shortest <= self._bound(self._replicas[name])
            return (-held[name] if near else 1, queue[name], self._replicas[name].turn)

        order = sorted(self._replicas, key=rank)
        for name in order:
            check_alive(name, alive)
        self._send(request, order[0], keys)
        return order

    def routed(self, request: Hashable, ids: Sequence[int], replica: ReplicaId, salt: str = "") -> None:
        """A replica has taken the request, and counts it itself from now on."""
        chosen = self._sent.pop(request, None)
        if (chosen is None or chosen[0] != replica) and replica in self._replicas:
            self._remember(replica, self._keys(ids, salt))

    def num_pages(self, replica: ReplicaId) -> int:
        """Keys that are kept for a replica."""
        return len(self._replicas[replica].pages) if replica in self._replicas else 0

    # ---------------------------------------------------------------- inside

    def _forget_dead(self, alive: Mapping[ReplicaId, ReplicaLoad]) -> None:
        """A replica that comes back under its name comes back empty."""
        for name in self._replicas.keys() - alive.keys():
            del self._replicas[name]

    def _queues(self) -> dict[ReplicaId, int]:
        """Requests of each replica, with those that are on their way to it."""
        queue = {name: known.load.num_requests for name, known in self._replicas.items()}
        since = self._clock() - _SENT_S
        while self._sent and next(iter(self._sent.values()))[1] < since:
            self._sent.popitem(last=False)
        for name, _ in self._sent.values():
            if name in queue:
                queue[name] += 1
        return queue

    def _bound(self, known: _Replica) -> int:
        return max(known.load.max_requests // 4, 2) if self._queue_bound is None else self._queue_bound

    def _send(self, request: Hashable, name: ReplicaId, keys: Keys) -> None:
        self._num_chosen += 1
        self._replicas[name].turn = self._num_chosen
        self._sent[request] = (name, self._clock())
        self._remember(name, keys)

    def _remember(self, name: ReplicaId, keys: Keys) -> None:
        known = self._replicas[name]
        if own := self._own(known, keys):
            known.add(own)

    def _own(self, known: _Replica, keys: Keys) -> Sequence[int]:
        prefix = known.load.prefix
        return () if prefix is None else keys.get((prefix.page_size, prefix.lookahead), ())

    def _keys(self, ids: Sequence[int], salt: str) -> Keys:
        """Replicas of one model cut prompts alike, but while one takes the other's place they may not."""
        shapes = {
            (prefix.page_size, prefix.lookahead)
            for known in self._replicas.values()
            if (prefix := known.load.prefix) is not None
        }
        return {shape: page_keys(ids, *shape, salt) for shape in shapes}


def page_keys(ids: Sequence[int], page_size: int, lookahead: int, salt: str = "") -> list[int]:
    """A number for each page of a prompt that the prefix cache may have, all but the one of the last token.

    It stands for the page and all before it; two that are equal by chance, one in 2^64, cost a prefill.
    """
    keys: list[int] = []
    for tokens in page_tokens(ids, page_size, lookahead, 0, (len(ids) - 1) // page_size, salt):
        keys.append(hash((keys[-1] if keys else 0, tokens)))
    return keys
