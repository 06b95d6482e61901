"""Adapters that come and go while an engine runs: more of them than it has slots for, and requests with all of them."""

import random
from itertools import count

import pytest

from support.engines import build, greedy, hold_core_thread, next_and_hold, rest, sampled, tokens
from support.loras import EVERY, merged, save_lora
from support.refusing import refused
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop.core.engine_core import EngineCore
from treetop.types.changes import LoadLora
from treetop.types.errors import CheckpointError, ConfigError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest
from treetop_debug.patching import Patch, replaced

SHAPE = (3, 4, 12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    target = save_random_llama(folder / "target", seed=3)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=None))


@pytest.fixture(scope="module")
def adapters(pair, tmp_path_factory):
    """Four: name, folder, and the model that it makes."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for i in range(4):
        kinds, rank = (EVERY, ("q_proj", "down_proj"))[i % 2], (4, 16, 1)[i % 3]
        lora = save_lora(folder / f"a{i}", pair.target, rank, 2.0 * rank, i, kinds)
        made.append((f"a{i}", lora, merged(folder / f"m{i}", pair.target, lora, 2.0)))
    return made


@pytest.fixture(scope="module")
def wanted(pair, adapters):
    """Tokens of each model alone, plainly, by the adapter's name."""
    prompts, params = asked(pair)
    models = {None: pair.target, **{name: whole for name, _, whole in adapters}}
    return {name: tokens(build(Pair(target, None), None).generate(prompts, params)) for name, target in models.items()}


def asked(pair):
    return pair.prompts([9, 30]), [greedy(12), sampled(3, 12)]


def test_more_adapters_than_slots(pair, adapters, wanted):
    """Two slots for four, rows of all in flight at once: the least recently used goes, and none while it has a row."""
    prompts, params = asked(pair)
    modules = {name: str(folder) for name, folder, _ in adapters[:3]}
    more = {"max_loras": 2, "max_cpu_loras": 4, "max_total_tokens": 300, "context_length": 64, "page_size": 4}
    llm = build(pair, SHAPE, lora_modules=modules, enable_lora=True, check_level=3, graphs="sim", **more)
    for name, folder, _ in adapters[3:]:
        llm.load_lora(name, folder)
    names = [*wanted] * 2
    random.Random(2).shuffle(names)
    streams = [(name, llm.stream(prompts, params, lora=name)) for name in names]
    begun = [(name, [next(stream)], stream) for name, stream in streams]
    for name, first, stream in begun:
        outputs = {delta.index: delta.output.token_ids for delta in (*first, *stream) if delta.output is not None}
        assert [outputs[0], outputs[1]] == wanted[name], name
    llm.scheduler.check_integrity()


def test_an_adapter_goes_while_its_requests_end_with_it_and_another_takes_its_name(pair, adapters, wanted):
    """No page of the one before is found again, and the host forgets it."""
    prompts, params = asked(pair)
    llm = build(pair, SHAPE, enable_lora=True, max_loras=1, page_size=4)
    (_, first, _), (_, second, _) = adapters[:2]
    llm.load_lora("it", first)
    assert tokens(llm.generate(prompts, params, lora="it")) == wanted["a0"]
    stream = llm.stream(prompts, params, lora="it")
    begun = [next_and_hold(llm, stream, 2)]
    llm.unload_lora("it")
    refused(InputError, lambda: llm.generate(prompts, params, lora="it"), "'it'", "none")
    llm.load_lora("it", second)  # of one slot, which the rows of the first have yet
    assert tokens(llm.generate(prompts, params, lora="it")) == wanted["a1"]
    outputs = {delta.index: delta.output.token_ids for delta in (*begun, *stream) if delta.output is not None}
    assert [outputs[0], outputs[1]] == wanted["a0"]
    rest(llm)
    assert len(llm.engine.adapters.held) == 1, "though no prompt came later"
    assert tokens(llm.generate(prompts, params)) == wanted[None]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(pair, adapters, wanted, tmp_path):
    prompts, params = asked(pair)
    llm = build(pair, SHAPE, enable_lora=True, max_loras=1, max_cpu_loras=2, max_lora_rank=4)
    llm.load_lora("a0", adapters[0][1])
    refused(InputError, lambda: llm.load_lora("a0", adapters[1][1]), "'a0'", "already")
    refused(ConfigError, lambda: llm.load_lora("a1", adapters[1][1]), "rank 16", "--max-lora-rank 16")
    refused(CheckpointError, lambda: llm.load_lora("b", tmp_path), "adapter_config.json")
    llm.load_lora("a2", adapters[2][1])
    refused(ConfigError, lambda: llm.load_lora("b", adapters[2][1]), "--max-cpu-loras 2")
    for name in ("a=b", "", 3):
        refused(InputError, lambda name=name: llm.load_lora(name, adapters[2][1]), "lora_name", repr(name), "=")
    refused(InputError, lambda: llm.unload_lora("a9"), "'a9'", "a0, a2")
    for name in ("a0", "a2", None):
        assert tokens(llm.generate(prompts, params, lora=name)) == wanted[name]
    named = build(pair, SHAPE, lora_modules={"a0": str(adapters[0][1])})
    refused(ConfigError, lambda: named.load_lora("b", adapters[2][1]), "--enable-lora")
    refused(ConfigError, lambda: named.unload_lora("a0"), "--enable-lora")
    plain = build(pair, SHAPE)
    refused(ConfigError, lambda: plain.load_lora("b", adapters[2][1]), "--enable-lora")


