"""Work beside the event loop, in which what is small never waits for what is large."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lanes:
    """Threads of one kind of work: some for small pieces, others for large ones. Each lane is first come, first served.

    Threads start with the first work. A piece that waits when its caller is cancelled is never begun.
    """

    def __init__(self, name: str, large: int, threads: int = 1) -> None:
        """large: from which size on a piece is large, in the unit of `run`. threads: of each lane."""
        self._large = large
        self._lanes = [ThreadPoolExecutor(threads, f"{name}-{lane}") for lane in ("small", "large")]

    async def run(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Do it in the lane of this size."""
        lane = self._lanes[size >= self._large]
        return await asyncio.get_running_loop().run_in_executor(lane, work, *arguments)

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
