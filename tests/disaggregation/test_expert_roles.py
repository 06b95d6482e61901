"""Ranks that share experts prefill for ranks that share experts, with MTP: tokens and accept lengths of one process.

Ranks are threads here, and what they hand over is copied in memory; `test_expert_role_drills.py` has processes.
"""

import threading
from contextlib import closing, contextmanager

import pytest

from support.addresses import addresses
from support.callers import Caller
from support.engines import greedy, sampled
from support.expert_pairs import CHAIN, TREE, build, save_glm5_with_mtp, save_glm_with_mtp, send_to
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import Pair
from support.waiting import WAIT_S, until
from treetop.core.wire import ProcessOptions
from treetop.disaggregation.connector import check_disaggregation
from treetop.distributed.background import BackgroundClient
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.requests import EngineRequest
from treetop_debug.expert_ranks import expert_ranks_on_threads

LENGTHS = [3, 33, 17, 60, 9, 41]
PARAMS = [
    greedy(12),
    sampled(5, 12),
    greedy(12),
    sampled(9, 12, top_k=5, logprobs=2),
    sampled(3, 10, presence_penalty=0.5, logit_bias={5: 1.5}),
    greedy(1),
]
SLOTS = {"disaggregation_slots": 3, "disaggregation_slot_bytes": 1 << 14, "chunked_prefill_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_glm_with_mtp(tmp_path_factory.mktemp("glm"))


def config_of(folder, shape, ranks, **options):
    """As `build` has it."""
    k, steps, size = shape
    tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
    options = {"dtype": "float64", "context_length": 96, "page_size": 4, "max_running_requests": 4, **options}
    return EngineConfig(str(folder), speculative_algorithm="MTP", ep_size=ranks, **tree, **options)


class Side:
    """A group with a role. ranks: its threads."""

    def __init__(self, started, config, disaggregation):
        before = len(started)
        self.thread = BackgroundClient(ProcessOptions("", config, disaggregation=disaggregation))
        self.ranks = started[before:]
        self.core = self.thread.core

    @property
    def loads(self):
        return [rank.connector.load for rank in self.ranks]

    def counted(self, name):
        return sum(getattr(load, name) for load in self.loads)

    def generate(self, prompts, params, places=None, meanwhile=lambda: None):
        """Ids and accept lengths of each prompt. places: its rank. meanwhile: is called between updates."""
        if places is not None:
            send_to(self.core, iter(places).__next__)
        found = {self.thread.next_id(): ([], []) for _ in prompts}
        asked = [
            EngineRequest(number, tuple(prompt), each, each.seed or 0)
            for number, prompt, each in zip(found, prompts, params, strict=True)
        ]
        left, caller = len(asked), Caller(self.thread.submit)
        caller.add(asked)
        while left:
            for update in caller.get():
                assert update.error is None
                found[update.request_id][0].extend(update.new_ids)
                found[update.request_id][1].extend([] if update.accept_len is None else [update.accept_len])
                left -= update.finish_reason is not None
            meanwhile()
        return [(tuple(ids), tuple(lens)) for ids, lens in found.values()]

    def nothing_is_held(self):
        """Rows, pages and slots; only while its ranks have nothing to do."""
        if (
            any(rank.core.busy for rank in self.ranks)
            or self.counted("num_requests_in_flight")
            or self.counted("num_slots_busy")
        ):
            return False
        for rank in self.ranks:
            rank.core.scheduler.check_integrity()
        return True

    def all_is_back(self):
        until(self.nothing_is_held, "something is held")

    def close(self):
        self.thread.close()


@pytest.fixture
def started():
    """All ranks that are started, on threads."""
    with expert_ranks_on_threads() as ranks:
        yield ranks


def computing(started, folder, shape, peers, lease_s=WAIT_S, **options):
    """A prefill group that listens at these addresses."""
    disaggregation = DisaggregationOptions("prefill", peers[0], lease=lease_s)
    return Side(started, config_of(folder, shape, len(peers), **{"graphs": "sim", **SLOTS, **options}), disaggregation)


def asking(started, folder, shape, ranks, peers, lease_s=WAIT_S, **options):
    """A decode group that asks at these addresses."""
    disaggregation = DisaggregationOptions("decode", None, tuple(peers), lease=lease_s)
    return Side(started, config_of(folder, shape, ranks, **{"graphs": "sim", **SLOTS, **options}), disaggregation)


def have_met(prefill, decode):
    """Every rank of one with every rank of the other, and links have been tried."""
    until(lambda: decode.counted("num_peers") == len(prefill.ranks) * len(decode.ranks), "peers have not met")
    until(lambda: decode.counted("num_slots_busy") == 0, "a link is being tried")


@contextmanager
def sides(started, folder, shape, prefill_ranks, decode_ranks, **options):
    """A prefill and a decode group that have met."""
    peers = addresses(prefill_ranks)
    with (
        closing(computing(started, folder, shape, peers, **options)) as prefill,
        closing(asking(started, folder, shape, decode_ranks, peers, **options)) as decode,
    ):
        have_met(prefill, decode)
        yield prefill, decode


def expected(folder, shape, prompts, params):
    outputs = build(folder, shape, 1).generate(prompts, params)
    return [(output.token_ids, output.metrics.accept_lens) for output in outputs]


@pytest.mark.parametrize(
    ("shape", "prefill_ranks", "decode_ranks", "places", "options"),
    few_of(
        [
            (TREE, 2, 2, [0, 1] * 3, {"overlap": True}),
            (CHAIN, 2, 4, [3] * 6, {"overlap": False, "check_level": 2}),
            (TREE, 2, 2, [1, 0, 1] * 2, {"tp_size": 2}),
        ],
        0,
    ),
)
def test_groups_hand_over_what_one_process_computes(
    started, folder, shape, prefill_ranks, decode_ranks, places, options
):
    """Greedy and sampled, to ranks of which some are idle; then again, with prompts that both sides have in caches."""
    prompts = Pair(folder, None).prompts(LENGTHS)
    want = expected(folder, shape, prompts, PARAMS)
    with sides(started, folder, shape, prefill_ranks, decode_ranks, **options) as (prefill, decode):
        assert decode.generate(prompts, PARAMS, places) == want
        pieces = decode.counted("num_chunks")
        assert decode.generate(prompts, PARAMS, places) == want
        assert (decode.counted("num_requests_done"), decode.counted("num_local_prefills")) == (12, 0)
        assert 0 < decode.counted("num_chunks") - pieces < pieces, "prefixes that are there were asked for"
        assert all(load.num_requests_done for load in prefill.loads), "all went to one rank"
        prefill.all_is_back()
        decode.all_is_back()
    assert sum(sum(lens) for _, lens in want) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "prefill_ranks", "decode_ranks", "places"),
    few_of([(TREE, 2, 2, [1] * 6), (CHAIN, 4, 2, [0, 1, 1] * 2)], 0),
)
def test_sparse_attention_is_handed_over_with_its_indexers_keys(
    started, tmp_path, shape, prefill_ranks, decode_ranks, places
):
    """GLM-5.2 with an MTP layer, past its few chosen keys: what one process gives, with idle ranks at level 2."""
    folder = save_glm5_with_mtp(tmp_path)
    prompts = Pair(folder, None).prompts(LENGTHS)
    want = expected(folder, shape, prompts, PARAMS)
    with sides(started, folder, shape, prefill_ranks, decode_ranks, check_level=2) as (prefill, decode):
        assert decode.generate(prompts, PARAMS, places) == want
        assert (decode.counted("num_requests_done"), decode.counted("num_local_prefills")) == (6, 0)
        prefill.all_is_back()
        decode.all_is_back()
    assert sum(sum(lens) for _, lens in want) > 0


