"""What the prefix cache costs on the host: microseconds for 1,000 tokens of lookup, insertion and eviction.

    python bench/prefix_cache.py                       50,000 and 500,000 cached pages of 16 tokens
    python bench/prefix_cache.py --pages 125000 --page-size 32

A cache is filled with prompts of 4,000 tokens, a quarter of which is one of 50 beginnings. Then prompts are looked up,
new ones take the pages of the least recently used (eviction, then insertion), and each is let go again. Every number is
the median of all prompts. JSON lines on stdout, one a size.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from treetop.cache.radix import RadixCache
from treetop.cli import OneLineParser, exit_code
from treetop.types.errors import InputError
from treetop.types.ids import DRAFT, FULL, PageId

TOKENS, SHARED, BEGINNINGS = 4000, 1000, 50
PROMPTS = 200
"""Timed, of each kind; those looked up are the last that were inserted."""
Result = TypeVar("Result")


def prompts(rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Random ids without end; the first quarter is one of 50."""
    beginnings = [tuple(rng.randrange(32_000) for _ in range(SHARED)) for _ in range(BEGINNINGS)]
    while True:
        yield (*rng.choice(beginnings), *(rng.randrange(32_000) for _ in range(TOKENS - SHARED)))


def measure(num_pages: int, page_size: int, rng: random.Random) -> dict[str, float]:
    """Fill a cache, then time each operation: name -> microseconds for 1,000 tokens."""
    cache, each = RadixCache(page_size, 1), TOKENS // page_size
    endless, page, known = prompts(rng), 1, deque[tuple[int, ...]](maxlen=PROMPTS)
    while cache.num_pages < num_pages:
        known.append(next(endless))
        page += len(cache.insert(known[-1], [{FULL: PageId(page + i), DRAFT: PageId(page + i)} for i in range(each)]))
    times: dict[str, list[float]] = {"lookup": [], "pin and unpin": [], "evict": [], "insert": []}

    def timed(name: str, action: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = action()
        times[name].append(time.perf_counter() - began)
        return result

    def pin_and_unpin(path: list) -> None:
        cache.pin(path)
        cache.unpin(path)

    for ids in rng.sample(known, len(known)):
        path = timed("lookup", lambda ids=ids: cache.match(ids))
        timed("pin and unpin", lambda path=path: pin_and_unpin(path))
    for _ in range(PROMPTS):
        new = next(endless)
        rows = timed("evict", lambda: cache.evict(each))
        if len(rows) != each:
            raise AssertionError("a full cache did not give its pages back")
        timed("insert", lambda new=new, rows=rows: cache.insert(new, rows))
    return {name: 1e6 * 1000 / TOKENS * statistics.median(each) for name, each in times.items()}


def main() -> int:
    parser = OneLineParser(
        prog="prefix_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return exit_code("prefix_cache", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure each size and print it. Raises InputError for sizes that cannot be."""
    for name, value in (("--pages", min(args.pages)), ("--page-size", args.page_size)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    for num_pages in args.pages:
        found = measure(num_pages, args.page_size, random.Random(args.seed))
        row = {f"{name}, us for 1000 tokens": round(value, 1) for name, value in found.items()}
        print(json.dumps({"pages": num_pages, "page size": args.page_size, **row}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
