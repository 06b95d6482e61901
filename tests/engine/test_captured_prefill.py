"""Captured prefill steps: prompts packed into a batch of fixed size that has no round change no token."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from support.engines import accept_lens, build, greedy, sampled, tokens
from support.fake_recorder import FakeRecorder
from support.families import FAMILIES
from support.prefill_runs import KINDS, LAYERS, OPTIONS, SHAPE, run
from support.tiny_models import Pair, save_random_llama
from treetop.engine.cuda_graphs import CudaGraphs, num_captured
from treetop.engine.rounds import RoundKey
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckError
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingMode, SamplingParams
from treetop_debug.mixed_faults import PACKED_FAULTS

LENGTHS = [9, 60, 1, 17, 70, 22, 61, 5, 33, 2, 30]


def asked(count):
    """Greedy, sampled and filtered requests; some ask what is not packed."""
    kinds = [
        lambda i: greedy(26 - i),
        lambda i: sampled(i, 22),
        lambda i: sampled(i, 18 + i, top_k=4),
        lambda i: greedy(20),
        lambda i: sampled(i, 12, logprobs=2, temperature=0.8),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


@pytest.fixture(scope="module")
def plainly(strong_pair):
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None).generate(prompts, params))


@pytest.mark.parametrize("shape", [None, pytest.param((1, 3, 4), marks=pytest.mark.slow), SHAPE])
def test_no_token_changes(strong_pair, plainly, shape):
    """Many sizes come up, also of what a prefix cache leaves of prompts; what is not packed goes as it did."""
    prompts, params, expected = plainly
    llm = build(strong_pair, shape, **OPTIONS)
    got, sizes = run(llm, prompts, params, random.Random(5))
    assert got == expected
    assert len({*sizes} - {(0, 0)}) > 4, sizes
    assert sizes[0, 0], "log-probabilities"
    got, again = run(llm, prompts, params)
    assert got == expected, "with prefixes that are found"
    assert {block for _, block in again} >= {1, 2}, again
    assert not llm.scheduler.rows.by_row


def test_a_step_is_one_graph(strong_pair, plainly):
    """All sizes are captured at start, the largest behind the largest round, greedy ones and drawn ones alike."""
    prompts, params, expected = plainly
    llm, recorder = build(strong_pair, SHAPE, **OPTIONS), FakeRecorder()
    layout = llm.engine.layout
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    at_start = [key for key in recorder.recorded if isinstance(key, RoundKey) and key.prompts]
    assert [(key.prompts, key.block) for key in at_start] == sorted(layout.prefill_sizes, key=lambda size: -size[0])
    assert recorder.recorded[0] == RoundKey(4, llm.config.shape, SamplingMode.GREEDY)
    assert recorder.recorded[1] == at_start[0]
    assert graphs.num_prefills == len(at_start)
    assert 0 < graphs.prefill_seconds < graphs.seconds
    before = len(graphs)
    got, sizes = run(llm, prompts, params, random.Random(1))
    assert got == expected
    replayed = Counter(
        (key.prompts, key.block) for key in recorder.replayed if isinstance(key, RoundKey) and key.prompts
    )
    assert replayed == {size: count for size, count in sizes.items() if size != (0, 0)}
    later = [key for key in recorder.recorded[before:] if isinstance(key, RoundKey) and key.prompts]
    assert {key.choice for key in later} <= {SamplingMode.FILTER}, (
        "where PyTorch draws, filters are a graph of their own"
    )
    assert len(graphs) <= num_captured(layout, llm.engine.runner.state.choices, True, filters_apart=True)


def test_a_start_says_what_prefill_steps_took(strong_pair, caplog, monkeypatch):
    """Where shapes are chosen rows may lose their draft, so there are twice as many."""
    chosen = {"speculative_policy": "auto", "speculative_shapes": "2,1,3"}
    llm = build(strong_pair, SHAPE, **OPTIONS, **chosen)
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, FakeRecorder())
    monkeypatch.setattr("treetop.engine.engine._SAMPLED_S", 0.0)
    with caplog.at_level("INFO", logger="treetop"):
        llm.engine._start_up()
    said = [record.getMessage() for record in caplog.records if "prefill steps" in record.getMessage()]
    count = 2 * len(llm.engine.layout.prefill_sizes)
    assert said == [f"start: of this {count} prefill steps took {graphs.prefill_seconds:.1f} s"]


def test_rows_without_a_draft_and_retracted_ones_get_the_same(strong_pair, plainly):
    prompts, params, expected = plainly
    params = [each if i % 2 else replace(each, speculative=False) for i, each in enumerate(params)]
    llm = build(strong_pair, SHAPE, **OPTIONS, context_length=96, max_total_tokens=130)
    got, sizes = run(llm, prompts, params)
    assert got == expected
    assert sum(sizes.values()) > sizes[0, 0]
    assert llm.scheduler.num_retractions > 0


@pytest.mark.parametrize("mixed", ["off", "on"])
def test_a_draft_that_reads_the_text_accepts_what_it_did(tmp_path, mixed):
    """A block that ends no prompt is read from the text of its own row, too."""
    pair = Pair(*(save_random_llama(tmp_path / name, seed=5, head_dim=16, num_hidden_layers=n) for name, n in LAYERS))
    prompts = pair.prompts([1, 9, 40, 33, 17, 5, 60], seed=3)
    options = OPTIONS | {"speculative_algorithm": "STANDALONE", "mixed_chunk": mixed}
    found = []
    for most in (2048, 0):
        llm = build(pair, (4, 4, 14), **options | {"prefill_graph_max_tokens": most}, context_length=128)
        outputs = llm.generate(prompts, [greedy(30)] * len(prompts))
        found.append((tokens(outputs), accept_lens(outputs)))
    assert found[0] == found[1]
    assert sum(map(sum, found[0][1]))


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in KINDS else pytest.mark.slow, id=each) for each in FAMILIES]
)
def test_no_token_of_any_family_changes(name, tmp_path):
    """Windows, sinks, latents, indexers, experts; recurrent layers, whose blocks would go on from each other, are not
    packed.
    """
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    dice = random.Random(name)
    prompts = [[dice.randrange(4, 12) for _ in range(length)] for length in (5, 40, 13, 1, 27, 33)]
    options = OPTIONS | {"max_running_requests": 3, "context_length": 96}
    expected = tokens(build(pair, None, **options | {"prefill_graph_max_tokens": 0}).generate(prompts, greedy(14)))
    llm = build(pair, SHAPE, **options)
    got, sizes = run(llm, prompts, [greedy(14)] * len(prompts))
    assert got == expected
    recurrent = bool(llm.engine.layout.state_groups)
    assert recurrent == ({*sizes} == {(0, 0)})
    assert recurrent == (not llm.engine.layout.prefill_sizes)


@pytest.mark.parametrize("name", PACKED_FAULTS)
def test_each_fault_shows(strong_pair, name, monkeypatch):
    """By its guard's words, in the tokens, or at an address that no table has. Few sizes leave blocks to nobody."""
    monkeypatch.setattr("treetop.engine.startup.plan.PREFILL_PARTS", (4, 16))
    fault, prompts = PACKED_FAULTS[name], strong_pair.prompts([9, 30, 17, 44, 26])
    options = OPTIONS | {"max_running_requests": 3, "disable_radix_cache": True, "check_level": 1}

    def got():
        return run(build(strong_pair, SHAPE, **options), prompts, [greedy(16)] * 5)[0]

    expected = tokens(build(strong_pair, None, **options).generate(prompts, greedy(16)))
    with fault.active():
        if fault.level is None:
            with suppress(IndexError):
                assert got() != expected
        else:
            with pytest.raises(CheckError, match=fault.guard):
                got()


