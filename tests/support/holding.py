"""Processes that a test holds still at a place, to look at them for as long as it likes.

One that starts cold reads `sitecustomize.py` as Python starts; one that is forked (`warm.py`), before its `main`.
"""

import os
from pathlib import Path

from support.warm import HELD

_HELD = """
import os, sys, time
from types import SimpleNamespace

def wait(seconds=float("inf")):
    end = time.monotonic() + seconds
    while os.path.exists({file!r}) and time.monotonic() < end:
        time.sleep(0.01)

def is_of(word):
    return any(word in each for each in sys.orig_argv)
"""
ENGINE_START = """
if is_of("engine_process"):
    wait()
"""
"""An engine process does not come up."""
STEPS = """
if is_of("engine_process"):
    from treetop.core import mock
    mock.time = SimpleNamespace(monotonic=time.monotonic, sleep=wait)
"""
"""Steps of the mock engine take their time; once they are let go, none."""
SHORT_TURNS = """
if is_of("treetop.cli"):
    from treetop.distributed import supervisor
    supervisor.TURN_S = 0.5
"""
"""Held nowhere: API processes that are stopped are waited for not so long before the next has the new engine."""
LONG_MINUTES = """
if is_of("treetop.cli") or is_of("serve.worker"):
    from treetop.api.keys import rate_limits
    rate_limits._MINUTE_S = 1e6
"""
"""Held nowhere: what a key has used of its minute is not paid off while a slow machine asks again."""
WORKERS_END = """
if is_of("serve.worker"):
    import atexit
    atexit.register(wait)
    atexit.register(print, "on its way out", file=sys.stderr, flush=True)
"""
"""An API process that has served says so, and stands still on its way out."""
TIERS = """
if is_of("treetop.distributed.engine_process"):
    from treetop.cache import host_tier
    from treetop.engine.startup import host_layout
    host_layout.refuse_cpu = lambda size, device: None
    host_layout.COPIED_BYTES = 2**14
    host_tier.LEAST_TOKENS = 16
"""
"""Held nowhere: engines have tiers of K/V on a CPU, which copy little at a time."""
LAST_WORDS = """
if is_of("treetop.cli"):
    import asyncio
    from treetop.serve import run
    end_with = run._end_with

    async def held_end_with(core, server):
        await core.until_failed()
        await asyncio.to_thread(wait)
        await end_with(core, server)

    run._end_with = held_end_with
"""
"""A server without an engine goes on saying so."""
ANSWER = """
if is_of("treetop.cli"):
    from treetop.cli.chat_session import ChatSession
    show = ChatSession._show

    def held_show(session, pieces):
        shown = [*pieces]
        show(session, shown)
        if any(depth == 1 and text.strip() for text, depth in shown):
            wait()

    ChatSession._show = held_show
"""
"""An answer of a chat stands still once it has shown a token of the first draft depth."""
STREAM = """
if is_of("treetop.cli"):
    from treetop.llm import LLM
    stream = LLM.stream

    def held_stream(*args, **options):
        for delta in stream(*args, **options):
            yield delta
            if delta.text:
                wait()

    LLM.stream = held_stream
"""
"""A command that shows text as it comes stands still after each piece."""


class Held:
    """What processes with its environment wait for, at one place. They are held from the beginning.

    environment: for `support.serving`.
    """

    def __init__(self, folder: Path, place: str) -> None:
        """folder: an empty one. place: one of those above."""
        self._file = folder / "held"
        (folder / "sitecustomize.py").write_text(_HELD.format(file=str(self._file)) + place)
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, HELD: str(folder)}
        self.hold()

    def hold(self) -> None:
        self._file.touch()

    def go(self) -> None:
        self._file.unlink()
