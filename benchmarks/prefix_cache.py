"""What the prefix cache costs on the host: microseconds for 1,000 tokens of lookup, insertion and eviction.

    python benchmarks/prefix_cache.py                       50,000 and 500,000 cached pages of 16 tokens
    python benchmarks/prefix_cache.py --pages 125000 --page-size 32

A cache of two groups (a target and its draft head) is filled with prompts of 4,000 tokens, a quarter of which is one of
50 beginnings. Then prompts are looked up, pinned and let go again; others are inserted in place of the least recently
used. Every operation has its median and its fastest of 200 prompts. To compare machines by, there is also the time that
one look into a plain dictionary takes for each page. JSON lines on stdout, one a size.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from treetop.cache.prefix_cache import Node, PrefixCache
from treetop.cli import OneLineParser, exit_code
from treetop.types.errors import InputError
from treetop.types.ids import DRAFT, FULL, WINDOW, PageId

TOKENS, SHARED, BEGINNINGS = 4000, 1000, 50
PROMPTS = 200
"""Timed, of each kind; those looked up are the last that were inserted."""
Result = TypeVar("Result")


def prompts(rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Random ids without end; the first quarter is one of 50."""
    beginnings = [tuple(rng.randrange(32_000) for _ in range(SHARED)) for _ in range(BEGINNINGS)]
    while True:
        yield (*rng.choice(beginnings), *(rng.randrange(32_000) for _ in range(TOKENS - SHARED)))


def measure(num_pages: int, page_size: int, window: int | None, rng: random.Random) -> dict[str, tuple[float, float]]:
    """Fill a cache, then time each operation: name -> median and fastest, in microseconds for 1,000 tokens."""
    windows = {FULL: None, DRAFT: None} if window is None else {FULL: None, WINDOW: window, DRAFT: None}
    cache, each = PrefixCache(page_size, 1, windows), TOKENS // page_size
    endless, known = prompts(rng), deque[tuple[int, ...]](maxlen=PROMPTS)

    def insert(ids: tuple[int, ...]) -> None:
        nodes = cache.extend([], ids, each)
        for node in nodes:
            for group in windows:
                if group not in node.pages:
                    cache.fill(node, group, PageId(1))
        cache.unpin(nodes)

    while cache.num_pages(FULL) < num_pages:
        known.append(next(endless))
        insert(known[-1])
    starts, plain = range(0, TOKENS - page_size, page_size), dict[tuple[int, tuple[int, ...]], int]()
    times: dict[str, list[float]] = {"dictionary": [], "lookup": [], "pin and unpin": [], "evict": [], "insert": []}

    def timed(name: str, action: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = action()
        times[name].append(time.perf_counter() - began)
        return result

    def pin_and_unpin(path: list[Node]) -> None:
        cache.pin(path)
        cache.unpin(path)

    def look_in_dictionary(ids: tuple[int, ...]) -> None:
        for i in starts:
            plain.get((i, ids[i : i + page_size + 1]))

    def evict() -> None:
        for _ in range(each):
            cache.evict(FULL)

    for ids in rng.sample(known, len(known)):
        timed("dictionary", partial(look_in_dictionary, ids))
        path = timed("lookup", partial(cache.match, ids))
        timed("pin and unpin", partial(pin_and_unpin, path))
    for _ in range(PROMPTS):
        new = next(endless)
        timed("evict", evict)
        timed("insert", partial(insert, new))
    scale = 1e6 * 1000 / TOKENS
    return {name: (scale * statistics.median(found), scale * min(found)) for name, found in times.items()}


def main() -> int:
    parser = OneLineParser(
        prog="prefix_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int, help="of a third group of layers; none by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return exit_code("prefix_cache", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure each size and print it. Raises InputError for sizes that cannot be."""
    for name, value in (("--pages", min(args.pages)), ("--page-size", args.page_size)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    for num_pages in args.pages:
        found = measure(num_pages, args.page_size, args.window, random.Random(args.seed))
        row = {name: [round(value, 1) for value in values] for name, values in found.items()}
        print(json.dumps({"pages": num_pages, "page size": args.page_size, "unit": "us for 1000 tokens", **row}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
