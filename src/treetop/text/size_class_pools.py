"""Work beside the event loop, in which what is small never waits for what is large."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SizeClassPools:
    """Threads of one kind of work: some for small pieces, others for large ones. Each lane is first come, first served.

    Threads start with the first work. A piece that waits when its caller is cancelled is never begun.
    """

    def __init__(self, name: str, large: int, threads: int = 1) -> None:
        """large: from which size on a piece is large, in the unit of `run`. threads: of each lane."""
        self._large = large
        self._pools = [ThreadPoolExecutor(threads, f"{name}-{pool}") for pool in ("small", "large")]

    async def run(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Do it in the lane of this size."""
        pool = self._pools[size >= self._large]
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