@pytest.mark.slow
def test_a_prefill_rank_that_dies_ends_its_group_and_costs_a_local_prefill(started, folder):
    """While pieces travel. Another group in its place is used again; all that was held comes back."""
    prompts = Pair(folder, None).prompts(LENGTHS)
    want, peers = expected(folder, TREE, prompts, PARAMS), addresses(2)
    with closing(asking(started, folder, TREE, 2, peers)) as decode:
        with closing(computing(started, folder, TREE, peers)) as prefill:
            have_met(prefill, decode)

            def strike():
                if decode.counted("num_chunks") > 1:
                    prefill.ranks[1].kill()

            assert decode.generate(prompts, PARAMS, meanwhile=strike) == want
            until(lambda: decode.counted("num_peers") == 0, "nobody sees that it is dead")
            until(lambda: "rank 1 has ended with exit code -9" in str(prefill.core.failure))
            decode.all_is_back()
        whole, local = decode.counted("num_requests_done"), decode.counted("num_local_prefills")
        assert local > 0
        with closing(computing(started, folder, TREE, peers)) as again:
            have_met(again, decode)
            others = [prompt[::-1] for prompt in prompts]
            assert decode.generate(others, PARAMS) == expected(folder, TREE, others, PARAMS)
            assert (decode.counted("num_requests_done"), decode.counted("num_local_prefills")) == (
                whole + len(others),
                local,
            )
            again.all_is_back()
            decode.all_is_back()


def test_a_decode_rank_that_dies_ends_its_group_and_gives_the_prefill_ranks_their_slots_back(started, folder):
    """Every request is told so, as the engine's end; a supervisor goes on with another (`test_engine_restarts.py`).

    The rank is held once a piece has come, so that no request ends before it dies.
    """
    prompts = Pair(folder, None).prompts(LENGTHS)
    with sides(started, folder, TREE, 2, 2, lease_s=5.0) as (prefill, decode):
        rank, come, go_on = decode.ranks[0], threading.Event(), threading.Event()
        step = rank.core.step

        def held():
            if decode.counted("num_chunks"):
                come.set()
                go_on.wait(WAIT_S)
            return step()

        rank.core.step = held
        asked = [EngineRequest(decode.thread.next_id(), tuple(prompt), greedy(30), 0) for prompt in prompts]
        caller, last = Caller(decode.thread.submit), []
        caller.add(asked)
        assert come.wait(WAIT_S)
        rank.kill()
        go_on.set()
        while len(last) < len(asked):
            last += [update for update in caller.get() if update.finish_reason is not None]
        assert all(update.engine_failed for update in last)
        until(lambda: prefill.counted("num_peers") == 0, "a session goes on")
        prefill.all_is_back()


def test_a_prefill_group_refuses_clients_and_says_what_it_does(started, folder):
    """Its load is told though nobody asks it for anything."""
    with closing(computing(started, folder, TREE, addresses(2))) as prefill:
        assert "--disaggregation-mode prefill" in prefill.core.info.refuses
        until(lambda: prefill.core.load.kv_transfer is not None)
        assert prefill.core.load.kv_transfer.mode == "prefill"


def test_ports_that_do_not_suffice_are_refused_by_name():
    disaggregation = DisaggregationOptions("prefill", "127.0.0.1:65534")
    refused(
        ConfigError,
        lambda: check_disaggregation(EngineConfig(ep_size=4), disaggregation),
        "4 ranks",
    )
