"""The tier of K/V on disk, below the one on the host: which pages go there and come back, beside the steps.

    write   a request's pages have come to the host  -> leased there -> copies have landed -> written, a file a page
    read    a prompt is known further on disk        -> pages on the host are leased -> read, checked -> cached there

A page's key is a digest of all tokens up to its end, its salt, what K/V depend on beside them (`made_for`), and whether
it goes without the draft's K/V, so no page is ever another's. One thread writes, some read. What is read enters the
host's prefix cache as far as it is whole, and goes on to the device as what lay there does.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple, Protocol

from treetop.cache.disk_store import KEY_BYTES, DiskStore, Views
from treetop.cache.kv_cache_manager import KVCacheManager, Lease
from treetop.cache.prefix_cache import page_tokens
from treetop.types.ids import GroupName, PageId, RequestId
from treetop.types.layout import Layout

MOST_WRITES = 256
"""Requests whose pages wait to be written; of more the oldest are not."""

READERS = 4
"""Pages that are read at a time."""

Pages = Mapping[GroupName, Sequence[PageId]]
"""On the host, by column."""


class Landed(Protocol):
    """Copies to the host that were on their way."""

    def ready(self) -> bool:
        """Whether all have landed."""
        ...


class HostMemory(Protocol):
    """Pages on the host, as an engine has them. What its methods give may be used on threads."""

    def landed(self, pages: Pages) -> Landed:
        """Of all copies so far."""
        ...

    def views(self, pages: Pages) -> Sequence[Views]:
        """The bytes of each column."""
        ...

    def intact(self, landed: Landed, pages: Pages) -> Sequence[bool]:
        """Whether each column has the checksums of what left the device."""
        ...

    def sums(self, pages: Pages) -> Mapping[GroupName, Sequence[int]]:
        """Checksums of what pages hold now."""
        ...

    def arrived(self, pages: Pages, sums: Mapping[GroupName, Sequence[int]]) -> None:
        """These are what the pages must be when they are loaded."""
        ...


class Wanted(NamedTuple):
    """What is to be copied: of these tokens whatever one side has and the other has not.

    request_id: whose prompt is loaded; None for a save.
    drafts: with the draft's groups.
    """

    ids: Sequence[int]
    salt: str
    request_id: RequestId | None = None
    drafts: bool = True


@dataclass(slots=True)
class _DiskJob:
    """Pages on the host that are leased while files are written or read.

    keys: of all columns, those before `begin` included, which are not copied. pages: of the others.
    ends: how many pages went well, from the first on; None until it has begun.
    """

    wanted: Wanted
    lease: Lease
    begin: int
    keys: list[bytes]
    pages: dict[GroupName, list[PageId]]
    landed: Landed
    ends: "Future[int] | None" = None
    sums: Mapping[GroupName, Sequence[int]] | None = None


class DiskTier:
    """Books of what is written and read. Host code: one thread calls it, but for what its own threads do."""

    def __init__(self, store: DiskStore, memory: HostMemory, layout: Layout, made_for: str) -> None:
        """layout: of the pages on the host."""
        self.store, self._memory, self._layout = store, memory, layout
        self._root, self._without_draft = (
            blake2b((made_for + kind).encode(), digest_size=KEY_BYTES).digest() for kind in ("", " without the draft's")
        )
        self._threads = {each: ThreadPoolExecutor(1, f"treetop-disk-{each}") for each in ("write", "read")}
        self._readers = ThreadPoolExecutor(READERS, "treetop-disk-page")
        self._writes: deque[Wanted] = deque(maxlen=MOST_WRITES)
        self._reads: deque[Wanted] = deque()
        self._writing: _DiskJob | None = None
        self._reading: _DiskJob | None = None
        self._arrived: list[Wanted] = []
        self._host: KVCacheManager | None = None
        self.saved_tokens = self.loaded_tokens = 0

    def open(self, host: KVCacheManager) -> None:
        """The host's books begin anew, and its pages are another's: what is on its way ends first."""
        wait(self.waits_for)
        self._arrived += [each.wanted for each in (self._reading,) if each is not None]
        self._arrived += self._reads
        self._writing = self._reading = None
        self._writes.clear()
        self._reads.clear()
        self._host = host

    # ---------------------------------------------------------------- what is wanted

    @property
    def has_work(self) -> bool:
        return bool(self._writes or self._reads or self._writing or self._reading or self._arrived)

    @property
    def waits_for(self) -> "list[Future[int]]":
        """What its threads do now."""
        jobs = [each for each in (self._writing, self._reading) if each is not None]
        return [each.ends for each in jobs if each.ends is not None]

    def num_known(self, ids: Sequence[int], salt: str, drafts: bool = True) -> int:
        """Tokens of a prompt that are on disk, one at least left to compute. Who has no draft finds both kinds."""
        found = self._num_known(Wanted(ids, salt))
        return found if drafts else max(found, self._num_known(Wanted(ids, salt, drafts=False)))

    def _num_known(self, wanted: Wanted) -> int:
        """Of the kind that is wanted."""
        keys = self._keys(wanted, (len(wanted.ids) - 1) // self._layout.page_size)
        return self._layout.page_size * sum(1 for _ in takewhile(self.store.holds, keys))

    def save(self, wanted: Wanted) -> None:
        """The host has got pages of these tokens."""
        self._writes.append(wanted)

    def load(self, wanted: Wanted) -> None:
        """Of the two kinds that suit who has no draft, the one that reaches further."""
        of_both = wanted._replace(drafts=True)
        self._reads.append(of_both if self._num_known(of_both) >= self._num_known(wanted) else wanted)

    def forget(self, request_id: RequestId) -> None:
        """It has ended. A read that has begun ends by itself."""
        self._reads = deque(each for each in self._reads if each.request_id != request_id)

    def arrived(self) -> list[Wanted]:
        """What has been read since the last call, as far as it was whole."""
        arrived, self._arrived = self._arrived, []
        return arrived

    # ---------------------------------------------------------------- between two steps

    def go_on(self) -> None:
        """End what is done, and begin what is next."""
        job = self._writing
        if job is not None and job.ends is not None and job.ends.done():
            self.saved_tokens += job.ends.result() * self._layout.page_size
            self._end(job)
            self._writing = None
        while self._writing is None and self._writes:
            self._writing = self._begin_write(self._writes.popleft())
        self._start(self._writing, "write")
        job = self._reading
        if job is not None and job.ends is not None and job.ends.done():
            self._take(job, job.ends.result())
            self._end(job)
            self._reading = None
        while self._reading is None and self._reads:
            self._reading = self._begin_read(self._reads.popleft())
        self._start(self._reading, "read")

    def _start(self, job: _DiskJob | None, kind: str) -> None:
        if job is not None and job.ends is None and job.landed.ready():
            job.ends = self._threads[kind].submit(self._write if kind == "write" else self._read, job)

    def _end(self, job: _DiskJob) -> None:
        assert self._host is not None
        self._host.release(job.lease)
        self._host.take_freed()
        if job.wanted.request_id is not None:
            self._arrived.append(job.wanted)

    def _begin_write(self, wanted: Wanted) -> _DiskJob | None:
        """What the host has of these tokens and the disk has not; None if there is nothing."""
        assert self._host is not None
        lease, _ = self._host.open(wanted.ids, wanted.salt, wanted.drafts)
        keys = [*self._keys(wanted, lease.shared)]
        self.store.used(keys)
        begin = next((at for at, key in enumerate(keys) if not self.store.holds(key)), len(keys))
        if begin < len(keys):
            return self._job(wanted, lease, begin, keys)
        self._host.release(lease)
        return None

    def _begin_read(self, wanted: Wanted) -> _DiskJob | None:
        """Lease pages for what the disk has and the host has not; None if there is nothing, or no room."""
        assert self._host is not None
        total = self._num_known(wanted)
        lease, _ = self._host.open(wanted.ids, wanted.salt, wanted.drafts)
        keys = [*self._keys(wanted, total // self._layout.page_size)]
        if lease.shared < len(keys) and self._host.reserve(lease, total, total, total) is not None:
            return self._job(wanted, lease, lease.shared, keys)
        self._host.release(lease)
        self._host.take_freed()
        self._arrived.append(wanted)
        return None

    def _job(self, wanted: Wanted, lease: Lease, begin: int, keys: list[bytes]) -> _DiskJob:
        pages = {group: held[begin : len(keys)] for group, held in lease.pages.items()}
        return _DiskJob(wanted, lease, begin, keys, pages, self._memory.landed(pages))

    def _take(self, job: _DiskJob, count: int) -> None:
        """The first pages are whole: the host's prefix cache has them from now on."""
        assert self._host is not None
        if count and job.sums is not None:
            whole = {group: pages[:count] for group, pages in job.pages.items()}
            self._memory.arrived(whole, {group: sums[:count] for group, sums in job.sums.items()})
            num_tokens = (job.begin + count) * self._layout.page_size
            self._host.insert(job.lease, job.wanted.ids[: num_tokens + int(self._layout.has_draft)])
            self.loaded_tokens += count * self._layout.page_size
            self.store.used([*self._keys(job.wanted, job.begin + count)])

    # ---------------------------------------------------------------- on threads

    def _write(self, job: _DiskJob) -> int:
        """A page that is not what left the device is no page; nor are those behind one that could not be written."""
        intact, views = self._memory.intact(job.landed, job.pages), self._memory.views(job.pages)
        count = 0
        for whole, key, page in zip(intact, job.keys[job.begin :], views, strict=True):
            if not whole or not (self.store.holds(key) or self.store.write(key, page)):
                break
            count += 1
        self.store.stamp(job.keys[: job.begin + count])
        return count

    def _read(self, job: _DiskJob) -> int:
        """Several at a time: a request waits for them, and most of the time goes into their digests."""

        def read(each: tuple[int, bytes, Views]) -> Mapping[GroupName, Sequence[int]] | None:
            at, key, views = each
            own = {group: pages[at : at + 1] for group, pages in job.pages.items()}
            return self._memory.sums(own) if self.store.read(key, views) else None

        keys, views = job.keys[job.begin :], self._memory.views(job.pages)
        reads = [self._readers.submit(read, each) for each in zip(range(len(keys)), keys, views, strict=True)]
        wait(reads)  # all of them, whatever one has raised: pages that are written to are still leased
        found = [each.result() for each in reads]
        whole = [each for each in takewhile(lambda sums: sums is not None, found) if each is not None]
        self.store.stamp(job.keys[: job.begin + len(whole)])
        job.sums = {group: [each[group][0] for each in whole] for group in job.pages}
        return len(whole)

    # ---------------------------------------------------------------- inspection

    def _keys(self, wanted: Wanted, num_pages: int) -> Iterator[bytes]:
        key, lookahead = self._root if wanted.drafts else self._without_draft, int(self._layout.has_draft)
        for tokens in page_tokens(wanted.ids, self._layout.page_size, lookahead, 0, num_pages, wanted.salt):
            key = blake2b(key + repr(tokens).encode(), digest_size=KEY_BYTES).digest()
            yield key

    @property
    def leases(self) -> list[Lease]:
        """Of pages on the host."""
        return [each.lease for each in (self._writing, self._reading) if each is not None]

    def close(self) -> None:
        """Nothing more is written or read."""
        for each in (*self._threads.values(), self._readers):
            each.shutdown(cancel_futures=True)
        self.store.close()
