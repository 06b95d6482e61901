"""Every backend on an NVIDIA GPU, eager and captured, over what its capability table admits, against dense attention.

    python -m pytest tests/gpu/test_gpu_backends.py -q

Libraries that are not there are skipped, with the reason that an engine would give.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from support.engines import accept_lens, greedy, tokens
from support.scenes import dense_answer, moved, scene
from treetop import LLM
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.contract import RoundExtents
from treetop.attention.library_backend import LibraryPlan
from treetop.attention.registry import BACKENDS, refusal
from treetop.debug.two_group import write_two_group_pair
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention.pages import gather_table, gather_table_reference
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of flash-attn-4's compiler, even under -W error
]

GPU = torch.device("cuda")
NAMES = ("triton", "segments", "fa3", "flashinfer", "fa4")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest ||out - dense|| / ||dense||; a merged prefix is rounded to the dtype once more."""
PROMPTS = ["def area(radius):", "class Queue:\n    def __init__(self", "import os\n\ndef walk(path):\n    for name in"]
HEADS = [(64, 8, 2), (128, 8, 8), (128, 16, 2), (256, 4, 1)]


def backend_of(name, s):
    """The backend for a scene, or a skip with the reason that an engine would give."""
    heads, kv_heads, dim = s.q.shape[2], s.tail.data.shape[3], s.q.shape[3]
    group = GroupNeed(FULL, heads, kv_heads, dim, s.metadata.window)
    need = Need(s.q.dtype, GPU, s.metadata.page_size, (group,), rows=s.q.shape[0], queries=s.q.shape[1])
    problem = refusal(name, need)
    if problem is not None:
        pytest.skip(f"{name}: {problem.reason}")
    return make_backend(name, need)


def check(got, want, dtype):
    assert bool(torch.isfinite(got).all())
    error = float((got.float() - want).norm() / want.norm())
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


SIZES = [
    {"n": 1, "t": 1, "max_kv_len": 200},
    {"n": 4, "t": 12, "max_kv_len": 333},
    {"n": 33, "t": 33, "max_kv_len": 900},
    {"n": 8, "t": 8, "max_kv_len": 300, "window": 50},
]

CHUNKS = [{"n": 1}, {"n": 150, "max_kv_len": 700}, {"n": 150, "max_kv_len": 700, "window": 90}]


def options_of(index, page, size):
    """Page sizes and sizes in full, heads and dtypes in turn: every compiled variant costs seconds."""
    dim, heads, kv_heads = HEADS[index % len(HEADS)]
    dtype = (torch.bfloat16, torch.float16)[index // len(HEADS) % 2]
    return {"dtype": dtype, "page_size": page, "dim": dim, "heads": heads, "kv_heads": kv_heads, **size}


def variety(sizes):
    pairs = itertools.product((1, 16, 64), sizes)
    return [options_of(i + i // len(HEADS), page, size) for i, (page, size) in enumerate(pairs)]


def name_of(options):
    return " ".join(f"{key} {value}" for key, value in options.items()).replace("torch.", "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", variety(SIZES), ids=name_of)
def test_prefix_and_tail_equal_dense_attention(name, options):
    """NaN in every slot and INT_MIN in every column that no query may see; a full, an empty and a padding row."""
    s = moved(scene(**options), GPU)
    backend = backend_of(name, s)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    dtype, sinks = s.q.dtype, torch.randn(s.q.shape[2], device=GPU)
    check(backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale), dense_answer(s, True)[0], dtype)
    check(backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale, sinks), dense_answer(s, True, sinks)[0], dtype)
    if s.metadata.window is not None or not isinstance(plan, LibraryPlan):
        return
    out, lse = plan.attend(s.q, s.kv, s.scale).normalised()
    want, want_lse = dense_answer(s, with_tail=False)
    check(out, want, dtype)
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=2e-3)
    assert (lse[-1] == float("-inf")).all()
    assert not out[-1].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", variety(CHUNKS), ids=name_of)
def test_causal_equals_dense_attention(name, options):
    """Chunks of different lengths in one padded batch; padding gives 0."""
    s = moved(scene(**options, causal=True), GPU)
    backend = backend_of(name, s)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    for sinks in (None, torch.randn(s.q.shape[2], device=GPU)):
        out = backend.causal(s.q, s.kv, plan, s.scale, sinks)
        want = dense_answer(s, False, sinks)[0]
        check(out[s.real], want[s.real], s.q.dtype)
        assert not out[~s.real].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 60])
