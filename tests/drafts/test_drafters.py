"""A drafter that is no head runs through everything that knows drafters by their protocol only."""

import pytest
import torch

from support.engines import accept_lens, build, greedy, sampled, tokens
from support.fake_recorder import FakeRecorder
from support.weightless import followers, install
from treetop.bench.machine import Machine
from treetop.bench.roofline import Case, round_floor
from treetop.doctor.report import checkpoint
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.rounds import RoundKey, phases_of
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.startup_log import start_up_block
from treetop.engine.startup.weight_copies import copies_estimate
from treetop.kernels.triton_guard import GpuTraits
from treetop.tools import trace
from treetop.types.ids import FULL
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode

GPU = GpuTraits(num_sms=132, can_overlap=True)
SHAPES = [(1, 3, 4), (4, 3, 12), (2, 5, 9)]


@pytest.fixture(autouse=True)
def _weightless(monkeypatch):
    install(monkeypatch)


def rounds_of_a_chain(output, vocab, num_steps):
    """How many drafts each round accepts if it drafts one path: as many as the output agrees with."""
    accepted, at, ids = [], 0, list(output)
    while at + 1 < len(ids):
        token, count = ids[at], 0
        while count < num_steps and at + 1 + count < len(ids):
            (token,) = followers(token, vocab, 1)
            if token != ids[at + 1 + count]:
                break
            count += 1
        accepted.append(count)
        at += count + 1
    return accepted


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "options", [{}, {"graphs": "sim", "check_level": 3}, {"check_level": 2}, {"disable_radix_cache": True}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_its_tokens_are_those_of_plain_decoding(strong_pair, shape, options):
    """Ragged batches in small pages and chunks, greedy and sampled; drafts are accepted."""
    prompts, params = (
        strong_pair.prompts([5, 17, 9]),
        [greedy(30, whole=True), sampled(1, 30, whole=True), sampled(2, 24, top_p=0.9, whole=True)],
    )
    options = {"page_size": 4, "chunked_prefill_size": 8, "context_length": 80, **options}
    llm = build(strong_pair, shape, **options)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(build(strong_pair, None).generate(prompts, params))
    assert sum(map(sum, accept_lens(outputs))) > 3
    llm.scheduler.check_integrity()


def test_a_chain_accepts_what_the_output_agrees_with(strong_pair):
    llm = build(strong_pair, (1, 3, 4))
    for output in llm.generate(strong_pair.prompts([5, 17, 9, 20]), greedy(40)):
        told = list(output.metrics.accept_lens)
        want = rounds_of_a_chain(output.token_ids, llm.engine.spec.vocab_size, 3)
        assert told[:-1] == want[:-1]  # the last round is cut where the output ends
        assert len(told) == len(want)


def test_captured_rounds_are_the_eager_ones(strong_pair):
    """On a recorder that runs on a CPU: greedy rounds at start, sampled ones when they come."""
    params = [greedy(20), sampled(3, 20), greedy(12)]
    prompts = strong_pair.prompts([9, 20, 5])
    eager = build(strong_pair, (4, 3, 12), graphs="off").generate(prompts, params)
    llm, recorder = build(strong_pair, (4, 3, 12), max_running_requests=4), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    outputs = llm.generate(prompts, params)
    assert (tokens(outputs), accept_lens(outputs)) == (tokens(eager), accept_lens(eager))
    assert recorder.replayed


def test_it_takes_no_pages_no_tails_and_no_weights(strong_pair):
    """A state of one number a row is all: nothing of the target's states, no weights to copy."""
    llm = build(strong_pair, (4, 3, 12))
    device, layout = llm.engine.runner, llm.engine.layout
    assert [group.name for group in layout.groups] == list(device.pools) == [FULL]
    assert not device.buffers.draft_tails
    assert not device.buffers.extend_tails
    assert device.buffers.aux_hidden.numel() == 0
    assert device.state.draft.hidden.shape == (layout.num_rows, 1)
    assert list(phases_of(device, RoundKey(1, device.layout.shapes[0], SamplingMode.GREEDY))) == [
        Phase.DRAFT,
        Phase.VERIFY,
        Phase.EXTEND,
    ]
    target, draft = llm.engine.target, llm.engine.draft
    assert copies_estimate(target, draft, torch.bfloat16, GPU) == copies_estimate(target, None, torch.bfloat16, GPU)


def test_doctor_start_log_trace_and_roofline_take_it_as_it_is(strong_pair):
    llm = build(strong_pair, (4, 3, 12))
    engine_plan = plan_engine(llm.config)
    assert f"{strong_pair.head}: 0 tensors" in checkpoint(engine_plan)[1][1]
    engine = llm.engine
    assert "tree S=3 k=4 T=12" in start_up_block(engine_plan, engine.runner, (), engine.launcher, engine.memory, 0.0)
    assert trace.drafted_vocabulary(llm) == set(range(llm.engine.spec.vocab_size))
    machine = Machine("a machine", "1", "float64", 1e9, 1e12)
    floor = round_floor(llm.engine.target, llm.engine.draft, Case(SpecShape(4, 3, 12), 2, 30, 8), machine)
    assert floor[Phase.DRAFT] == floor[Phase.EXTEND] == 0 < floor[Phase.VERIFY]
