"""Prefill and decode in processes of their own, over NIXL, while workers are killed, stopped and started.

On a CPU; where there are GPUs on them, the prefill worker on the last.

Whatever happens, every accepted request gets the tokens and accept lengths of one engine, and all slots come back.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import torch

from support.addresses import addresses
from support.engines import build, greedy, sampled
from support.handover_workers import WorkerProcess
from support.tiny_models import Pair
from support.warm import Popen
from treetop.disaggregation.nixl import PACKAGES
from treetop.distributed.engine_process import _LOAD_S
from treetop.types.config import EngineConfig
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.requests import KVTransferStats
from treetop.types.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not any(map(find_spec, PACKAGES)), reason="needs NIXL")
NUM_GPUS = torch.cuda.device_count()
PLACE = {"device": "cuda", "dtype": "float32"} if NUM_GPUS else {"device": "cpu", "dtype": "float64"}
LEASE_S = 6.0
LENGTHS = [3, 200, 40, 150, 220, 33]
PARAMS = [greedy(12), sampled(5, 12), greedy(12), sampled(9, 12, top_k=5, logprobs=2), greedy(12), sampled(1, 12)]
_SEEDS = count(100)
Expected = list[tuple[tuple[int, ...], list[int]]]


class Site:
    """A decode worker that lives through all drills, and the prefill workers that come and go."""

    def __init__(self, folder: Path, pair: Pair) -> None:
        self.folder, self.pair = folder, pair
        self.registry = folder / "registry"
        self.registry.mkdir()
        self.alone = build(pair, chunked_prefill_size=64, **PLACE)
        self.config = EngineConfig(
            model=str(pair.target),
            draft=str(pair.head),
            **PLACE,
            context_length=256,
            max_running_requests=8,
            chunked_prefill_size=16,
            disaggregation_slots=4,
            disaggregation_slot_bytes=1 << 17,
        )
        self.decode = self.start("decode", subprocess.Popen)
        self.prefill = self.start("prefill")
        self.decode.up()

    def start(self, role: str, start: type[subprocess.Popen[bytes]] = Popen) -> WorkerProcess:
        listen = addresses(1)[0] if role == "prefill" else None
        options = DisaggregationOptions(role, listen, (), str(self.registry), None, LEASE_S)  # type: ignore[arg-type]  # a role
        gpu = None if NUM_GPUS == 0 else NUM_GPUS - 1 if role == "prefill" else 0
        return WorkerProcess(self.folder, self.config, options, gpu=gpu, start=start)

    def prompts(self) -> list[list[int]]:
        """Other ones each time, so that no cache has them."""
        return self.pair.prompts(LENGTHS, seed=next(_SEEDS))

    def expected(self, prompts: list[list[int]], params: list[SamplingParams] = PARAMS) -> Expected:
        return [(o.token_ids, [*o.metrics.accept_lens]) for o in self.alone.generate(prompts, params)]

    def ask(self) -> tuple[list[RequestId], Expected]:
        """What is expected takes time, and comes first: what follows is to meet requests on their way."""
        prompts = self.prompts()
        expected = self.expected(prompts)
        return self.decode.ask(prompts, PARAMS), expected

    def ask_and_see_pieces_travel(self) -> tuple[list[RequestId], Expected]:
        """As `ask`, and a piece has come. A session that ended as the machine stood still is waited for again."""
        for _ in range(20):
            self.with_prefill()
            before = self.settled().num_chunks
            ids, expected = self.ask()
            if self._has_more_chunks(before, ids):
                return ids, expected
            assert self.decode.wait(ids) == expected
        pytest.fail("no piece travels")

    def _has_more_chunks(self, before: int, ids: list[RequestId]) -> bool:
        """By the time that these requests have ended."""
        self.decode.until(lambda: self.decode.kv_transfer.num_chunks > before or self.decode.have_ended(ids))
        return self.decode.kv_transfer.num_chunks > before

    def with_prefill(self) -> None:
        """A prefill worker is there, and has been seen."""
        if self.prefill.process.poll() is not None:
            self.prefill.close()
            self.prefill = self.start("prefill")
        self.prefill.up()
        self.decode.until(lambda: self.decode.kv_transfer.num_peers == 1)

    def all_is_back(self) -> None:
        """No request, no slot, no row is held at the decode worker, nor at the prefill worker if it lives."""
        for worker in (self.decode, self.prefill):
            if worker.process.poll() is None:
                worker.until(lambda w=worker: _nothing_held(w))  # type: ignore[misc]  # bound now

    def settled(self) -> KVTransferStats:
        """The decode worker's numbers, once what has happened is in them: it tells them now and then."""
        told = time.monotonic() + 2 * _LOAD_S
        self.decode.until(lambda: time.monotonic() >= told)
        return self.decode.kv_transfer

    def close(self) -> None:
        for worker in (self.decode, self.prefill):
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGCONT)
            worker.close()
        self.alone.close()


