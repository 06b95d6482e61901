"""Bodies of requests as they come, within a budget of bytes for all that an API process has at a time.

The first bytes of each are free, so that small requests come through whatever large ones do. A body that finds no room
is not read on, and its client waits as TCP makes it wait; if no room comes in time, it gets 503.
"""

import asyncio
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from treetop.api.limits import BodyMeter, ByteMeter

FREE_BYTES = 2**16
"""Of each body: so much the web server holds of one before it stops reading, in any case."""
WAIT_S = 2.0
"""How long a body waits for room."""


class Bodies:
    """A budget of bytes for the bodies of requests that are not answered yet. Of one event loop.

    maximum: bytes of one body.
    num_bytes: that all of them have now, beside the free ones.
    """

    def __init__(
        self,
        maximum: int,
        budget: int,
        wait_s: float = WAIT_S,
        *,
        within: "Bodies | None" = None,
        of_key: bool = False,
    ) -> None:
        """budget: the most that `num_bytes` may be. within: a budget that all of it comes out of, too. of_key: it is an
        API key's.
        """
        self.maximum, self.num_bytes = maximum, 0
        self._within, self._of_key = within, of_key
        self._budget, self._wait_s = budget, wait_s
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Wait for room. Raises HTTPException, 503, if none comes in time; 429 where others of the key have it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while self.num_bytes + num_bytes > self._budget:
                    await self._freed.wait()
        if self.num_bytes + num_bytes > self._budget:
            limit, status = ("max_bodies_bytes of the key", 429) if self._of_key else ("--max-bodies-bytes", 503)
            told = f"bodies of other requests have all {self._budget} bytes ({limit}); try again later"
            raise HTTPException(status, told, {"Retry-After": "1"})
        self.num_bytes += num_bytes
        if self._within is not None:
            try:
                await self._within.take(num_bytes)
            except BaseException:
                self._give(num_bytes)
                raise

    def give(self, num_bytes: int) -> None:
        """Room for others, who look in the order in which they came."""
        if num_bytes and self._within is not None:
            self._within.give(num_bytes)
        self._give(num_bytes)

    def _give(self, num_bytes: int) -> None:
        if num_bytes:
            self.num_bytes -= num_bytes
            self._freed.set()
            self._freed = asyncio.Event()


class MeteredBody:
    """A request's body, piece by piece, metered before anything is made of it."""

    def __init__(self, bodies: Bodies, receive: Receive, is_json: bool = True) -> None:
        """is_json: else nothing but its bytes counts."""
        self._bodies, self._receive = bodies, receive
        self._meter = BodyMeter(bodies.maximum) if is_json else ByteMeter(bodies.maximum)
        self._taken = 0
        self._released = False

    async def receive(self) -> Message:
        """As ASGI's `receive`. Raises HTTPException for a body that is too much of anything."""
        message = await self._receive()
        self._meter.take(message.get("body", b""))
        need = max(self._meter.num_bytes - FREE_BYTES, 0) - self._taken
        if need > 0 and not self._released:
            await self._bodies.take(need)
            self._taken += need
        return message

    def release(self) -> None:
        """It is answered: what it took is free again. Any number of times."""
        self._bodies.give(self._taken)
        self._taken, self._released = 0, True
