"""The tier of K/V on the host: what leaves the device's pages comes back, and nobody can tell by the tokens."""

import random
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

from support.engines import accepted, greedy, pump, rest, sampled, steps, submit
from support.families import FAMILIES
from support.grids import few_of
from support.loras import save_lora
from support.offloading import NUMBERS, POOL, VOCAB, ask, ask_salted, on_a_cpu, stats, turns, with_tier
from support.recurrent_models import known_family
from support.recurrent_models import save_pair as recurrent_pair
from support.refusing import refused
from support.tiny_models import Pair
from treetop.debug import two_group
from treetop.engine.memory import GIB, DeviceMemory
from treetop.engine.startup.host_layout import check_host_memory, host_bytes
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckError, ConfigError
from treetop.types.ids import RequestId
from treetop.types.messages import OffloadPlan, PrefillPlan
from treetop.types.requests import EngineRequest, Tenant
from treetop_debug.offloading_faults import OFFLOADING_FAULTS
from treetop_debug.ranks import ranks_on_threads


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Pair:
    small = {"vocab_size": VOCAB}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        return Pair(*two_group.write_two_group_pair(tmp_path_factory.mktemp("windowed"), 40))


def replay(llm, asked, run=pump):
    """Serve prompts one after the other. Returns (tokens, accept lengths, cached tokens) of each, and the steps."""
    found, plans = [], []
    for number, (_, prompt) in enumerate(asked):
        params = greedy(9, whole=True) if number % 2 else sampled(number, 9, whole=True)
        (request,) = submit(llm, [prompt], [params])
        plans += [plan for plan, _ in run(llm)]
        found.append((tuple(request.output_ids), tuple(accepted(request)), request.num_cached_tokens))
    return found, plans


@pytest.mark.parametrize(
    ("kind", "options"),
    few_of(
        [
            pytest.param("whole", {"overlap": True, "graphs": "sim"}, id="whole-overlap"),
            pytest.param("whole", {"check_level": 3}, id="whole-poison", marks=pytest.mark.slow),
            pytest.param("windowed", {"overlap": True, "graphs": "sim"}, id="windowed-overlap", marks=pytest.mark.slow),
            pytest.param("windowed", {"check_level": 3}, id="windowed-poison"),
        ],
        3,
    ),
)
def test_a_hit_on_the_host_gives_what_computing_gives(strong_pair, windowed, kind, options):
    """Tokens and accept lengths of agents' turns are those of an engine that evicts nothing, and most comes back."""
    pair = strong_pair if kind == "whole" else windowed
    asked = [*turns(random.Random(3))]
    with on_a_cpu():
        llm = with_tier(pair, **{**POOL, **options})
        got, plans = replay(llm, asked)
        want, _ = replay(with_tier(pair, **{**POOL, **options, "max_total_tokens": 4096}), asked)
    assert [each[:2] for each in got] == [each[:2] for each in want]
    assert stats(llm).loaded_tokens > 200
    assert stats(llm).failed_loads == 0
    assert sum(each[2] for each in got[5:]) > 0.8 * sum(len(prompt) for _, prompt in asked[:5])
    offloads = [plan for plan in plans if isinstance(plan, OffloadPlan)]
    assert any(plan.unpacks and plan.fetches for plan in offloads), "no load takes several plans"
    assert any(isinstance(plan, PrefillPlan) and plan.setups for plan in plans)


def damage(llm):
    """Change the sign of every number on the host."""
    for group in llm.engine.host_pages._groups.values():
        for slab in group.slabs:
            slab.result()[:, 7::8] ^= 1 << 7