SERVED = tuple((size, block) for size in (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048) for block in (64, 16))


def planned(lengths, sizes=SERVED, **kinds):
    """The first prefill step of prompts of so many tokens, none of which is cached. kinds: what request i asks."""
    layout = Layout(
        (PLAIN,), 16, 128, 8192, 8192, (KVGroup(FULL, 1, paired(1, 8)),), 500_000, prefill_sizes=sizes
    )  # fmt: skip
    scheduler = Scheduler(layout, EngineConfig(), (), prefill_costs=PrefillCosts(512, 2048, None, 1024))
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=4, **kinds.get(f"of_{i}", {}))
        scheduler.add(EngineRequest(RequestId(i), (5,) * length, params, i))
    plan = scheduler.plan()
    return len(plan.chunks), plan.packed, plan.block


def test_the_smallest_batch_that_holds_the_chunks_is_chosen():
    """Of several alike the one with larger blocks; none with far more padding than a line for each prompt; what many
    short prompts take in lines, most of it padding, is one captured step.
    """
    assert planned([1]) == (1, 128, 64)
    assert planned([129]) == (1, 256, 64)
    assert planned([100, 100]) == (2, 256, 64)
    assert planned([16] * 60) == (60, 1024, 16)
    assert planned([1100]) == (1, 1280, 64)
    assert planned([1600]) == (1, 0, 0), "2048 are 1.28 times as many"
    assert planned([1700]) == (1, 2048, 64)
    assert planned([5000]) == (1, 0, 0)
    assert planned([9, 16, 2, 11] * 32) == (128, 2048, 16)
    assert planned([9, 16, 2, 11] * 32, sizes=()) == (48, 0, 0), "of three steps the first"
    assert planned([700] + [9] * 40) == (41, 1536, 16)
    assert planned([700] + [9] * 40, sizes=())[0] < 41
    assert planned([100, 100], of_0={"logprobs": 2}) == (2, 0, 0)
    assert planned([100, 100], of_1={"logprobs": 2}) == (2, 0, 0)
