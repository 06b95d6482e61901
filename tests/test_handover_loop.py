"""The loop of an engine process with a role: what a step asks for is sent before anything is waited for."""

from itertools import pairwise

import zmq

from fake_core import ask, make_core
from treetop.core.engine_process import CoreServer
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, HandoverLoad

INFO = CoreInfo("/none", 1000, 512, 4, SpecShape(2, 3, 6))


class Watching:
    """A role that notes when it is asked how long to wait, and when it is polled; after a few waits it is stuck."""

    asks, refuses, load = False, None, HandoverLoad("decode")

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


def test_a_role_hears_of_a_step_before_the_loop_waits(monkeypatch):
    """An idle worker waits a quarter of a second: so much later would a request have been asked for."""
    log, core = [], make_core()
    core.add(ask(1, [5, 6], max_tokens=6))
    step = core.step
    monkeypatch.setattr(core, "step", lambda: log.append("step") or step())
    context = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        assert CoreServer(core, INFO, socket, Watching(log)).run() == "enough"
    finally:
        context.destroy(linger=0)
    assert "step" in log
    assert all(after == "poll" for before, after in pairwise(log) if before == "step")