def test_a_damaged_page_is_computed_again_and_nothing_on_the_host_is_trusted(strong_pair, caplog):
    asked = [*turns(random.Random(4))]
    with on_a_cpu():
        llm = with_tier(strong_pair, **POOL)
        want = ask(with_tier(strong_pair, **{**POOL, "max_total_tokens": 4096}), asked)
        got = ask(llm, asked[:5])
        rest(llm)
        damage(llm)
        got += ask(llm, asked[5:])
        rest(llm)
    assert got == want
    assert stats(llm).failed_loads == 1
    assert "K/V on the host are damaged" in caplog.text
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("name", ["host-checksum-unchecked", "host-page-read-too-early"])
def test_a_copy_that_is_not_what_was_saved_is_told(strong_pair, name, caplog):
    """By its checksum, without which tokens are wrong."""
    asked, fault = [*turns(random.Random(4))], OFFLOADING_FAULTS[name]
    with on_a_cpu():
        want = ask(with_tier(strong_pair, **{**POOL, "max_total_tokens": 4096}), asked)
        with fault.active():
            llm = with_tier(strong_pair, **POOL)
            got = ask(llm, asked[:5])
            if name == "host-checksum-unchecked":
                rest(llm)
                damage(llm)
            got += ask(llm, asked[5:])
    if fault.guard == "wrong tokens":
        assert got != want
        assert stats(llm).failed_loads == 0
    else:
        assert got == want
        assert stats(llm).failed_loads > 0
        assert fault.guard in caplog.text


@pytest.mark.parametrize("name", ["host-page-without-draft", "host-page-of-another-salt"])
def test_copies_that_leave_something_out_are_told(strong_pair, name):
    fault, asked = OFFLOADING_FAULTS[name], [*turns(random.Random(4))]
    with on_a_cpu(), fault.active():
        llm = with_tier(strong_pair, **POOL)
        with pytest.raises(CheckError, match=fault.guard):  # noqa: PT012  # whichever request comes to it
            ask_salted(llm, asked[:5], "")
            ask_salted(llm, asked[5:], "mine")


def test_a_hit_without_the_drafts_pages_costs_the_acceptance(strong_pair):
    """What the guard is for: without it tokens are right, and fewer drafts are."""
    fault, asked = OFFLOADING_FAULTS["host-page-without-draft"], [*turns(random.Random(4))]
    with on_a_cpu(), fault.active():
        llm = with_tier(strong_pair, **POOL, check_level=0)
        got = ask(llm, asked)
    with on_a_cpu():
        want = ask(with_tier(strong_pair, **POOL, check_level=0), asked)
    assert [each[0] for each in got] == [each[0] for each in want]
    assert got != want


def test_salts_part_the_host_too(strong_pair):
    """A request of another salt gets nothing of it, one of the same does."""
    asked = [*turns(random.Random(4), agents=4, count=1)]
    with on_a_cpu():
        llm = with_tier(strong_pair, **POOL)
        ask_salted(llm, asked, "a")
        before = stats(llm).loaded_tokens
        assert ask_salted(llm, asked, "b") == [0] * 4
        assert stats(llm).loaded_tokens == before
        assert min(ask_salted(llm, asked[:2], "a")) >= 80
        assert stats(llm).loaded_tokens >= before + 160


def test_other_weights_forget_the_host(strong_pair):
    asked = [*turns(random.Random(4), agents=4, count=1)]
    with on_a_cpu():
        llm = with_tier(strong_pair, **POOL)
        ask(llm, asked)
        rest(llm)
        assert stats(llm).saved_tokens > 0
        llm.update_weights(str(strong_pair.target))
        assert stats(llm).usage_perc == 0
        (output,) = llm.generate([asked[0][1]], [greedy(4)])
        rest(llm)
    assert output.metrics.num_cached_tokens == 0
    llm.scheduler.check_integrity()


def test_the_host_keeps_what_was_used_last_and_no_more_than_its_bytes(strong_pair):
    asked = [*turns(random.Random(4), agents=7, count=1)]
    with on_a_cpu():
        llm = with_tier(strong_pair, mib=0.9, **POOL)
        layout = llm.engine.layout
        assert host_bytes(layout.host, 8) <= 0.9 * 2**20
        ask_salted(llm, asked, "")
        assert stats(llm).usage_perc > 0.8
        known = [llm.scheduler.rows.host._host.num_known(prompt) > 0 for _, prompt in asked]
        assert sum(known) < len(asked)
        assert known == sorted(known), "the first is evicted first"
    llm.scheduler.check_integrity()


