"""The loop of an engine process with a role: what it does before it waits, and how long it waits."""

import ctypes
import time
from itertools import pairwise

import zmq

from support.fake_core import ask, make_core
from treetop.disaggregation.agent import LATER_MS, SOON_MS, Agent, RankAgent
from treetop.disaggregation.events import Pull, Pulled
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.distributed.engine_process import EngineServer, Parts
from treetop.types.kv_transfer.layout import ChunkLayout, Staging
from treetop.types.kv_transfer.transport import Memory, PeerId
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, KVTransferStats

PEER = PeerId(3)
INFO = CoreInfo("/none", 1000, 512, 4, SpecShape(2, 3, 6))


class Watching:
    """A role that notes when it is asked how long to wait, and when it is polled; after a few waits it is stuck."""

    asks, refuses, load = False, None, KVTransferStats("decode")

    def __init__(self, log):
        self.log = log

    @property
    def stuck(self):
        return "enough" if self.log.count("wait") > 3 else None

    @property
    def wait_ms(self):
        self.log.append("wait")
        return 1

    def sockets(self):
        return []

    def poll(self, now):
        self.log.append("poll")

    def close(self):
        pass


def test_a_step_follows_what_a_role_does_before_the_loop_waits(monkeypatch):
    """An idle worker waits a quarter of a second: so much later would a piece that has landed be imported."""
    log, core = [], make_core()
    core.add(ask(1, [5, 6], max_tokens=6))
    step = core.step

    def stall():
        """A step, after which there is nothing to do until the role does something."""
        log.append("step")
        updates = step()
        core.stalled = True
        return updates

    monkeypatch.setattr(core, "step", stall)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        assert str(EngineServer(Parts(core, INFO, Watching(log)), socket).run()) == "enough"
    finally:
        context.destroy(linger=0)
    steps = log[: len(log) - log[::-1].index("step")]
    assert "wait" in steps
    assert all(after == "step" for before, after in pairwise(steps) if before == "poll")


def test_a_loop_sleeps_only_while_no_transfer_is_young(monkeypatch):
    """Between two GPUs one takes a fraction of a millisecond; one whose peer has stopped may take for ever."""
    memory = ctypes.create_string_buffer(64)
    transports = [LoopbackTransport(Memory(ctypes.addressof(memory), 64)) for _ in range(2)]
    layout = ChunkLayout((), 4, 8)
    own = Agent(RankAgent(transports[0], Staging(Memory(0, 64), 1, 64, layout, None)))
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    try:
        assert own.connect(PEER, [transports[1].metadata])
        assert own.wait_ms == LATER_MS
        transports[0].stalled = True
        own.pull(Pull(0, PEER, 0, None, "read"))
        assert own.wait_ms == own.own.wait_ms == 0
        now_s[0] += 1.0
        assert own.wait_ms == own.own.wait_ms == SOON_MS
        transports[0].stalled = False
        while own.poll() != [Pulled(0, "done")]:
            pass
        assert own.wait_ms == own.own.wait_ms == LATER_MS
    finally:
        for transport in transports:
            transport.close()