def test_a_captured_phase_follows_its_buffers(name, page, window):
    """Captured on a batch of dummy rows, replayed on two others: lengths, tables, rows and masks are data."""
    size = {"n": 9, "t": 9, "heads": 8, "dim": 128, "page_size": page, "max_kv_len": 1500, "window": window}
    first, second = (moved(scene(dtype=torch.bfloat16, seed=seed, **size), GPU) for seed in (1, 2))
    static = [tensor.clone() for tensor in tensors_of(first)]
    s = rebuilt(first, static)
    backend = backend_of(name, s)

    def phase():
        plan = backend.plan(backend.begin(s.metadata), s.metadata)
        return [backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale) for _ in range(2)]

    s.metadata.rows.fill_(3)
    s.metadata.kv_len.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        phase()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = phase()
    for source in (first, second, first):
        for target, value in zip(static, tensors_of(source), strict=True):
            target.copy_(value)
        if BACKENDS[name].capabilities.needs_host_extents:
            committed = torch.zeros(4, dtype=torch.int64, device=GPU)
            committed[s.metadata.rows] = s.metadata.kv_len
            backend.plan_round(RoundExtents(s.metadata.rows, committed, {s.metadata.phase: 9}))
        graph.replay()
        want = dense_answer(source, with_tail=True)[0]
        for out in outs:
            check(out, want, torch.bfloat16)


def tensors_of(s):
    """What a captured phase reads."""
    data = [s.metadata.rows, s.metadata.kv_len, s.metadata.table.data, s.kv.data, s.q, s.tail.data]
    return [*data, s.metadata.positions, s.metadata.tail_positions, s.metadata.mask]


def rebuilt(s, tensors):
    """The scene on given buffers."""
    rows, kv_len, table, kv, q, tail, positions, tail_positions, mask = tensors
    prefix = {"rows": rows, "kv_len": kv_len, "table": replace(s.metadata.table, data=table)}
    queries = {"positions": positions, "tail_positions": tail_positions, "mask": mask}
    metadata = replace(s.metadata, **prefix, **queries)
    return replace(s, metadata=metadata, kv=replace(s.kv, data=kv), q=q, tail=replace(s.tail, data=tail))


def test_the_gathered_table_on_a_gpu():
    """The kernel gives what its reference gives, past one block of columns."""
    rows, kv_len = torch.tensor([2, 0, 1], device=GPU), torch.tensor([5000, 0, 17], device=GPU)
    table = torch.randint(1, 9999, (3, 400), dtype=torch.int32, device=GPU)
    for have, want in zip(
        gather_table(table, rows, kv_len, 313, 16, gpu_traits(GPU)),
        gather_table_reference(table, rows, kv_len, 313, 16),
        strict=True,
    ):
        assert torch.equal(have, want)


# ------------------------------------------------------------------------------------------------------ whole rounds


def run(name, target=None, draft="builtin:nestling-eagle3", **options):
    problem = refusal(name, Need(torch.bfloat16, GPU)) if name in BACKENDS else None
    if problem is not None:
        pytest.skip(f"{name}: {problem.reason}")
    own = {"dtype": "bfloat16", "max_running_requests": 4, "page_size": 16}
    settings = {**own, "speculative_policy": "fixed", **options}
    llm = LLM(target, draft, attention_backend=name, **settings)
    outputs = llm.generate(PROMPTS * 2 if target is None else [[5, 9, 31, 7] * 9, [3], [8] * 30], greedy(48))
    llm.scheduler.check_integrity()
    return llm, outputs


def mean(lists):
    return sum(sum(each) for each in lists) / sum(len(each) for each in lists)


def agreement(a, b):
    """Share of tokens before two outputs part, over all prompts."""
    same = 0
    for one, other in zip(a, b, strict=True):
        shorter = min(len(one), len(other))
        same += next((i for i in range(shorter) if one[i] != other[i]), shorter)
    return same / sum(len(one) for one in a)


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "fa4", "auto"])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_rounds_accept_as_much_as_on_triton(name, page, graphs):
    """bf16 products round differently, so tokens part at near ties; accepted lengths do not."""
    llm, outputs = run(name, page_size=page, graphs=graphs)
    assert isinstance(llm.engine.launcher, CudaGraphs) == (graphs == "auto")
    _, reference = run("triton", page_size=page)
    assert abs(mean(accept_lens(outputs)) - mean(accept_lens(reference))) < 0.4
    assert agreement(tokens(outputs), tokens(reference)) > 0.5


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "fa4"])
def test_rounds_survive_poison(name):
    """Level 3: NaN in pages that nobody owns and INT_MIN in columns that nobody uses reach no result."""
    _, outputs = run(name, check_level=3)
    assert all(len(each) == 48 for each in tokens(outputs))


@pytest.mark.parametrize("name", ["fa3"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_model_with_windows_runs_its_window_layers_on_triton(name, graphs, tmp_path):
    """Two groups, one with a window of 12, a tree, pages of 4."""
    target, head = write_two_group_pair(tmp_path)
    options = {"target": str(target), "draft": str(head), "page_size": 4, "context_length": 128, "graphs": graphs}
    _, outputs = run(name, **options)
    _, reference = run("triton", **options)
    assert agreement(tokens(outputs), tokens(reference)) > 0.3
