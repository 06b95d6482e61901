"""Bytes a second that the tier of K/V on disk writes and reads, beside a plain loop over files of the same size.

    python benchmarks/disk_tier.py --folder /nvme/kv                  pages of Llama-3.1-8B, 2 MiB
    python benchmarks/disk_tier.py --page-kib 2048 --pages 128 --turns 5

Pages are written and read by the tier itself: checksums of the host's pages, files, digests. It writes on one thread
and reads on several. The plain loop is one thread's: it opens, writes or reads, and closes, and checks nothing. Both in
turn, `--turns` times:

written, read: through the system's cache, which is what the engine waits for.
forced, cold: all forced to the disk within the time; read once the system was asked to forget them.

One JSON object: GB/s, median and lowest of the turns, of each, the tier's share of the plain loop, and seconds of
processor time for a GB. Every page that is read is compared with what was written. Exit code 1 if one differs.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from frame import end_with, machine_of, parser_of, say
from torch import Tensor

from treetop.cache.disk_store import DiskStore, Views
from treetop.cache.disk_tier import DiskTier, Landed, Wanted, _DiskJob
from treetop.engine.offloading.host_pages import page_sum
from treetop.types.errors import InputError
from treetop.types.ids import GroupName, PageId

GROUP = GroupName("all")
PARTS = ("written", "forced", "read", "cold")


def bytes_of(page: Tensor) -> memoryview:
    whole: Any = page.numpy()
    return memoryview(whole)


class Pages:
    """`HostMemory` of a tensor. pages: [pages, page_bytes] uint8."""

    def __init__(self, pages: Tensor) -> None:
        self._pages, self._sums = pages, [page_sum(page) for page in pages]

    def landed(self, pages: Mapping[GroupName, Sequence[PageId]]) -> Landed:
        raise NotImplementedError  # of an engine's copies

    def views(self, pages: Mapping[GroupName, Sequence[PageId]]) -> Sequence[Views]:
        return [[bytes_of(self._pages[page])] for page in pages[GROUP]]

    def intact(self, landed: object, pages: Mapping[GroupName, Sequence[PageId]]) -> Sequence[bool]:
        return [sum_ == self._sums[page] for sum_, page in zip(self.sums(pages)[GROUP], pages[GROUP], strict=True)]

    def sums(self, pages: Mapping[GroupName, Sequence[PageId]]) -> Mapping[GroupName, Sequence[int]]:
        return {GROUP: [page_sum(self._pages[page]) for page in pages[GROUP]]}

    def arrived(self, pages: Mapping[GroupName, Sequence[PageId]], sums: object) -> None:
        raise NotImplementedError  # the engine is told


class Plain:
    """Files without a word about what is in them."""

    def __init__(self, folder: Path, keys: Sequence[bytes], pages: Tensor) -> None:
        self.paths, self._pages = [folder / key.hex() for key in keys], pages

    def write(self) -> int:
        for path, page in zip(self.paths, self._pages, strict=True):
            with path.open("wb", buffering=0) as file:
                file.write(bytes_of(page))
        return len(self.paths)

    def read(self) -> int:
        for path, page in zip(self.paths, self._pages, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(bytes_of(page))
        return len(self.paths)

    def close(self) -> None: ...


class Tier:
    """What `DiskTier` does on its threads for one request."""

    def __init__(self, folder: Path, keys: Sequence[bytes], pages: Tensor) -> None:
        store = DiskStore(folder, 2 * pages.numel(), "benchmark")
        layout = SimpleNamespace(page_size=1, has_draft=False)
        self._tier = DiskTier(store, Pages(pages), layout, "benchmark")  # type: ignore[arg-type]
        held = {GROUP: [PageId(page) for page in range(len(keys))]}
        none: Any = None
        self._job = _DiskJob(Wanted((), ""), none, 0, [*keys], held, none)
        self.paths = [store._path(key) for key in keys]

    def write(self) -> int:
        self._tier.store._sizes.clear()  # none is known yet
        self._tier.store.num_bytes = 0
        return self._tier._write(self._job)

    def read(self) -> int:
        return self._tier._read(self._job)

    def close(self) -> None:
        self._tier.close()


def each_file(paths: Sequence[Path], act: Callable[[int], object]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            act(fd)
        finally:
            os.close(fd)


def force(paths: Sequence[Path]) -> None:
    each_file(paths, os.fsync)


def forget(paths: Sequence[Path]) -> None:
    """Of files that have been forced to the disk."""
    each_file(paths, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def turn(store: Plain | Tier, pages: Tensor) -> dict[str, tuple[float, float]]:
    """Seconds, and of processor time, of each of `PARTS`. pages: of the store's memory. Raises InputError."""
    found, want = {}, pages.clone()

    def timed(name: str, work: Callable[[], object], since: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        work()
        found[name] = time.perf_counter() - begin + since[0], time.process_time() - begin_cpu + since[1]
        return found[name]

    def all_of(work: Callable[[], int]) -> Callable[[], None]:
        def checked() -> None:
            if (count := work()) != len(pages):
                raise InputError(f"of {len(pages)} pages {count} went well; is the disk full?")

        return checked

    timed("forced", lambda: force(store.paths), timed("written", all_of(store.write)))
    for name in ("read", "cold"):
        pages.zero_()
        timed(name, all_of(store.read))
        if not torch.equal(pages, want):
            raise SystemExit(f"{name}: a page is not what was written")
        forget(store.paths)
    for path in store.paths:
        path.unlink()
    return found


def report_of(turns: Sequence[dict[str, tuple[float, float]]], num_bytes: int) -> dict[str, Any]:
    report = {}
    for name in PARTS:
        speeds = [num_bytes / each[name][0] / 1e9 for each in turns]
        busy_s = statistics.median(each[name][1] for each in turns) / num_bytes * 1e9
        report[name] = {
            "gb_s": round(statistics.median(speeds), 3),
            "lowest": round(min(speeds), 3),
            "processor_s_per_gb": round(busy_s, 3),
        }
    return report


def main(given: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", metavar="FOLDER", help="on the disk that is measured; default: of temporary files")
    parser.add_argument("--page-kib", type=int, default=2048, metavar="N")
    parser.add_argument("--pages", type=int, default=128, metavar="N")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    options = parser.parse_args(given)
    if min(options.page_kib, options.pages, options.turns) < 1:
        raise InputError("every number must be at least 1")
    torch.set_num_threads(1)
    num_bytes = options.pages * options.page_kib * 1024
    pages = torch.randint(0, 256, (options.pages, options.page_kib * 1024), dtype=torch.uint8)
    keys = [random.Random(number).randbytes(16) for number in range(options.pages)]
    turns: dict[str, list[dict[str, tuple[float, float]]]] = {"tier": [], "plain": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        (Path(folder) / "plain").mkdir()
        stores = {name: kind(Path(folder) / name, keys, pages) for name, kind in (("tier", Tier), ("plain", Plain))}
        for store in stores.values():
            stack.callback(store.close)
        for number in range(options.turns + 1):  # the first warms up
            for name, store in stores.items():
                one = turn(store, pages)
                if number:
                    turns[name].append(one)
    reports = {name: report_of(each, num_bytes) for name, each in turns.items()}
    share = {part: round(reports["tier"][part]["gb_s"] / reports["plain"][part]["gb_s"], 3) for part in PARTS}
    what = {"what": "K/V on disk", "options": {**vars(options), "folder": None}, "machine": machine_of()}
    say({**what, **reports, "share": share})
    return 0


if __name__ == "__main__":
    end_with(main)