def test_what_cannot_be_is_refused_by_name(strong_pair):
    refused(ConfigError, lambda: with_tier(strong_pair), "--kv-offloading-size", "CPU")
    with on_a_cpu():
        refused(ConfigError, lambda: with_tier(strong_pair, disable_radix_cache=True), "--disable-radix-cache")
        refused(CapacityError, lambda: with_tier(strong_pair, mib=2**30), "--kv-offloading-size", "control group")
        refused(CapacityError, lambda: with_tier(strong_pair, mib=0.001), "--kv-offloading-size", "no page")


def test_requests_that_end_while_they_load_leave_nothing(strong_pair):
    asked = [*turns(random.Random(4))]
    with on_a_cpu():
        llm = with_tier(strong_pair, **POOL)
        replay(llm, asked[:5])
        (request,) = submit(llm, [asked[5][1]], [greedy(9, whole=True)])
        plan = llm.scheduler.plan()
        assert isinstance(plan, OffloadPlan)
        assert plan.fetches
        assert llm.scheduler.load.num_waiting == 1
        llm.scheduler.abort(request.request_id)
        llm.scheduler.commit(plan, llm.engine.step(plan))
        for _ in steps(llm):
            pass
        assert not llm.scheduler.has_work
    llm.scheduler.check_integrity()


SMALL = {"page_size": 4, "context_length": 96, "max_total_tokens": 128, "max_running_requests": 1}


def returns(pair, options, first=40, more=6, least=32, ranks=nullcontext):
    """Agents' turns on a small device, against one that evicts nothing: tokens, accept lengths, and that K/V return."""
    asked = [*turns(random.Random(5), agents=4, first=first, more=more)]
    with on_a_cpu(least_tokens=8), ranks():
        llm = with_tier(pair, (2, 3, 6), **{**SMALL, **options})
        got, saw = ask(llm, asked), stats(llm)
        llm.close()
    with on_a_cpu():
        want = ask(with_tier(pair, (2, 3, 6), **{**SMALL, **options, "max_total_tokens": 1024, "tp_size": 1}), asked)
    assert got == want
    assert saw.loaded_tokens >= 4 * least
    assert saw.failed_loads == 0


def test_states_of_recurrent_layers_go_with_the_pages_of_their_tokens(tmp_path):
    with known_family():
        pair = recurrent_pair(tmp_path, "sum", "delta", "full")
        returns(pair, {"chunked_prefill_size": 64, "check_level": 2})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek v3", "glm 5.2"])
def test_latents_in_fp8_and_an_indexers_keys_return(tmp_path, family):
    returns(FAMILIES[family].save(tmp_path, seed=5).pair, {"kv_cache_dtype": "fp8_e4m3"})


@pytest.mark.slow
@pytest.mark.parametrize("states", [True, False], ids=["recurrent", "windowed"])
def test_each_rank_keeps_its_own_heads(tmp_path, windowed, states):
    with known_family():
        pair = recurrent_pair(tmp_path, "sum", "delta", "full") if states else windowed
        returns(pair, {"tp_size": 2}, ranks=ranks_on_threads)


@pytest.mark.slow
def test_adapters_part_the_host(tmp_path, strong_pair):
    """K/V of an adapter come back to its requests alone."""
    lora = save_lora(tmp_path / "lora", strong_pair.target, 4, 8.0, 1)
    (_, prompt), *others = turns(random.Random(4), agents=5, count=1)
    with on_a_cpu():
        llm = with_tier(strong_pair, lora_modules={"a": str(lora)}, **POOL)
        want = {name: llm.generate([prompt], greedy(9, whole=True), lora=name)[0].token_ids for name in (None, "a")}
        ask(llm, others)
        got = {name: llm.generate([prompt], greedy(9, whole=True), lora=name)[0].token_ids for name in ("a", None)}
    assert got == want
    assert len({*want.values()}) == 2
    assert stats(llm).loaded_tokens >= 160


