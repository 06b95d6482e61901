"""Workers of which each is several ranks that share a model hand over: every rank moves its own heads, of any number.

Ranks are threads here, and what they hand over is copied in memory; `test_rank_role_drills.py` has processes.
"""

import ctypes
import time

import pytest

from support import recurrent_models
from support.addresses import addresses
from support.grids import few_values
from support.rank_pairs import LENGTHS, PARAMS, answers, options_of, save_pair
from support.waiting import WAIT_S
from treetop.disaggregation.agent import block_copies, joined
from treetop.disaggregation.connector import open_connector
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.distributed.open import open_core
from treetop.engine.kv_staging import staging_of
from treetop.types.config import EngineConfig
from treetop.types.ids import GroupName, RequestId
from treetop.types.kv import KVFormat
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout, first_head
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.layout import KVGroup
from treetop.types.requests import EngineRequest
from treetop_debug.ranks import ranks_on_threads


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("divisible"))


@pytest.fixture(scope="module")
def expected(pair):
    return answers(pair)


class Worker:
    """A worker of some ranks with a connector, whose steps the test runs."""

    def __init__(self, pair, disaggregation, **options):
        slots = {"disaggregation_slots": 3, "disaggregation_slot_bytes": 1 << 15}
        self.opened = open_core(EngineConfig(**options_of(pair, **slots, **options)), True)
        self.core, local = self.opened.core, self.opened
        self.connector = open_connector(
            local.scheduler, staging_of(local.engine), disaggregation, LoopbackTransport, local.executor
        )

    def step(self):
        updates = self.core.step() if self.core.busy else []
        self.connector.poll(time.monotonic())
        self.core.scheduler.check_integrity()
        assert self.core.failure is None, self.core.failure
        return updates

    @property
    def holds_nothing(self):
        return (
            not self.core.busy and self.connector.load.num_requests_in_flight == self.connector.load.num_slots_busy == 0
        )

    def close(self):
        self.connector.close()
        self.opened.close()


class Workers:
    """A prefill worker and a decode worker that have met. transports: of the decode worker's ranks."""

    def __init__(self, pair, prefill_ranks, decode_ranks, lease_s=WAIT_S, **decode_options):
        (listen,) = addresses(1)
        before = [*LoopbackTransport._all.values()]
        computes = DisaggregationOptions("prefill", listen, lease=lease_s)
        asks = DisaggregationOptions("decode", None, (listen,), lease=lease_s)
        self.decode = Worker(pair, asks, tp_size=decode_ranks, **decode_options)
        self.transports = [each for each in LoopbackTransport._all.values() if each not in before]
        self.prefill = Worker(pair, computes, tp_size=prefill_ranks)
        self.until(lambda: self.decode.connector.asks and self.decode.holds_nothing)

    def step(self):
        self.prefill.step()
        return self.decode.step()

    def until(self, true):
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline, (self.decode.connector.load, self.prefill.connector.load)
            self.step()

    def generate(self, prompts, params, meanwhile=lambda load: None):
        found = [([], []) for _ in prompts]
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            asked = EngineRequest(RequestId(number), tuple(prompt), each, each.seed or 0)
            self.decode.core.add(asked, remote=self.decode.connector.asks)
        left, deadline = len(found), time.monotonic() + WAIT_S
        while left:
            assert time.monotonic() < deadline, (self.decode.connector.load, self.prefill.connector.load)
            meanwhile(self.decode.connector.load)
            for update in self.step():
                assert update.error is None
                ids, lens = found[update.request_id]
                ids += update.new_ids
                lens += [] if update.accept_len is None else [update.accept_len]
                left -= update.finish_reason is not None
        self.until(lambda: self.prefill.holds_nothing and self.decode.holds_nothing)
        return [(tuple(ids), lens) for ids, lens in found]

    def close(self):
        for worker in (self.decode, self.prefill):
            worker.close()


@pytest.fixture
def workers(pair, request):
    with ranks_on_threads():
        both = Workers(pair, *request.param[:2], **dict(request.param[2:]))
        yield both
        both.close()


SIZES = [(2, 2), (1, 2, ("page_size", 4)), (2, 1), (4, 2, ("overlap", True)), (2, 4)]


@pytest.mark.parametrize("workers", few_values(SIZES, 1, 3), indirect=True, ids=str)
def test_workers_of_any_ranks_hand_over_to_each_other(workers, pair, expected):
    """Tokens and accept lengths of one rank; again with prompts that are cached. Nothing goes another way."""
    assert workers.generate(pair.prompts(LENGTHS), PARAMS) == expected
    assert workers.generate(pair.prompts(LENGTHS), PARAMS) == expected
    load = workers.decode.connector.load
    assert (load.num_requests_done, load.num_local_prefills) == (2 * len(LENGTHS), 0)


