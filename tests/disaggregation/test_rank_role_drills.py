"""Workers of several ranks over NIXL, in processes: they hand over, and when a rank is killed no request is lost."""

import os
import signal

import pytest

from support.addresses import addresses
from support.handover_workers import WorkerProcess
from support.rank_pairs import LENGTHS, PARAMS, answers, options_of, save_pair
from support.serving import child_of
from support.waiting import until
from treetop.types.config import EngineConfig
from treetop.types.kv_transfer.options import DisaggregationOptions

pytest.importorskip("nixl_cu12", reason="needs NIXL")
pytestmark = pytest.mark.slow
LEASE_S = 6.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("divisible"))


@pytest.fixture(scope="module")
def expected(pair):
    return answers(pair)


@pytest.fixture
def start(tmp_path, pair):
    """Starts a worker of so many ranks."""
    started = []

    def begin(ranks, *arguments):
        slots = {"disaggregation_slots": 4, "disaggregation_slot_bytes": 1 << 15, "disable_radix_cache": True}
        config = EngineConfig(**options_of(pair, device="cpu", tp_size=ranks, **slots))
        started.append(WorkerProcess(tmp_path, config, DisaggregationOptions(*arguments, lease=LEASE_S)))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def nothing_held(worker):
    load, kv_transfer = worker.load, worker.kv_transfer
    return load.num_running == load.num_waiting == kv_transfer.num_requests_in_flight == kv_transfer.num_slots_busy == 0


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 2), (2, 1), (1, 2)])
def test_a_rank_of_a_prefill_worker_is_killed_while_pieces_travel(start, pair, expected, prefill_ranks, decode_ranks):
    """Before that all is handed over, as one rank would compute it. Of one rank the worker itself is killed."""
    (listen,) = addresses(1)
    decode = start(decode_ranks, "decode", None, (listen,))
    prefill = start(prefill_ranks, "prefill", listen)
    prefill.up()
    decode.up().until(lambda: decode.kv_transfer.num_peers == 1 and nothing_held(decode))
    prompts = pair.prompts(LENGTHS)
    assert decode.wait(decode.ask(prompts, PARAMS)) == expected
    decode.until(
        lambda: (
            decode.kv_transfer.num_requests_done + decode.kv_transfer.num_local_prefills == len(prompts)
            and nothing_held(decode)
        )
    )
    assert decode.kv_transfer.num_requests_done > len(prompts) // 2  # a deadline may pass on a busy machine
    prefill.until(lambda: nothing_held(prefill))
    before = decode.kv_transfer.num_chunks
    ids = decode.ask(prompts, PARAMS)
    decode.until(lambda: decode.kv_transfer.num_chunks > before)
    os.kill(child_of(prefill.process.pid, "tp_worker") if prefill_ranks > 1 else prefill.process.pid, signal.SIGKILL)
    assert decode.wait(ids) == expected
    decode.until(lambda: decode.kv_transfer.num_peers == 0 and nothing_held(decode))
    until(lambda: prefill.process.poll() is not None, "a worker without one of its ranks goes on")