def test_pages_under_a_name_that_was_given_again_would_show(pair, adapters, wanted):
    """The fault that the version of a name guards against: its prefixes are found by the name alone."""
    prompts, params = asked(pair)
    llm = build(pair, SHAPE, enable_lora=True, max_loras=1, page_size=4)
    with replaced([Patch("treetop.scheduler.adapters:Adapter.salt", lambda real: lambda self, given: given)]):
        for (name, folder, _), same in zip(adapters[:2], (True, False), strict=True):
            llm.load_lora("it", folder)
            assert (tokens(llm.generate(prompts, params, lora="it")) == wanted[name]) is same
            llm.unload_lora("it")


def test_a_request_that_names_an_adapter_of_before_is_never_given_another(pair, adapters):
    """It goes on in an engine after the one that it began in, where the name has been given again."""
    llm = build(pair, SHAPE, lora_modules={"it": str(adapters[0][1])}, enable_lora=True, max_loras=2)
    hold_core_thread(llm)
    core = EngineCore(llm.engine, llm.scheduler)
    core.restore(4, {"it": 3, "gone": 1}, ())
    info = core.current(llm._core.info)
    assert (info.lora_version("it"), info.lora_version("gone"), info.weight_version) == (3, 0, 4)
    ask = EngineRequest(RequestId(1), (5, 6, 7), greedy(3), 0, lora="it", lora_version=3)
    core.add(ask)
    for version in (2, 4):
        other = ask._replace(request_id=RequestId(2), lora_version=version)
        refused(InputError, lambda other=other: core.add(other), "unloaded")
    core.prepare(LoadLora("gone", str(adapters[1][1])))()
    assert core.current(info).lora_version("gone") == 2


def test_who_finds_no_slot_lets_others_pass_but_not_for_ever(pair, adapters):
    """Rows without an adapter always; of those that have one, until it has waited for long."""
    books = {name: str(folder) for name, folder, _ in adapters[:2]}
    llm = build(pair, SHAPE, lora_modules=books, enable_lora=True, max_loras=1, max_running_requests=3)
    hold_core_thread(llm)
    scheduler, ids = llm.scheduler, count(1)

    def ask(lora, tokens=30):
        return scheduler.add(EngineRequest(RequestId(next(ids)), (5, 6, 7), greedy(tokens), 0, lora=lora))

    def step():
        plan = scheduler.plan()
        return [] if plan is None else scheduler.commit(plan, llm.engine.step(plan))

    first, blocked, base = ask("a0", 60), ask("a1"), ask("", 60)
    for _ in range(4):
        step()
    assert (first.running is not None, blocked.running, base.running is not None) == (True, None, True)
    for _ in range(600):
        if blocked.running is not None:
            break
        if not any(each.adapter.name == "a0" and each.running is None for each in scheduler.queues.by_id.values()):
            ask("a0", 6)  # who would hold the slot for ever
        step()
    assert blocked.running is not None
    scheduler.check_integrity()


def test_an_unloaded_adapter_that_nobody_has_gives_its_memory_back_at_once(pair, adapters):
    llm = build(pair, SHAPE, enable_lora=True, max_loras=1)
    llm.load_lora("it", adapters[0][1])
    llm.unload_lora("it")
    assert llm.engine.adapters.held == ()


@pytest.mark.slow
def test_ranks_agree_on_what_comes_and_goes(pair, adapters, wanted, tmp_path):
    """A folder that no rank takes leaves all as they were."""
    prompts, params = asked(pair)
    llm = build(pair, SHAPE, enable_lora=True, max_loras=1, max_cpu_loras=3, tp_size=2, device="cpu")
    for name, folder, _ in adapters[:2]:
        llm.load_lora(name, folder)
    refused(CheckpointError, lambda: llm.load_lora("b", tmp_path), "adapter_config.json")
    for name in ("a0", "a1", "a0", None):
        assert tokens(llm.generate(prompts, params, lora=name)) == wanted[name]
    llm.unload_lora("a0")
    assert tokens(llm.generate(prompts, params, lora="a1")) == wanted["a1"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_loras": 2}, ("--max-loras", "--enable-lora")),
        ({"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2}, ("--max-cpu-loras 2", "--max-loras 3")),
    ],
)
def test_options_that_cannot_be(pair, options, parts):
    refused(ConfigError, lambda: build(pair, SHAPE, **options), *parts)
