"""Mixed steps: a chunk of prompts in the forward of a round changes no token, whatever the round and the model."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.fake_recorder import FakeRecorder
from support.families import FAMILIES
from support.grids import few_of
from treetop import SamplingParams
from treetop.distributed.lockstep import StepProposal, grown, merged
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.rounds import RoundKey
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.mixed import MixedSteps
from treetop.types.errors import CheckError
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape
from treetop.types.messages import Chunk, MixedPlan, PrefillPlan, RoundPlan
from treetop.types.sampling import SamplingMode
from treetop_debug.mixed_faults import MIXED_FAULTS

SHAPE = (2, 3, 6)
LAYOUT = Layout((SpecShape(1, 3, 4), PLAIN), 16, 64, 4096, 8192, (KVGroup(FULL, 1, paired(1, 8)),), 4096, mixed=True)
LENGTHS = [9, 30, 1, 17, 44, 22, 13, 5]


def asked(count):
    """Greedy, sampled and filtered requests of different lengths, with log-probabilities here and there."""
    kinds = [
        lambda i: greedy(26 - i),
        lambda i: sampled(i, 22),
        lambda i: sampled(i, 18 + i, top_k=4, temperature=0.8, logprobs=2),
        lambda i: SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(i % 12,), prompt_logprobs=1),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def run(llm, prompts, params):
    """What requests get, with as many steps in flight as there may be; and how many steps there were of each kind."""
    requests = submit(llm, prompts, params)
    kinds = Counter(type(plan) for plan, _ in pump(llm))
    return [tuple(request.output_ids) for request in requests], kinds


@pytest.fixture(scope="module")
def plainly(strong_pair):
    """Prompts, what is asked, and what plain decoding gives, a step at a time."""
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None, overlap=False).generate(prompts, params))


@pytest.mark.parametrize(
    ("shape", "graphs", "overlap", "radix"),
    few_of(
        [
            (None, "off", False, True),
            (None, "sim", True, False),
            ((1, 3, 4), "sim", True, True),
            (SHAPE, "off", False, False),
            ((4, 3, 16), "sim", True, True),
        ],
        0,
        2,
        3,
    ),
)
def test_no_token_changes_beside_prompts(strong_pair, plainly, *, shape, graphs, overlap, radix):
    """Plain rounds, chains, trees; prefixes that are found; pages, padding and buffers poisoned."""
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "page_size": 4, "max_running_requests": 4, "check_level": 3}
    options |= {"graphs": graphs, "overlap": overlap, "disable_radix_cache": not radix}
    llm = build(strong_pair, shape, mixed_chunk="on", **options)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert kinds[MixedPlan] > 8
    assert run(llm, prompts, params)[0] == expected  # with what the cache has, if it has anything
    assert not llm.scheduler.rows.by_row


def test_log_probabilities_are_those_of_plain_decoding(strong_pair):
    """Of outputs and of prompts, in steps with rounds and chunks that ask."""
    prompts = strong_pair.prompts(LENGTHS)
    params = [replace(each, logprobs=2, prompt_logprobs=1) for each in asked(len(prompts))]
    options = {"chunked_prefill_size": 8, "max_running_requests": 4, "disable_radix_cache": True}
    plain, mixed = (
        build(strong_pair, shape, mixed_chunk=mode, **options).generate(prompts, params)
        for shape, mode in ((None, "off"), (SHAPE, "on"))
    )
    assert tokens(mixed) == tokens(plain)
    for one, other in zip(plain, mixed, strict=True):
        for part in ("logprobs", "prompt_logprobs"):
            for mine, theirs in zip(getattr(one, part), getattr(other, part), strict=True):
                if mine is not None:
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_requests_that_are_retracted_get_the_same(strong_pair, plainly):
    """Pages are short: a round that cannot be planned puts nobody back who is in the chunk beside it."""
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "page_size": 4, "max_running_requests": 4, "context_length": 72}
    llm = build(strong_pair, SHAPE, mixed_chunk="on", check_level=3, max_total_tokens=80, **options)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert llm.scheduler.num_retractions > 0
    assert kinds[MixedPlan] > 4


@pytest.mark.parametrize("shape", few_of([None, SHAPE], 1))
def test_captured_rounds_lend_their_forward_to_prompts(strong_pair, plainly, shape):
    """DRAFT and EXTEND are graphs that were captured at the start, the forward between them is not; also where the host
    says between them what may follow.
    """
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "max_running_requests": 4, "disable_radix_cache": True, "overlap": True}
    llm, recorder = build(strong_pair, shape, mixed_chunk="on", **options), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    at_start = len(graphs)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert sum(key.mixed for key in recorder.replayed if isinstance(key, RoundKey)) == (
        kinds[MixedPlan] if shape else 0
    )
    sampled_later = {key for key in recorder.recorded[at_start:] if isinstance(key, RoundKey) and key.mixed}
    assert not sampled_later, "how tokens are chosen is between the graphs"


def chunk_of(count):
    return PrefillPlan((), (), (), (Chunk(Row(40), 0, (5,) * count, None),), SamplingMode.GREEDY)


KINDS = ("gemma4", "glm 5.2", "falcon h1")
"""Layers that read another's K/V, and inputs by token; compressed attention and an indexer whose choice is shared;
attention beside a recurrence. The others hold all the same, in the long run."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in KINDS else pytest.mark.slow, id=each) for each in FAMILIES]
)
def test_no_token_of_any_family_changes(name, tmp_path):
    """Windows, sinks, latents, indexers, experts, recurrent layers: chunks end within pages and past windows."""
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    dice = random.Random(name)
    prompts = [[dice.randrange(4, 12) for _ in range(length)] for length in (5, 40, 13, 1, 27, 33)]
    options = {"page_size": 4, "max_running_requests": 3, "context_length": 96, "chunked_prefill_size": 8}
    expected = tokens(build(pair, None, **options).generate(prompts, greedy(14)))
    llm = build(pair, (2, 3, 6), mixed_chunk="on", check_level=3, graphs="sim", **options)
    got, kinds = run(llm, prompts, greedy(14))
    assert got == expected
    assert kinds[MixedPlan] > 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A target whose last layers read the K/V of others."""
    return FAMILIES["gemma4"].save(tmp_path_factory.mktemp("gemma"), seed=5).pair


@pytest.mark.parametrize("name", MIXED_FAULTS)
def test_each_fault_shows(strong_pair, weak_pair, shared, name):
    """By its guard's words, or in the tokens."""
    pairs = {"mixed-reader-writes": shared, "mixed-results-of-one-part": weak_pair}  # many tokens have probabilities
    pair, fault = pairs.get(name, strong_pair), MIXED_FAULTS[name]
    prompts, params = pair.prompts([9, 30, 17, 5]), replace(greedy(16), logprobs=20, prompt_logprobs=20)
    options = {"page_size": 4, "max_running_requests": 3, "context_length": 96, "chunked_prefill_size": 8}
    options |= {"disable_radix_cache": True}

    def got():
        return run(build(pair, SHAPE, mixed_chunk="on", **options), prompts, params)[0]

    expected = tokens(build(pair, None, **options).generate(prompts, params))
    with fault.active():
        if fault.level is None:
            assert got() != expected
        else:
            with pytest.raises(CheckError, match=fault.guard):
                got()