@pytest.mark.parametrize("sizes", few_values([(1, 2), (2, 1), (2, 2)], 0))
def test_states_of_ranks_are_handed_over(tmp_path, sizes):
    """Each rank has heads of a recurrence and their channels of the convolution; the record has all of them."""
    with recurrent_models.known_family(), ranks_on_threads():
        pair = recurrent_models.save_pair(tmp_path, "sum", "delta", "full")
        expected, both = answers(pair), Workers(pair, *sizes)
        assert both.generate(pair.prompts(LENGTHS), PARAMS) == expected
        load = both.decode.connector.load
        assert (load.num_requests_done, load.num_local_prefills) == (len(LENGTHS), 0)
        both.close()


@pytest.mark.pairwise
@pytest.mark.parametrize("workers", [(2, 2, ("lease_s", 2.0))], indirect=True, ids=str)
@pytest.mark.parametrize("how", ["stalled", "broken"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_does_not_come_to_one_rank_has_not_come(workers, pair, expected, rank, how):
    """A rank whose transfers stop or fail, in the middle: requests go on locally, on all ranks, and as they should."""

    def stop(load):
        transport = workers.transports[rank]
        transport.stalled = how == "stalled" and load.num_chunks >= 2 and load.num_local_prefills == 0
        transport.broken = how == "broken" and load.num_chunks >= 2 and load.num_local_prefills == 0

    assert workers.generate(pair.prompts(LENGTHS), PARAMS, stop) == expected
    assert workers.decode.connector.load.num_local_prefills > 0


@pytest.mark.parametrize("workers", [(2, 2)], indirect=True, ids=str)
def test_a_wrong_byte_on_one_rank_is_seen_by_all(workers, pair, expected, monkeypatch):
    """The second rank's, before any rank imports: a checksum says so, and the request is prefilled locally."""
    kv_transfer, transport = workers.decode.opened.scheduler.kv_transfer, workers.transports[1]
    refused, real, poll = [], kv_transfer._give_up, transport.poll
    spoilt = []

    def spoil(handle):
        state = poll(handle)
        if state == "done" and workers.decode.connector.load.num_requests_in_flight and not spoilt:
            for slot in range(3):
                spoilt.append((ctypes.c_ubyte * 1).from_address(transport.memory.address + slot * (1 << 15) + 40))
                spoilt[-1][0] ^= 4
        return state

    monkeypatch.setattr(transport, "poll", spoil)
    monkeypatch.setattr(kv_transfer, "_give_up", lambda *request: (refused.append(request), real(*request)))
    assert workers.generate(pair.prompts(LENGTHS), PARAMS) == expected
    assert refused


# ---------------------------------------------------------------------------------------------- who needs what of whom


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("their_size", [1, 2, 4, 8, 16])
def test_copies_fill_every_ranks_part_with_what_whole_ranks_have(size, their_size):
    """Bytes of an imagined payload, each segment's its own: last chunks and others, windows, up to 16 ranks."""
    shapes = enumerate([(8, None), (4, 8), (1, 3)])
    groups = tuple(KVGroup(GroupName(f"g{i}"), 2, KVFormat(2, heads, 6), window) for i, (heads, window) in shapes)
    whole = ChunkLayout(groups, 4, 52)
    for chunk in (KVChunk(0, 5, 9), KVChunk(5, 4, 9), KVChunk(0, 2, 30), KVChunk(3, 9, 12)):
        theirs = [filled(whole, chunk, rank, their_size) for rank in range(their_size)]
        for rank in range(size):
            want, got = filled(whole, chunk, rank, size), bytearray(whole.of_rank(size).num_bytes(chunk))
            for copy in block_copies(whole, chunk, rank, size, their_size):
                part = theirs[copy.rank][copy.there.offset :][: copy.there.num_bytes]
                assert copy.there.num_bytes == copy.here.num_bytes > 0
                got[copy.here.offset : copy.here.offset + copy.here.num_bytes] = part
            assert got == want
        if size == their_size:
            assert all(len({c.rank for c in block_copies(whole, chunk, r, size, size)} - {r}) == 0 for r in range(size))


def filled(whole, chunk, rank, size):
    """What a rank's slot holds: of each head bytes that say which it is."""
    mine = whole.of_rank(size)
    slot = bytearray(mine.num_bytes(chunk))
    names = [group.name for group in whole.groups]
    for segment in mine.segments(chunk):
        word = 255
        if segment.group is not None:
            group = whole.groups[names.index(segment.group)]
            word = 16 * (1 + names.index(segment.group)) + first_head(group, rank, size) + segment.head
        slot[segment.offset : segment.offset + segment.num_bytes] = bytes([word]) * segment.num_bytes
    return slot


def test_transfers_count_together():
    assert joined(["done", "done"]) == joined([]) == "done"
    assert joined(["done", "busy"]) == "busy"
    assert joined(["failed", "busy"]) == joined(["broken", "done"]) == "broken"
    assert joined(["failed", "done"]) == "failed"
