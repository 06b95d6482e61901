"""On an NVIDIA GPU: Triton, captured rounds, and the CPU's answers."""

from collections import Counter, deque
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from support.engines import accept_lens, greedy, sampled, submit, tokens
from support.operations import reference_ops
from treetop import LLM
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.rounds import RoundKey
from treetop.kernels.table import Ops
from treetop.scheduler.policy import FixedShape
from treetop.types.layout import SpecShape
from treetop.types.messages import PrefillPlan, RoundPlan
from treetop.types.sampling import SamplingMode
from treetop_debug.faults import fault
from treetop_debug.patching import wrapped_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = ["def area(radius):", "class Queue:\n    def __init__(self", "import os\n\ndef walk(path):\n    for name in"]


def run(params, draft="builtin:nestling-eagle3", **options):
    own = {"dtype": "float32", "max_running_requests": 4, "page_size": 16}
    llm = LLM(None, draft, **{**own, "speculative_policy": "fixed", **options})
    outputs = llm.generate(PROMPTS * 2, params)
    llm.scheduler.check_integrity()
    return llm, outputs


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("shape", [(5, 4, 16), (3, 1, 4), (2, 3, 8)])
def test_captured_speculation_on_triton_equals_plain_decoding(page, shape):
    """float32, six prompts through four rows: captured tree rounds give the tokens of captured plain rounds."""
    steps, topk, nodes = shape
    tree = {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
        "page_size": page,
    }
    llm, outputs = run(greedy(60), **tree)
    assert llm.engine.runner.backend.name == "triton"
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert tokens(outputs) == tokens(run(greedy(60), draft=None, page_size=page)[1])


def test_triton_and_torch_agree_eager_and_captured():
    """Tokens and accepted lengths do not depend on backend or runner."""
    _, captured = run(greedy(60))
    for options in ({"graphs": "off"}, {"attention_backend": "torch", "graphs": "off"}, {"device": "cpu"}):
        _, other = run(greedy(60), **options)
        assert tokens(other) == tokens(captured)
        assert accept_lens(other) == accept_lens(captured)


@pytest.mark.parametrize("shape", [(5, 4, 16), (3, 1, 4), (1, 2, 3)])
@pytest.mark.parametrize("params", [greedy(60), sampled(3, 60, temperature=0.8)], ids=["greedy", "sampled"])
def test_captured_rounds_are_the_same_with_fused_and_plain_operations(shape, params):
    """Tokens and accepted lengths of captured rounds do not depend on how their small operations are launched."""
    steps, topk, nodes = shape
    tree = {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }
    llm, fused = run(params, **tree)
    assert llm.engine.runner.ops.accept is not Ops.accept.reference
    with wrapped_runner(lambda device: replace(device, ops=reference_ops())):
        llm, plain = run(params, **tree)
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert tokens(fused) == tokens(plain)
    assert accept_lens(fused) == accept_lens(plain)


def test_what_a_captured_engine_learns_is_what_an_eager_one_learns_on_a_cpu():
    """Counts of proposals by depth and rank, which come with each round's results where shapes are chosen by them."""
    options = {"speculative_calibration": "learn", "speculative_policy": "auto", "max_running_requests": 4}
    options |= {"overlap": False}  # else a row learns from one round more, launched before its end is known
    counts = []
    for more in ({}, {"device": "cpu"}):
        llm, _ = run(greedy(60), **options, **more)
        llm.scheduler.policy = FixedShape(llm.config.shape)
        llm.engine.runner.state.calibration.reset()
        llm.generate(PROMPTS, greedy(60))
        assert llm.engine.costs is not None
        counts.append(llm.engine.runner.state.calibration.acceptance.cpu())
    torch.testing.assert_close(*counts, rtol=1e-3, atol=1.0)


def test_captured_rounds_accept_what_a_profile_draws_as_on_a_cpu():
    """What is drawn depends on the request and where it stands alone, so accept lengths are the same."""
    options = {"simulate_acceptance": "builtin:kimi-k2", "overlap": False}
    found = [accept_lens(run(greedy(60), **options, **more)[1]) for more in ({}, {"device": "cpu", "graphs": "off"})]
    assert found[0] == found[1]


def test_a_fault_in_a_round_runs_and_harms_when_captured():
    """The twin kernel is what is captured, in the place of the one that ships."""
    _, sound = run(greedy(60))
    with fault("sgl-27545"):
        llm, faulty = run(greedy(60))
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert llm.engine.runner.ops.accept is not Ops.accept.reference
    assert tokens(faulty) == tokens(sound), "verification keeps the output right"
    assert accept_lens(faulty) != accept_lens(sound)