def test_what_cannot_be_mixed_is_refused(strong_pair):
    """A mixed plan where no memory is for one."""
    llm = build(strong_pair, SHAPE)
    prefill = PrefillPlan((), (), (), (), SamplingMode.GREEDY)
    plan = MixedPlan(prefill, RoundPlan((), (), (), SpecShape(*SHAPE), 0, SamplingMode.GREEDY))
    with pytest.raises(CheckError, match="no room"):
        llm.engine.step(plan)


@pytest.mark.parametrize(("mode", "mixes"), [("auto", (True, False)), ("on", (True, True)), ("off", (False, False))])
def test_costs_choose_what_is_mixed(mode, mixes):
    """`auto`: few nodes, and no longer beside a mixed step that was slower than both apart."""
    layout = LAYOUT
    budget = PrefillBudget(layout, PrefillCosts(512, 2048, None, 1024), None, shape=lambda: PLAIN)
    mixing, chain = MixedSteps(layout, mode, budget), SpecShape(1, 3, 4)
    assert not mixing.wanted(0, PLAIN)
    assert (mixing.wanted(32, chain), mixing.wanted(33, chain)) == mixes
    round, prefill = (RoundPlan((), (), tuple(map(Row, range(32))), PLAIN, 0, SamplingMode.GREEDY), chunk_of(1024))
    for plan, seconds in ((round, 0.005), (prefill, 0.024), (MixedPlan(prefill, round), 0.0275)):
        budget.note(plan, seconds, False)
        mixing.note(plan, seconds)
    assert mixing.wanted(32, PLAIN) == (mode != "off"), "one step may compile or capture"
    for _ in range(8):
        mixing.note(MixedPlan(prefill, round), 0.0275)
    assert mixing.wanted(32, PLAIN) == (mode == "on")
    for _ in range(40):
        mixing.note(MixedPlan(prefill, round), 0.0255)
    assert mixing.wanted(32, PLAIN) == (mode != "off")


def test_a_mixed_step_is_smaller_while_few_wait_and_keeps_to_the_gap():
    """1,024 tokens instead of 2,048, more the more requests wait; the round is in what a target bounds."""
    budget = PrefillBudget(LAYOUT, PrefillCosts(512, 2048, None, 1024), None, shape=lambda: SpecShape(1, 3, 4))
    assert [budget.tokens(32, 0, waiting, mixed=True) for waiting in (0, 16)] == [1024, 3072]
    assert budget.tokens(32, 0) == 2048
    bounded = PrefillBudget(LAYOUT, PrefillCosts(512, 2048, None, 1024), 0.05, shape=lambda: PLAIN)
    round, prefill = RoundPlan((), (), (Row(0),), PLAIN, 0, SamplingMode.GREEDY), chunk_of(1024)
    bounded.note(round, 0.005, False)
    bounded.note(MixedPlan(prefill, round), 0.030, False)
    assert bounded.tokens(1, 0, mixed=True) == 1536


def test_ranks_agree_on_a_mixed_step():
    """If one wants one all have one; who has a chunk or a round alone brings that, and the rest is padding."""
    both, chunk, round = StepProposal(4, 1, 64, shape=0), StepProposal(tokens=128), StepProposal(8, 2)
    assert merged([both, chunk, round, StepProposal()], True) == StepProposal(8, 2, 128)
    assert merged([chunk, round], False) == chunk
    step = merged([both, chunk], False)
    grew = grown(chunk_of(16), step, (PLAIN,))
    assert isinstance(grew, MixedPlan)
    assert (grew.prefill.min_batch_tokens, grew.round.min_rows, grew.round.rows) == (128, 4, ())
