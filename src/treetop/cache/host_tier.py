"""The tier of K/V on the host: books of what was let go of on the device, and copies between both.

    save    a request lets go of its pages: its tokens wait  -> pages of both sides are leased -> copied -> cached there
    load    more of a request's prompt is known there -> pages of both sides are leased -> copied -> cached here

The tier is a second `KVCacheManager`, over pages on the host: the same trie, salts, windows, checkpoints and order of
eviction. A copy goes from a lease of one side to a lease of the other, so neither is evicted meanwhile, and a page
enters a prefix cache once it has arrived. What is loaded is found by its request as any other prefix is.

A page goes with those of all groups, the draft's among them: who finds one finds all. What a request without a draft
leaves or loads goes without the draft's pages.
"""

import logging
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from treetop.cache.disk_tier import DiskTier, Wanted
from treetop.cache.kv_cache_manager import KVCacheManager, Lease
from treetop.cache.prefix_cache import CacheWatcher
from treetop.types.errors import CheckError
from treetop.types.ids import NULL_PAGE, GroupName, PageId, RequestId
from treetop.types.layout import Layout
from treetop.types.messages import OffloadPlan, PageCopy
from treetop.types.requests import HostTierStats

log = logging.getLogger("treetop")

LEAST_TOKENS = 64
"""That a load brings at least: fewer ride along in a prefill step that is made anyway."""
MOST_SAVES = 256
"""Requests whose pages wait to be saved; of more the oldest are not."""


@dataclass(slots=True)
class _Job:
    """A copy on its way from one side to the other, as the leases of both say.

    rest: what no plan has taken.
    fetched: of a load, what the plan before has brought to the device; the next one puts it into pages.
    num_tokens: that `to` holds once it is done.
    states: of a load of recurrent states, the slot on the device that gets them.
    copied: pages of `to` that have been copied.
    """

    wanted: Wanted
    giver: KVCacheManager
    taker: KVCacheManager
    source: Lease
    to: Lease
    rest: deque[PageCopy]
    num_tokens: int
    states: int | None
    fetched: tuple[PageCopy, ...] = ()
    copied: set[tuple[GroupName, PageId]] = field(default_factory=set)

    @property
    def saves(self) -> bool:
        return self.wanted.request_id is None


