"""An engine that gives its memory back and takes it again: as one that has just been started."""

import gc
import weakref

import httpx
import pytest
import torch

from support.engines import build, greedy, next_and_hold, rest, sampled, tokens
from support.grids import few_of
from support.loras import save_lora
from support.refusing import refused
from support.scripted import scripted
from support.tiny_models import Pair, save_random_head, save_random_llama
from support.waiting import WAIT_S
from treetop.core.engine_core import ASLEEP
from treetop.engine.changes.host_copies import copy_storages
from treetop.types.changes import TAGS, Sleep, WakeUp
from treetop.types.errors import CheckpointError, ConfigError, InputError

SHAPE = (3, 4, 12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sleep")
    target = save_random_llama(folder / "target", seed=3)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=None))


def answers(llm, pair, **more):
    outputs = llm.generate(pair.prompts([9, 30]), [greedy(16), sampled(3, 16)], **more)
    return tokens(outputs), [each.metrics.target_forwards for each in outputs]


def test_pieces_of_memory_are_copied_whole():
    """Also the last, which is shorter, and memory that is no longer than a piece, or empty."""
    of = [torch.randint(256, (size,), dtype=torch.uint8) for size in (0, 1, 64, 65, 1000)]
    into = [torch.zeros_like(each) for each in of]
    copy_storages([(a.untyped_storage(), b.untyped_storage()) for a, b in zip(into, of, strict=True)], piece=64)
    assert all(map(torch.equal, into, of))
    copy_storages([])


@pytest.mark.parametrize(("level", "graphs"), few_of([(1, "sim"), (2, "off")], 0))
def test_it_wakes_as_after_a_start_and_memory_is_given_back(pair, level, graphs):
    """Tokens and drafts, none of a prefix of before; what sleeps is held by nobody."""
    want = answers(build(pair, SHAPE, graphs=graphs, page_size=4), pair)
    llm = build(pair, SHAPE, graphs=graphs, page_size=4)
    assert answers(llm, pair) == want
    for _ in range(2):
        runner = llm.engine.runner
        pools, target = [weakref.ref(pool.data) for pool in runner.pools.values()], weakref.ref(runner.target)
        del runner
        llm.sleep(level)
        rest(llm)  # the core's thread has left what put it to sleep
        gc.collect()
        assert [each() for each in pools] == [None] * len(pools)
        assert (target() is None) is (level == 2)
        assert llm.is_sleeping
        (refusal,) = llm.generate(pair.prompts([9])[0], greedy(4))
        assert (refusal.finish_reason, refusal.error, refusal.token_ids) == ("abort", ASLEEP, ())
        llm.sleep(level)  # it sleeps already
        llm.wake_up()
        assert not llm.is_sleeping
        first = llm.generate(pair.prompts([9, 30])[1], sampled(3, 16))[0]
        assert first.metrics.num_cached_tokens == 0
        assert answers(llm, pair)[0] == want[0]
    llm.scheduler.check_integrity()


@pytest.mark.parametrize(("level", "keeps"), few_of([(1, True), (2, False)], 0))
def test_what_was_learned_of_the_pair_until_then_is_known_when_it_wakes(pair, tmp_path, level, keeps):
    """Not what its file said when the engine started."""
    folder = {"speculative_calibration_dir": str(tmp_path)} if keeps else {}
    llm = build(pair, SHAPE, speculative_calibration="learn", **folder)
    for _ in range(2):
        answers(llm, pair)
        calibration = llm.engine.runner.state.calibration
        learned = [table.clone() for table in (calibration.nodes, calibration.inv_temp)]
        assert learned[0].any()
        llm.sleep(level)
        llm.wake_up()
        assert all(map(torch.equal, learned, (calibration.nodes, calibration.inv_temp)))


def test_tags_wake_apart_and_weights_may_change_between(pair, tmp_path):
    other = Pair(save_random_llama(tmp_path / "other", seed=8), pair.head)
    want = answers(build(other, SHAPE), pair)
    llm = build(pair, SHAPE)
    refused(InputError, lambda: llm.sleep(3), "level", "3")
    stream = llm.stream(pair.prompts([9]), greedy(200))
    next_and_hold(llm, stream, 3)
    llm.sleep(2)
    assert [*stream][-1].output.error == ASLEEP
    refused(ConfigError, lambda: llm.update_weights(other.target), "update_weights", "sleep")
    refused(InputError, lambda: llm.wake_up(["graphs"]), "tags", "'graphs'")
    refused(InputError, lambda: llm.wake_up("weights"), "tags", "a list", "'weights'")
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    refused(ConfigError, lambda: llm.sleep(2), "sleep", "wake_up")
    llm.update_weights(other.target)
    assert llm.generate([5, 6], greedy(4))[0].error == ASLEEP
    llm.wake_up(["kv_cache"])
    assert answers(llm, pair) == want


