"""Pages on the host, and the copies that bring K/V there and back.

    save    steps' stream: pages -> staging, checksums          side stream: staging -> host
    load    side stream: host -> staging      steps' stream, a plan later: checksums, staging -> pages

Steps wait for no copy: where one uses staging memory that a copy used two plans ago, that has long ended. A load reads
what a save wrote behind it on the same side stream. Pages are written by the steps' stream alone, so what is given up
on the way is written nowhere.

A page on the host holds its group's bytes of all layers, [layer][token][plane][kv_head][head_dim]; of recurrent states,
those of a slot. Its checksum is taken on the device before it leaves, stays there, and is compared on its return.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from treetop.cache.pool import KVPool
from treetop.engine.buffers import Zeros
from treetop.engine.features.states import RowStates
from treetop.engine.offloading.pinning import PinnedMemory, pinning
from treetop.engine.staging import RowResults
from treetop.kernels.comm.kv_chunks import checksum
from treetop.kernels.kv import moved
from treetop.types.errors import ConfigError
from treetop.types.ids import GroupName
from treetop.types.layout import Layout
from treetop.types.messages import OffloadPlan, PageCopy
from treetop.types.parallel import Parallel

SLAB_BYTES = 2**26
"""Of host memory that is taken, and pinned, at a time."""
_SUMMED_BYTES = 2**22
"""Whose checksums are taken at a time: 64-bit products of their words lie beside them."""
_PART_WORDS = 2**14
"""Of one page that are summed at a time."""

Mark = object
"""A point of a stream: what was put there before has been done once it is reached."""


class Copies(Protocol):
    """Copies beside the steps, in the order in which they are started."""

    def mark(self) -> Mark:
        """What the steps have been given so far."""
        ...

    def start(self, after: Mark | None, copy: Callable[[], None]) -> Mark:
        """Copy once `after` is reached. Returns its end."""
        ...

    def wait(self, mark: Mark) -> None:
        """What the steps are given from now on waits for a mark."""
        ...

    def has_passed(self, mark: Mark) -> bool:
        """Whether what was put there before has been done. It waits for nothing."""
        ...


class SideStream:
    """On a GPU, a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self, after: Mark | None, copy: Callable[[], None]) -> Mark:
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            copy()
            event.record(self._stream)
        return event

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def has_passed(self, mark: Mark) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())


class LateCopies:
    """On a CPU, which has no streams: what is started is done when somebody waits for it, and no sooner."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._done = 0

    def mark(self) -> Mark:
        return None

    def start(self, after: Mark | None, copy: Callable[[], None]) -> Mark:
        self._waiting.append(copy)
        return self._done + len(self._waiting)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, int)
        while self._done < mark:
            self._waiting.pop(0)()
            self._done += 1

    def has_passed(self, mark: Mark) -> bool:
        self.wait(mark)
        return True


@dataclass(frozen=True, slots=True)
class CopyStaging:
    """Device memory that copies pass through, of two plans in turn: by group, [2, pages, page_bytes] uint8."""

    by_group: Mapping[GroupName, Tensor]

    @classmethod
    def make(cls, layout: Layout, itemsize: int, zeros: Zeros) -> "CopyStaging":
        """itemsize: of a number of the engine's dtype. Raises ConfigError for pages that are not whole words."""
        sizes = layout.page_bytes(itemsize)
        odd = next((name for name, size in sizes.items() if size % 4), None)
        if odd is not None:
            raise ConfigError(f"--kv-offloading-size: a page of {odd} has {sizes[odd]} bytes; raise --page-size")
        return cls({name: zeros((2, layout.copied(name), size), torch.uint8) for name, size in sizes.items()})