@pytest.mark.filterwarnings("ignore:.*rofiler")
def test_a_captured_tree_round_is_few_launches():
    """A (5, 4, 16) round: 13 small operations, and what the two models launch.

    Small operations: start, 4 x grow, select; choose, accept, commit, features; commit, pick, finish. A layer: four
    products of at most two launches (split-K) each, two norms, rotation and write, attention and its merge, activation.
    The head adds its input and a sum; its proposals a norm, a product of at most two launches and two launches.
    """
    llm, _ = run(greedy(8))
    key = RoundKey(1, SpecShape(4, 5, 16), SamplingMode.GREEDY)
    for _ in range(2):
        llm.engine.launcher.launch(key, 1024)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        llm.engine.launcher.launch(key, 1024)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profiler.key_averages() if event.self_device_time_total > 0}
    layer = 4 * 2 + 2 + 1 + 2 + 1
    target = 1 + 1 + 4 * layer + 2
    head_runs = 5 * (layer + 2 + 5) + 2
    listing = "\n".join(f"{count:4d} {name}" for name, count in sorted(counts.items()))
    small = ("_start", "_grow", "_select", "_accept", "_commit", "_path_features", "_pick", "_finish")
    ours = {name: count for name, count in counts.items() if name.startswith(small)}
    assert sum(ours.values()) == 12, listing  # choosing has a kernel name that proposing has too
    assert sum(counts.values()) <= 13 + target + head_runs, listing


def test_sampling_on_a_gpu_follows_the_seed():
    """Sampled speculative output equals sampled plain output, captured."""
    params = [sampled(seed, 40, temperature=0.8, top_p=0.9) for seed in range(6)]
    assert tokens(run(params)[1]) == tokens(run(params, draft=None)[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_accepts(dtype):
    """16-bit rounds accept about as much as float32."""
    _, outputs = run(greedy(60), dtype=dtype)
    lens = [a for each in accept_lens(outputs) for a in each]
    assert 1 + sum(lens) / len(lens) > 2.5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("level", "options"),
    [
        *((level, {}) for level in (0, 1, 2)),
        (0, {"speculative_policy": "auto", "speculative_calibration": "learn"}),
        (0, {"draft": None}),
    ],
)
def test_launching_a_step_makes_no_host_sync(level, options):
    """Row list, page-table changes, requests that move in, chunks, phases, results, probes: while another step is out,
    nothing waits for the device.

    A step of a kind that has run before: the first of a kind may have to be captured or compiled.
    """
    llm, _ = run(greedy(8), check_level=level, page_size=1, max_running_requests=4, **options)
    engine, scheduler = llm.engine, llm.scheduler
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS] * 4
    submit(llm, prompts, [greedy(12 + 7 * (i % 4)) for i in range(len(prompts))])
    tickets, known, launched, edited = deque(), set(), Counter(), 0
    while scheduler.has_work or tickets:
        while (plan := scheduler.plan()) is not None:
            kind = _kind(engine, plan)
            quiet = kind in known and bool(tickets)
            known.add(kind)
            launched[type(plan)] += quiet
            edited += len(plan.edits) if quiet else 0
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
            try:
                tickets.append(engine.launch(plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        in_flight = tickets.popleft()
        scheduler.commit(in_flight.plan, engine.collect(in_flight))
    assert launched[RoundPlan] > 8
    assert launched[PrefillPlan] > 1
    assert edited > 8
    scheduler.check_integrity()


def _kind(engine, plan):
    """What a step is compiled and captured by."""
    bucket = engine.layout.bucket_for(len(plan.rows))
    if isinstance(plan, RoundPlan):
        return RoundPlan, bucket, plan.choice, plan.shape, len(plan.no_draft) == len(plan.rows)
    return PrefillPlan, bucket, plan.choice, plan.packed, plan.block, len(plan.no_draft) == len(plan.chunks)


@pytest.mark.parametrize("draft", ["builtin:nestling-eagle3", None])
def test_overlap_changes_no_token_on_a_gpu(draft):
    """float32, captured; greedy and sampled requests, more than rows: on by default, and equal to no overlap."""
    params = [greedy(60), sampled(1, 50), greedy(7), sampled(2, 61, top_k=8), greedy(33), sampled(3, 20)]
    llm, outputs = run(params, draft=draft)
    assert llm.engine.layout.max_in_flight == 2
    alone, expected = run(params, draft=draft, overlap=False)
    assert alone.engine.layout.max_in_flight == 1
    assert tokens(outputs) == tokens(expected)
    assert accept_lens(outputs) == accept_lens(expected)


def test_overlap_survives_retraction_and_closed_streams_on_a_gpu():
    """Few pages, streams that are left in the middle: the tokens are those of a roomy engine without overlap."""
    _, expected = run(greedy(100), overlap=False)
    llm, outputs = run(greedy(100), max_total_tokens=320, context_length=256)
    assert llm.scheduler.num_retractions > 0
    assert tokens(outputs) == tokens(expected)
    for pieces in (1, 3, 8):
        stream = llm.stream(PROMPTS, greedy(30))
        for _ in range(pieces):
            next(stream)
        stream.close()
        llm.scheduler.check_integrity()
    assert tokens(llm.generate(PROMPTS * 2, greedy(100))) == tokens(expected)


def test_device_probes_fire_inside_captured_rounds():
    """Level 2 in a graph: a NaN in the draft's state is reported by name, and the context survives."""
    from treetop.types.errors import CheckError

    llm, _ = run(greedy(8), check_level=2)
    llm.engine.observer = lambda *_: llm.engine.runner.state.draft.hidden.fill_(float("nan"))
    with pytest.raises(CheckError, match="hidden in phase draft"):
        llm.generate(PROMPTS[0], greedy(30))
    assert torch.ones(3, device="cuda").sum().item() == 3
