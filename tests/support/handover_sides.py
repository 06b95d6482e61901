"""Both roles in one process: real state machines, sessions, schedulers and engines; a transport that copies memory."""

import time

from support.addresses import addresses
from support.handing import Worker
from support.waiting import WAIT_S
from treetop.disaggregation.connector import open_connector
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.engine.kv_staging import staging_of
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.requests import EngineRequest, Whose

SHAPE = (2, 3, 6)
LEASE_S = 1.5


class Sides:
    """A prefill and a decode worker, whose steps the test runs in turns. prefill, decode: options of one."""

    def __init__(self, pair, prefill_slots, decode_slots, lease_s=LEASE_S, prefill=None, decode=None):
        (listen,) = addresses(1)
        options, slots = {"chunked_prefill_size": 16}, (prefill_slots, decode_slots)
        self.prefill, self.decode = (
            Worker(pair, SHAPE, **{**options, "disaggregation_slots": each, **(more or {})})
            for each, more in zip(slots, (prefill, decode), strict=True)
        )
        self.computes = self._role(self.prefill, DisaggregationOptions("prefill", listen, lease=lease_s))
        self.asks = self._role(self.decode, DisaggregationOptions("decode", None, (listen,), lease=lease_s))
        self.prefill_lives, self.ahead_s = True, 0.0
        self.until(lambda: self.asks.asks)

    @staticmethod
    def _role(worker, options):
        return open_connector(worker.scheduler, staging_of(worker.engine), options, LoopbackTransport)

    @property
    def transport(self):
        return self.asks._agent.own.transport

    def now(self):
        """The clock of both, which a test may put ahead where nothing else can end a wait."""
        return time.monotonic() + self.ahead_s

    def step(self):
        """A turn of each. Returns what the decode worker has emitted."""
        if self.prefill_lives:
            self.computes.poll(self.now())
            self.prefill.core.step()
        self.asks.poll(self.now())
        return self.decode.core.step()

    def until(self, true):
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline
            self.step()

    def generate(self, prompts, params, first_number=0, meanwhile=lambda count: None, loras=()):
        """Ids and accept lengths of each prompt. meanwhile: is told the number of chunks that have come, each turn.

        loras: of each the name of its adapter, if any has one.
        """
        found = {}
        every = zip(prompts, params, loras or [""] * len(prompts), strict=True)
        for number, (prompt, each, lora) in enumerate(every, first_number):
            found[number] = ([], [])
            salt = Whose(lora=lora).salt
            asked = EngineRequest(RequestId(number), tuple(prompt), each, each.seed or 0, cache_salt=salt, lora=lora)
            self.decode.core.add(asked, remote=self.asks.asks)
        left = len(found)
        deadline = time.monotonic() + WAIT_S
        while left:
            assert time.monotonic() < deadline
            meanwhile(self.asks.load.num_chunks)
            for update in self.step():
                assert update.error is None
                ids, lens = found[update.request_id]
                ids += update.new_ids
                lens += [] if update.accept_len is None else [update.accept_len]
                left -= update.finish_reason is not None
        return [(tuple(ids), lens) for ids, lens in found.values()]

    def nothing_is_held(self):
        self.decode.scheduler.check_integrity()
        self.prefill.scheduler.check_integrity()
        idle = (
            self.asks.load.num_requests_in_flight
            == self.asks.load.num_slots_busy
            == self.computes.load.num_requests_in_flight
            == 0
        )
        return idle and self.computes.load.num_slots_busy == 0 and not self.prefill.scheduler.has_work

    def close(self):
        for role, worker in ((self.asks, self.decode), (self.computes, self.prefill)):
            role.close()
            worker.close()