def test_a_windows_pool_holds_what_is_copied_beside_every_request(windowed):
    """Of one row whose prompts come one behind the other: what is saved of one lies there as the next is prefilled."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(130)] for _ in range(4)]
    with on_a_cpu():
        llm = with_tier(windowed, **{**POOL, "max_running_requests": 1, "overlap": True})
        requests = submit(llm, prompts, [greedy(4)] * 4)
        assert any(isinstance(plan, OffloadPlan) and plan.saves for plan, _ in [*pump(llm)])
    assert [len(request.output_ids) for request in requests] == [4] * 4
    layout = llm.engine.layout
    without = replace(layout, copied_pages=0).num_pages["window"]
    assert layout.num_pages["window"] == without + layout.window_pages(40)


def test_loads_come_by_fair_shares(strong_pair):
    """One tenant's many requests, which came first, do not take the loads that another's next row waits for."""
    asked = [prompt for _, prompt in turns(random.Random(7), agents=5, count=1)]
    with on_a_cpu():
        llm = with_tier(strong_pair, **{**POOL, "max_running_requests": 3, "max_total_tokens": 512})
        ask_salted(llm, [(0, asked[0])], "")
        host, who = llm.scheduler.rows.host, {}
        for name, prompt in zip(("many",) * 4 + ("few",), asked, strict=True):
            given = EngineRequest(RequestId(next(NUMBERS)), tuple(prompt), greedy(4), 0, tenant=Tenant(name))
            who[llm.scheduler.add(given).request_id] = name
        known = patch.object(type(host._device), "num_known", lambda self, *_: 0 if self is host._device else 96)
        with known, patch.object(host, "plan", lambda: None):
            llm.scheduler._offload()
        loads = [request.request_id for request in llm.scheduler.queues.loading]
        assert [who[each] for each in loads] == ["many", "few", "many"]
        assert loads[0] < loads[2]


def test_the_tiers_of_all_engines_must_fit_the_machine():
    """`--dp-size` and `--ep-size` times the bytes, before an engine has taken any."""
    free = DeviceMemory(100 * GIB, 90 * GIB)
    config = EngineConfig.of("builtin:nestling", kv_offloading_size=40)
    with patch("treetop.engine.startup.host_layout.memory_of", lambda device: free):
        check_host_memory(config)
        check_host_memory(config, 2)
        with pytest.raises(CapacityError, match=r"120.* = 3 engines x 40 GiB, have 90.* free of 100"):
            check_host_memory(config, 3)
        check_host_memory(replace(config, kv_offloading_size=None), 1000)


def test_nothing_is_loaded_for_a_request_that_has_ended(strong_pair):
    rng = random.Random(6)
    with on_a_cpu():
        llm = with_tier(strong_pair, **POOL)
        replay(llm, turns(rng, count=1))
        host = llm.scheduler.rows.host
        ended, alive = RequestId(next(NUMBERS)), RequestId(next(NUMBERS))
        with patch.object(type(host._device), "num_known", lambda self, *_: 0 if self is host._device else 96):
            assert host.load(ended, [1] * 96, "")
            assert host.load(alive, [2] * 96, "")
        host.forget(ended)
    assert [each.request_id for each in host._loads] == [alive]


def test_a_request_whose_next_page_copies_hold_waits_for_them(strong_pair):
    """It runs alone, and the pages of the one before it are saved one a step: it was an InvariantError."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (150, 56)]
    with on_a_cpu(), patch("treetop.engine.startup.host_layout.COPIED_BYTES", 1):
        llm = with_tier(strong_pair, **{**POOL, "max_running_requests": 1})
    requests = submit(llm, prompts, [greedy(4, whole=True), greedy(40, whole=True)])
    plans = [plan for plan, _ in pump(llm)]
    assert sum(isinstance(plan, OffloadPlan) for plan in plans) > 9, "one page a step"
    assert [len(request.output_ids) for request in requests] == [4, 40]
