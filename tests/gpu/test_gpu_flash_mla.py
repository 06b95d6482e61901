"""FlashMLA on a GPU, eager and captured, against dense attention; and whole rounds on it.

    python -m pytest tests/gpu/test_gpu_flash_mla.py -q

Without the library these are skipped, with the reason that an engine would give; its tail's kernel is tested anyway.
"""

from dataclasses import replace

import pytest
import torch

from support.engines import accept_lens, build, greedy, tokens
from support.families import FAMILIES
from support.scenes import assert_close_lse, dense_answer, moved, scene
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import refusal
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.tail import tail_and_merge
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
PLANE = {"kv_heads": 1, "dim": 576, "latent": 512, "page_size": 64}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = [
    {"n": 1, "t": 1, "heads": 16, "max_kv_len": 200},
    {"n": 16, "t": 16, "heads": 128, "max_kv_len": 700},
    {"n": 5, "t": 12, "heads": 20, "max_kv_len": 640, "dtype": torch.float16},  # the last page is full
    {"n": 4, "t": 8, "heads": 8, "max_kv_len": 20_000},
]


def need_of(heads, dtype=torch.bfloat16):
    return Need(dtype, GPU, 64, (GroupNeed(FULL, heads, 1, 576, latent=512),))


def library(heads, dtype=torch.bfloat16):
    """The backend, or a skip with the reason that an engine would give."""
    problem = refusal("flashmla", need_of(heads, dtype))
    if problem is not None:
        pytest.skip(f"flashmla: {problem.reason}")
    return make_backend("flashmla", need_of(heads, dtype))


def check(got, want, dtype):
    assert bool(torch.isfinite(got).all())
    error = float((got.float() - want).norm() / want.norm())
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", SIZES[:3], ids=str)
def test_the_tail_of_one_plane_is_merged_in_one_launch(options, dtype):
    """With garbage where a prefix is empty."""
    s = moved(scene(**{**PLANE, **options, "dtype": dtype}), GPU)
    out, lse = dense_answer(s, with_tail=False)
    empty = s.metadata.kv_len == 0
    out[empty], lse[empty] = float("nan"), float("inf")
    part = PrefixPart(out.to(dtype), lse, s.metadata.kv_len)
    got = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, gpu_traits(GPU), 512)
    check(got, dense_answer(s, with_tail=True)[0], dtype)


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_prefix_and_tail_equal_dense_attention(options):
    """NaN in every slot, INT_MIN in every column that no query may see; a partial page, an empty and a padding row."""
    s = moved(scene(**{**PLANE, "dtype": torch.bfloat16, **options}), GPU)
    backend = library(s.q.shape[2], s.q.dtype)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    for _ in range(2):  # the second shares what the first divided
        check(backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale), dense_answer(s, True)[0], s.q.dtype)
    out, lse = plan.attend(s.q, s.kv, s.scale).normalised()
    want, want_lse = dense_answer(s, with_tail=False)
    check(out, want, s.q.dtype)
    assert_close_lse(lse, want_lse, s)
    assert (lse[-1] == float("-inf")).all()


def test_a_captured_phase_follows_its_buffers():
    """Captured on padding rows, replayed on others: lengths, tables, rows and masks are data, work is divided anew."""
    size = {**PLANE, "n": 9, "t": 9, "heads": 16, "max_kv_len": 9_000, "dtype": torch.bfloat16}
    first, second = (moved(scene(seed=seed, **size), GPU) for seed in (1, 2))
    names = ("rows", "kv_len", "positions", "tail_positions", "mask")
    own = {name: getattr(first.metadata, name).clone() for name in names}
    table = replace(first.metadata.table, data=first.metadata.table.data.clone())
    kv, q = replace(first.kv, data=first.kv.data.clone()), first.q.clone()
    tail = replace(first.tail, data=first.tail.data.clone())
    metadata = replace(first.metadata, table=table, **own)
    backend = library(16)

    def phase():
        plan = backend.plan(backend.begin(metadata), metadata)
        return [backend.prefix_tail(q, kv, plan, tail, first.scale) for _ in range(2)]

    metadata.rows.fill_(3)
    metadata.kv_len.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        phase()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = phase()
    for source in (first, second, first):
        for name in names:
            own[name].copy_(getattr(source.metadata, name))
        table.data.copy_(source.metadata.table.data)
        for to, value in ((kv.data, source.kv.data), (q, source.q), (tail.data, source.tail.data)):
            to.copy_(value)
        graph.replay()
        want = dense_answer(source, with_tail=True)[0]
        for out in outs:
            check(out, want, torch.bfloat16)


@pytest.mark.parametrize("shape", [None, (3, 4, 12)], ids=str)
def test_rounds_of_a_model_with_latents_of_512_agree_with_triton(shape, tmp_path):
    """Captured, with poisoned pages: bfloat16 rounds differently, so tokens may part at near ties."""
    library(4)
    tiny = FAMILIES["deepseek v3"]
    config = {**tiny.config, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    pair = replace(tiny, config=config).save(tmp_path, seed=5).pair
    prompts = pair.prompts([3, 140, 64, 12], seed=3)
    options = {"page_size": 64, "context_length": 256, "max_running_requests": 4, "dtype": "bfloat16", "device": "cuda"}
    made = []
    for name in ("triton", "flashmla"):
        llm = build(pair, shape, **options, attention_backend=name, check_level=3)
        assert isinstance(llm.engine.launcher, CudaGraphs)
        assert llm.engine.runner.backend.name == name
        outputs = llm.generate(prompts, greedy(24))
        llm.scheduler.check_integrity()
        made.append((tokens(outputs), [sum(each) / len(each) for each in accept_lens(outputs)]))
        llm.close()
    first = [next((i for i, both in enumerate(zip(*pair, strict=True)) if both[0] != both[1]), 24)
             for pair in zip(made[0][0], made[1][0], strict=True)]  # fmt: skip
    assert sum(first) > 0.5 * 24 * len(prompts), f"tokens part after {first}"