def _counted(worker: WorkerProcess) -> int:
    """Requests that were handed over, or prefilled locally after all."""
    return worker.kv_transfer.num_requests_done + worker.kv_transfer.num_local_prefills


def _nothing_held(worker: WorkerProcess) -> bool:
    load, kv_transfer = worker.load, worker.kv_transfer
    return load.num_running == load.num_waiting == kv_transfer.num_requests_in_flight == kv_transfer.num_slots_busy == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, strong_pair: Pair) -> Iterator[Site]:
    drills = Site(tmp_path_factory.mktemp("site"), strong_pair)
    yield drills
    drills.close()


def test_without_a_prefill_worker_requests_are_served(site: Site) -> None:
    """The prefill worker is still starting, or has just come: both are right."""
    ids, expected = site.ask()
    assert site.decode.wait(ids) == expected


def test_requests_are_handed_over_and_prefix_hits_shorten_what_is_asked_for(site: Site) -> None:
    for _ in range(20):  # a deadline may pass as the machine stands still, and a request goes on at the decode worker
        site.with_prefill()
        before = site.settled()
        prompts = site.prompts()
        expected = site.expected(prompts)
        assert site.decode.wait(site.decode.ask(prompts, PARAMS)) == expected
        assert site.decode.wait(site.decode.ask(prompts, PARAMS)) == expected
        site.all_is_back()
        asked, counted = 2 * len(prompts), before.num_requests_done + before.num_local_prefills
        site.decode.until(lambda want=counted + asked: _counted(site.decode) == want)  # type: ignore[misc]  # bound now
        after = site.decode.kv_transfer
        handed_over = after.num_requests_done - before.num_requests_done
        if handed_over > asked // 2:
            break
    assert handed_over > asked // 2
    assert after.num_bytes > before.num_bytes
    assert after.num_chunks - before.num_chunks < 2 * sum(-(-length // 16) for length in LENGTHS)
    assert after.time_seconds > before.time_seconds


@pytest.mark.slow
def test_a_stopped_prefill_worker_delays_and_loses_nothing(site: Site) -> None:
    """It goes on after twice its lease: late answers count for nothing, and it is used again."""
    ids, expected = site.ask_and_see_pieces_travel()
    before = site.decode.kv_transfer
    site.prefill.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    assert site.decode.wait(ids) == expected
    assert site.decode.kv_transfer.num_local_prefills > before.num_local_prefills
    time.sleep(max(0.0, stopped_s + 2 * LEASE_S - time.monotonic()))  # all leases are over by then
    site.prefill.process.send_signal(signal.SIGCONT)
    site.with_prefill()
    site.all_is_back()
    whole = site.decode.kv_transfer.num_requests_done
    ids, expected = site.ask()
    assert site.decode.wait(ids) == expected
    site.decode.until(lambda: site.decode.kv_transfer.num_requests_done > whole)


@pytest.mark.slow
def test_a_registry_without_renewals_ends_no_session(site: Site) -> None:
    """Whoever is connected stays so; only who has gone is not looked for."""
    site.with_prefill()
    site.prefill.process.send_signal(signal.SIGSTOP)
    for file in site.registry.glob("*"):
        file.unlink()
    site.prefill.process.send_signal(signal.SIGCONT)
    whole = site.decode.kv_transfer.num_requests_done
    ids, expected = site.ask()
    assert site.decode.wait(ids) == expected
    site.decode.until(lambda: site.decode.kv_transfer.num_requests_done > whole)


@pytest.mark.parametrize(
    "when", [pytest.param("before", marks=pytest.mark.slow), pytest.param("after", marks=pytest.mark.slow), "during"]
)
def test_a_prefill_worker_is_killed(site: Site, when: str) -> None:
    """Before anything was computed, while pieces travel, or once the requests decode."""
    site.with_prefill()
    before = site.settled()
    ids, expected = site.ask_and_see_pieces_travel() if when == "during" else site.ask()
    if when == "after":
        site.decode.until(
            lambda: _counted(site.decode) == before.num_requests_done + before.num_local_prefills + len(ids)
        )
    site.prefill.process.kill()
    killed_s = time.monotonic()
    site.prefill.process.wait()
    assert site.decode.wait(ids) == expected
    site.decode.until(lambda: site.decode.kv_transfer.num_peers == 0)
    site.all_is_back()
    if when == "before":
        assert site.decode.kv_transfer.num_local_prefills > before.num_local_prefills
        assert min(site.decode.first_s[each] for each in ids) - killed_s < LEASE_S, "a death is seen at once"


@pytest.mark.slow
def test_a_killed_decode_workers_slots_come_back(site: Site) -> None:
    """Its prefill worker gives up what it computes for it. Last, for the decode worker is the site's."""
    site.ask_and_see_pieces_travel()
    site.decode.process.kill()
    site.prefill.until(lambda: site.prefill.kv_transfer.num_peers == 0 and _nothing_held(site.prefill))