def test_weights_that_are_gone_leave_it_asleep(pair, tmp_path):
    folder = save_random_llama(tmp_path / "target", seed=3)
    llm = build(Pair(folder, None), None)
    want = answers(llm, pair)
    llm.sleep(2)
    kept = (folder / "model.safetensors").rename(tmp_path / "kept")
    refused(CheckpointError, llm.wake_up, "safetensors")
    assert llm.is_sleeping
    kept.rename(folder / "model.safetensors")
    llm.wake_up()
    assert answers(llm, pair) == want


@pytest.mark.parametrize("ranks", few_of([1, 2], 0))
def test_prefixes_are_forgotten_while_requests_run(pair, ranks):
    """Those that run are put back, and have the tokens that they would have had."""
    prompts = pair.prompts([9, 30])
    params = [greedy(200), sampled(3, 200)]
    want = tokens(build(pair, SHAPE, page_size=4).generate(prompts, params))
    llm = build(pair, SHAPE, page_size=4, tp_size=ranks, device="cpu")
    llm.flush_cache()  # nothing is there
    assert llm.generate(prompts[1], greedy(4))[0].metrics.num_cached_tokens == 0
    assert llm.generate(prompts[1], greedy(4))[0].metrics.num_cached_tokens > 0
    llm.flush_cache()
    stream = llm.stream(prompts, params)
    first = next_and_hold(llm, stream, 3)
    assert llm.scheduler.queues.decoding
    llm.flush_cache()
    outputs = {each.index: each.output for each in (first, *stream) if each.output is not None}
    assert tokens([outputs[0], outputs[1]]) == want
    llm.flush_cache()
    assert llm.generate(prompts[1], greedy(4))[0].metrics.num_cached_tokens == 0
    llm.scheduler.check_integrity()


@pytest.mark.slow
def test_ranks_and_adapters_sleep_too(pair, tmp_path):
    lora = {"it": str(save_lora(tmp_path / "lora", pair.target, 4, 8.0, 1))}
    want = [answers(build(pair, SHAPE, lora_modules=lora), pair, lora=name) for name in (None, "it")]
    llm = build(pair, SHAPE, lora_modules=lora, tp_size=2, device="cpu")
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert [answers(llm, pair, lora=name)[0] for name in (None, "it")] == [each[0] for each in want]


def test_over_http_only_where_the_operator_says_so():
    """vLLM's paths and parameters. A request that comes meanwhile may be asked again: 503."""
    asked = []

    async def change(what):
        asked.append(what)

    with scripted(lambda _: "a") as (url, core):
        core.change = change
        assert httpx.post(f"{url}/sleep", timeout=WAIT_S).status_code == 403
        assert "--enable-sleep-mode" in httpx.post(f"{url}/wake_up", timeout=WAIT_S).json()["error"]["message"]
    with scripted(lambda _: "a", enable_sleep_mode=True) as (url, core):
        core.change = change
        assert httpx.get(f"{url}/is_sleeping", timeout=WAIT_S).json() == {"is_sleeping": False}
        assert httpx.post(f"{url}/sleep?level=2", timeout=WAIT_S).status_code == 200
        assert httpx.post(f"{url}/sleep?level=two", timeout=WAIT_S).status_code == 400
        core.info = core.info._replace(asleep=TAGS)
        assert httpx.get(f"{url}/is_sleeping", timeout=WAIT_S).json() == {"is_sleeping": True}
        core.fails = ASLEEP
        ended = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=WAIT_S)
        assert (ended.status_code, ended.json()["error"]["code"]) == (503, "engine_asleep")
        assert httpx.post(f"{url}/wake_up?tags=weights&tags=kv_cache", timeout=WAIT_S).status_code == 200
        assert httpx.post(f"{url}/wake_up", timeout=WAIT_S).status_code == 200
    assert asked == [Sleep(2), WakeUp(TAGS), WakeUp()]


def test_memory_of_others_does_not_sleep(pair):
    llm = build(pair, SHAPE, check_level=3)
    refused(ConfigError, llm.sleep, "--check-level 3")