@dataclass(slots=True)
class _GroupPages:
    """A group on both sides.

    tables: [layers, n, bytes of a layer] uint8 each, views of what a page or a slot is made of.
    staging: [2, pages, page_bytes] uint8.
    sums: [pages on the host] int64.
    slabs: memory on the host, [pages, page_bytes] uint8 each, made as they fill.
    """

    tables: tuple[Tensor, ...]
    staging: Tensor
    sums: Tensor
    num_pages: int
    memory: PinnedMemory
    slabs: list[Future[Tensor]] = field(default_factory=list)
    guard: Lock = field(default_factory=Lock)

    @property
    def slab_pages(self) -> int:
        return max(SLAB_BYTES // self.staging.shape[2], 1)

    def host(self, page: int, count: int, maker: ThreadPoolExecutor) -> Tensor:
        """`count` pages of one slab. The slab behind it is made ahead, on a thread: pinning takes a while."""
        slab, at = divmod(page, self.slab_pages)
        last = (self.num_pages - 1) // self.slab_pages
        with self.guard:  # threads of the disk ask, too
            while len(self.slabs) <= min(slab + 1, last):
                self.slabs.append(maker.submit(self._make, len(self.slabs)))
        try:
            return self.slabs[slab].result()[at : at + count]
        except OSError:  # no memory: asked for again by the next who needs it
            self.slabs[slab] = maker.submit(self._make, slab)
            raise

    def _make(self, slab: int) -> Tensor:
        """[pages, page_bytes]: of the last slab no more than there are."""
        pages, size = min(self.slab_pages, self.num_pages - slab * self.slab_pages), self.staging.shape[2]
        return self.memory.make(pages * size).view(pages, size)

    def gather(self, pages: Tensor, staged: Tensor) -> None:
        """pages: [n] int64. staged: [n, page_bytes]."""
        for table, part in self._parts(staged):
            part.copy_(table.index_select(1, pages).transpose(0, 1))

    def scatter(self, pages: Tensor, staged: Tensor) -> None:
        """`gather` the other way."""
        for table, part in self._parts(staged):
            table.index_copy_(1, pages, part.transpose(0, 1))

    def _parts(self, staged: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each table with its part of staged pages, [n, layers, bytes of a layer]."""
        sizes = [table.shape[0] * table.shape[2] for table in self.tables]
        parts = staged.split(sizes, 1)
        return [(t, part.unflatten(1, (t.shape[0], t.shape[2]))) for t, part in zip(self.tables, parts, strict=True)]


class HostPageCopies:
    """Pages on the host of a rank's engine, by group."""

    def __init__(
        self,
        layout: Layout,
        pools: Mapping[GroupName, KVPool],
        states: RowStates,
        staging: CopyStaging,
        parallel: Parallel,
    ) -> None:
        assert layout.host is not None
        self._parallel, host = parallel, layout.host
        device = next(iter(staging.by_group.values())).device
        cuda = device.type == "cuda"
        self._device = device
        self.copies: Copies = SideStream(device) if cuda else LateCopies()
        self._maker = ThreadPoolExecutor(1, "treetop-host-pages")
        self._memory = PinnedMemory(*pinning(device)) if cuda else PinnedMemory(None)
        self._turn, self._closing = 0, list[Callable[[], object]]()
        self._used: list[tuple[Mark | None, Mark | None]] = [(None, None)] * 2  # by copies and by steps, by turn
        self._groups: dict[GroupName, _GroupPages] = {}
        for name, staged in staging.by_group.items():
            if name in pools:
                data, count = moved(pools[name].data), host.num_pages[name]
                tables: tuple[Tensor, ...] = (_pages_of(data.view(len(data), layout.num_pages[name], -1)),)
            else:
                kept, count = states.checkpoints[name], host.checkpoints
                tables = tuple(_pages_of(t.flatten(2)) for t in (kept.conv, kept.state) if t.numel())
            sums = torch.zeros(count, dtype=torch.int64, device=device)
            self._groups[name] = _GroupPages(tables, staged, sums, count, self._memory)

    # ---------------------------------------------------------------- for the tier on disk

    def before_release(self, close: Callable[[], object]) -> None:
        """Call it while this memory is still there."""
        self._closing.append(close)

    def all_so_far(self) -> Mark:
        """The end of all copies, and of what the steps have been given."""
        return self.copies.start(self.copies.mark(), lambda: None)

    def has_passed(self, mark: Mark) -> bool:
        return self.copies.has_passed(mark)

    def memory_of(self, name: GroupName, page: int) -> Tensor:
        """A page on the host, [page_bytes] uint8."""
        return self._groups[name].host(page, 1, self._maker)[0]

    def kept_sums(self, name: GroupName, pages: Sequence[int]) -> Tensor:
        """[n] int64 on the host, of what left the device for these pages; there once `all_so_far` has passed."""
        return self._groups[name].sums.index_select(0, self._numbers(pages)).to("cpu", non_blocking=True)

    def keep_sums(self, name: GroupName, pages: Sequence[int], sums: Sequence[int]) -> None:
        """What pages that came from elsewhere must be when they are fetched."""
        self._groups[name].sums.index_copy_(0, self._numbers(pages), self._numbers(sums))

    # ---------------------------------------------------------------- plans

    def run(self, plan: OffloadPlan) -> RowResults:
        """Carry a plan out. As results, one row: accept_len: 1 if all that was unpacked is what was saved."""
        turn, before = self._turn % 2, (self._turn + 1) % 2
        self._turn += 1
        good = torch.ones(1, dtype=torch.int64, device=self._device)
        if plan.unpacks:
            copied, _ = self._used[before]
            self._wait(copied)
            good = self._unpack(plan.unpacks, before)
            self._used[before] = copied, self.copies.mark()
        if plan.saves:
            self._wait(self._used[turn][0])
            runs = self._gather(plan.saves, turn)
            mark = self.copies.mark()
            self._used[turn] = self.copies.start(mark, lambda: self._copy(runs, to_host=True)), mark
        if plan.fetches:
            runs = self._runs(plan.fetches, turn)
            _, read = self._used[turn]
            self._used[turn] = self.copies.start(read, lambda: self._copy(runs, to_host=False)), read
        return RowResults(torch.zeros_like(good)[:, None], self._parallel.gather(good).amin(0), good > 0)

    def _wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self.copies.wait(mark)

    def _gather(self, saves: Sequence[PageCopy], turn: int) -> list[tuple[Tensor, Tensor]]:
        """Pages into staging memory, and their checksums to where they are kept. Returns what is to be copied."""
        for name, mine in _by_group(saves).items():
            group, staged = self._groups[name], self._groups[name].staging[turn, : len(mine)]
            group.gather(self._numbers([each.page for each in mine]), staged)
            group.sums.index_copy_(0, self._numbers([each.host_page for each in mine]), page_sums(staged))
        return self._runs(saves, turn)

    def _unpack(self, copies: Sequence[PageCopy], turn: int) -> Tensor:
        """Staging memory into pages. Returns [1] int64, 1 if every checksum is the one that was kept."""
        wrong = torch.zeros(1, dtype=torch.int64, device=self._device)
        for name, mine in _by_group(copies).items():
            group, staged = self._groups[name], self._groups[name].staging[turn, : len(mine)]
            kept = group.sums.index_select(0, self._numbers([each.host_page for each in mine]))
            wrong += differing(page_sums(staged), kept)
            group.scatter(self._numbers([each.page for each in mine]), staged)
        return (wrong == 0).to(torch.int64)

    def _runs(self, copies: Sequence[PageCopy], turn: int) -> list[tuple[Tensor, Tensor]]:
        """(staging, host) of neighbours that are neighbours on both sides."""
        found = []
        for name, mine in _by_group(copies).items():
            group, pages = self._groups[name], [each.host_page for each in mine]
            breaks = [
                i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1 or pages[i] % group.slab_pages == 0
            ]
            for begin, end in pairwise([0, *breaks, len(pages)]):
                host = group.host(pages[begin], end - begin, self._maker)
                found.append((group.staging[turn, begin:end], host))
        return found

    def _copy(self, runs: Sequence[tuple[Tensor, Tensor]], to_host: bool) -> None:
        for staged, host in runs:
            (host.copy_(staged, non_blocking=True) if to_host else staged.copy_(host, non_blocking=True))

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        listed = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return listed.to(self._device, non_blocking=True)

    def release(self) -> None:
        """Nothing more is made or copied."""
        while self._closing:
            self._closing.pop()()
        self._maker.shutdown(cancel_futures=True)
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # of a GPU that has failed, as others were told
                torch.cuda.synchronize(self._device)
        self._memory.release()


def page_sums(staged: Tensor) -> Tensor:
    """Checksums of staged pages [n, page_bytes] uint8, [n] int64."""
    step = max(_SUMMED_BYTES // staged.shape[1], 1)
    words = staged.view(torch.int32)
    return torch.cat([checksum(part) for part in words.split(step)])


def page_sum(page: Tensor) -> int:
    """The checksum of one page on the host, [page_bytes] uint8, as `page_sums` gives it; in parts that stay in a cache.

    A part of words w from the m-th on adds sum(w_j (2j + 1)) + 2m sum(w_j), modulo 2^64.
    """
    words, total = page.view(torch.uint32), 0
    factors = 2 * torch.arange(min(words.numel(), _PART_WORDS)) + 1
    held = torch.empty_like(factors)
    for number, part in enumerate(words.split(_PART_WORDS)):
        wide = held[: part.numel()].copy_(part)
        total += int(wide @ factors[: part.numel()]) + 2 * number * _PART_WORDS * int(wide.sum())
    return (total + 2**63) % 2**64 - 2**63


def differing(sums: Tensor, kept: Tensor) -> Tensor:
    """How many checksums are not what was kept, [] int64."""
    return (sums != kept).sum()


def _pages_of(table: Tensor) -> Tensor:
    """[layers, n, numbers] as bytes."""
    return table.view(torch.uint8)


def _by_group(copies: Sequence[PageCopy]) -> dict[GroupName, list[PageCopy]]:
    found = dict[GroupName, list[PageCopy]]()
    for each in copies:
        found.setdefault(each.group, []).append(each)
    return found