class HostTier:
    """Which pages the host has, and what is copied next. Host code: the engine copies (`engine/offloading/`)."""

    def __init__(
        self, layout: Layout, kv_cache: KVCacheManager, check_level: int, disk: DiskTier | None = None
    ) -> None:
        """kv_cache: of the device. disk: below the host."""
        self._disk = disk
        self._layout, self._device, self._check_level = layout, kv_cache, check_level
        self._has_windows = any(group.window is not None for group in layout.groups)
        self._watcher: CacheWatcher | None = None
        self._saves: deque[Wanted] = deque(maxlen=MOST_SAVES)
        self._loads: deque[Wanted] = deque()
        self._job: _Job | None = None
        self._is_out = False  # a plan of the job
        self._loaded: list[RequestId] = []
        self.counts = HostTierStats()
        """Since the start, also of books before these."""
        self._open()

    def _open(self) -> None:
        """The host has nothing."""
        assert self._layout.host is not None
        self._host = KVCacheManager(self._layout.host, True, self._check_level)
        if self._watcher is not None:
            self._host.watch(self._watcher)
        if self._disk is not None:
            self._disk.open(self._host)

    def watch(self, watcher: CacheWatcher) -> None:
        """Tell which pages the host has. It has none still."""
        self._watcher = watcher
        self._host.watch(watcher)

    # ---------------------------------------------------------------- what is wanted

    @property
    def has_work(self) -> bool:
        return bool(self._saves or self._loads or self._job or (self._disk is not None and self._disk.has_work))

    @property
    def waits_for(self) -> "list[Future[int]]":
        """What the disk does now."""
        return [] if self._disk is None else self._disk.waits_for

    def left(self, ids: Sequence[int], salt: str, num_prompt: int, drafts: bool = True) -> None:
        """A request lets go of the pages of these tokens: what the prefix cache keeps of them is to be saved.

        Of a window the pages before the end of its prompt, too: a next turn may write what came after it otherwise.
        """
        if self._has_windows and num_prompt < len(ids):
            self._saves.append(Wanted(ids[:num_prompt], salt, drafts=drafts))
        if ids:
            self._saves.append(Wanted(ids, salt, drafts=drafts))

    def load(self, request_id: RequestId, ids: Sequence[int], salt: str, drafts: bool = True) -> bool:
        """Whether that is worth it: the host knows more of these tokens than the device. `loaded` tells its end."""
        wanted, known = Wanted(ids, salt, request_id, drafts), (ids, salt, drafts)
        here, there = self._device.num_known(*known), self._host.num_known(*known)
        below = 0 if self._disk is None else self._disk.num_known(*known)
        if max(there, below) - here < LEAST_TOKENS:
            return False
        if self._disk is not None and below > there:
            self._disk.load(wanted)
        else:
            self._loads.append(wanted)
        return True

    def forget(self, request_id: RequestId) -> None:
        """It has ended: nothing is loaded for it any more. A load that has begun ends by itself."""
        self._loads = deque(each for each in self._loads if each.request_id != request_id)
        if self._disk is not None:
            self._disk.forget(request_id)

    def loaded(self) -> list[RequestId]:
        """Whose loads have ended since the last call, well or not."""
        loaded, self._loaded = self._loaded, []
        return loaded

    # ---------------------------------------------------------------- plans and results

    def plan(self) -> OffloadPlan | None:
        """What is copied next; None if nothing is, or a plan is out. Loads go first: somebody waits for them."""
        if self._disk is not None:
            self._disk.go_on()
            self._loads.extend(self._disk.arrived())
        while self._job is None and (self._loads or self._saves):
            self._job = self._begin((self._loads or self._saves).popleft())
        job = self._job
        if job is None or self._is_out:
            return None
        moved, counts = list[PageCopy](), Counter[GroupName]()
        for _ in range(len(job.rest)):
            each = job.rest.popleft()
            counts[each.group] += 1
            (moved if counts[each.group] <= self._layout.copied(each.group) else job.rest).append(each)
        self._is_out, freed, now = True, self._device.take_freed(), tuple(moved)
        job.copied.update((each.group, each.host_page if job.saves else each.page) for each in now)
        if job.saves:
            return OffloadPlan(freed, saves=now)
        arrived, job.fetched = job.fetched, now
        states = None if now or job.states is None else (job.states, job.num_tokens)
        return OffloadPlan(freed, fetches=now, unpacks=arrived, states=states)

    def commit(self, intact: bool) -> None:
        """The plan that was out is done. intact: every page that came from the host is what once went there."""
        job, self._is_out = self._job, False
        assert job is not None
        if not intact:
            log.error("K/V on the host are damaged: all of them are forgotten")
            self._end(job)
            self.counts = self.counts._replace(failed_loads=self.counts.failed_loads + 1)
            self._open()
        elif not job.rest and not job.fetched:
            if self._check_level >= 1:
                _check_copied(job)
            shared = job.to.shared
            job.taker.insert(job.to, job.wanted.ids)
            job.taker.place_checkpoint(job.to, job.num_tokens)
            self._count(job, job.num_tokens - shared * self._layout.page_size)
            self._end(job)
            if job.saves and self._disk is not None:
                self._disk.save(job.wanted)

    def _begin(self, wanted: Wanted) -> _Job | None:
        """Lease pages of both sides; None, and nobody leases any, if there is nothing to copy or no room for it."""
        saves = wanted.request_id is None
        giver, taker = (self._device, self._host) if saves else (self._host, self._device)
        source, to = (open_lease(side, wanted) for side in (giver, taker))
        job = _Job(wanted, giver, taker, source, to, deque(), source.shared * self._layout.page_size, None)
        if source.shared > to.shared and self._grow(job):
            return job
        self._end(job)
        return None

    def _grow(self, job: _Job) -> bool:
        """Pages for all that is to come, and the list of copies; False if the side that takes them has no room."""
        to, total = job.to, job.num_tokens
        job.taker.slide(to, total)
        if job.taker.reserve(to, total, total, total) is None:
            return False
        kept = job.giver.checkpoint_of(job.source)
        if kept is not None:  # first of all: its slot may be another's once this plan is out
            slot = job.taker.lease_checkpoint(to, total)
            if slot is None:
                return False
            job.states = slot
            job.rest += [self._copy(job, group.name, kept, slot) for group in self._layout.state_groups]
        for group, pages in to.pages.items():
            for column, page in enumerate(pages[to.shared :], start=to.shared):
                if page != NULL_PAGE:
                    job.rest.append(self._copy(job, group, job.source.pages[group][column], page))
        return True

    def _copy(self, job: _Job, group: GroupName, given: int, taken: int) -> PageCopy:
        device, host = (given, taken) if job.saves else (taken, given)
        return PageCopy(group, PageId(device), PageId(host))

    def _end(self, job: _Job) -> None:
        """Neither side is leased any more."""
        job.taker.release(job.to)
        job.giver.release(job.source)
        self._host.take_freed()  # nobody asks what pages on the host held
        self._job = None
        if job.wanted.request_id is not None:
            self._loaded.append(job.wanted.request_id)

    def _count(self, job: _Job, tokens: int) -> None:
        name = "saved_tokens" if job.saves else "loaded_tokens"
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + tokens})

    # ---------------------------------------------------------------- inspection

    @property
    def stats(self) -> HostTierStats:
        counts = self.counts._replace(usage_perc=self._host.share_cached)
        if self._disk is None:
            return counts
        disk = self._disk
        return counts._replace(
            disk_saved_tokens=disk.saved_tokens,
            disk_loaded_tokens=disk.loaded_tokens,
            disk_damaged_pages=disk.store.num_damaged,
            disk_bytes=disk.store.num_bytes,
        )

    @property
    def leases(self) -> list[Lease]:
        """Of the device."""
        return [] if self._job is None else [self._job.source if self._job.saves else self._job.to]

    def check(self) -> None:
        """Raise OwnershipError unless all pages on the host are accounted for. O(pages)."""
        own = [] if self._job is None else [self._job.to if self._job.saves else self._job.source]
        self._host.check(own + ([] if self._disk is None else self._disk.leases))


def open_lease(side: KVCacheManager, wanted: Wanted) -> Lease:
    """What a side has of wanted tokens, of their salt alone, in all groups that are wanted."""
    return side.open(wanted.ids, wanted.salt, wanted.drafts)[0]


def _check_copied(job: _Job) -> None:
    """Raise CheckError unless every page that enters a prefix cache was copied, in all groups, from one of its salt."""
    source, to = job.source, job.to
    if source.salt != to.salt:
        raise CheckError(f"pages of salt {source.salt!r} were copied for salt {to.salt!r}")
    for group, pages in to.pages.items():
        lacks = [page for page in pages[to.shared :] if page != NULL_PAGE and (group, page) not in job.copied]
        if lacks:
            raise CheckError(f"{job.num_tokens} tokens were copied, but not their pages {lacks} of group {group}")
