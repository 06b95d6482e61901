"""Compressed attention by the kernel in Gluon, eager and captured, against dense attention; and whole rounds on it.

    python -m pytest tests/gpu/test_gpu_latent_gluon.py -q

On another GPU than Hopper, or without Gluon, these are skipped, with the reason that an engine would give.
"""

from dataclasses import replace

import pytest
import torch

from support.engines import accept_lens, build, greedy, tokens
from support.families import FAMILIES
from support.scenes import dense_answer, moved, scene
from treetop.attention import auto, gluon_backend
from treetop.attention.auto import Timing, load_table, make_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import BACKENDS, refusal
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.latent_gather import chosen_planes_attention
from treetop.kernels.attention.latent_gluon import latent_pages_attention
from treetop.kernels.attention.metadata import SparseKeys
from treetop.kernels.triton_guard import gpu_traits
from treetop.kernels.tuning import TunedTable
from treetop.types.ids import FULL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
KERNELS = {"deepseek v3": "latent_pages_attention", "deepseek v32": "chosen_planes_attention"}
PLANE = {"kv_heads": 1, "dim": 576, "latent": 512, "page_size": 64, "dtype": torch.bfloat16}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = [
    {"n": 1, "t": 1, "heads": 16, "max_kv_len": 200},
    {"n": 16, "t": 16, "heads": 128, "max_kv_len": 700},
    {"n": 5, "t": 12, "heads": 20, "max_kv_len": 640, "dtype": torch.float16},  # the last page is full
    {"n": 4, "t": 64, "heads": 8, "max_kv_len": 20_000},
    {"n": 64, "t": 64, "heads": 128, "max_kv_len": 200},  # many waves of programs
    {"n": 2, "t": 3, "heads": 16, "max_kv_len": 400, "lengths": (1, 63, 64, 65, 128, 129, 0)},
    # the same, and one row is cut
    {"n": 64, "t": 64, "heads": 16, "max_kv_len": 2_000, "lengths": (*(100,) * 19, 2_000, 0)},
]


def need_of(heads, dtype=torch.bfloat16):
    return Need(dtype, GPU, 64, (GroupNeed(FULL, heads, 1, 576, latent=512),))


@pytest.fixture(autouse=True)
def _usable():
    """A skip with the reason that an engine would give; but that the kernel is wrong is a failure."""
    problem = refusal("gluon", need_of(16))
    if problem is not None:
        assert "its kernel" not in problem.reason, problem.reason
        pytest.skip(f"gluon: {problem.reason}")


def check(got, want, dtype):
    assert bool(torch.isfinite(got).all())
    error = float((got.float() - want).norm() / want.norm())
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("options", SIZES, ids=str)
def test_prefix_and_tail_equal_dense_attention(options, splits):
    """A last, partial page is read whole: NaN in every slot, INT_MIN in every column that no query may see."""
    s = moved(scene(**{**PLANE, **options}), GPU)
    got = latent_pages_attention(s.q, s.kv.planes, s.metadata, s.tail.planes, s.scale, gpu_traits(GPU), splits)
    check(got, dense_answer(s, with_tail=True)[0], s.q.dtype)


def test_a_page_of_another_group_and_what_lies_beside_a_plane_are_not_read():
    """Planes are part of wider ones, whose other numbers are NaN, and every page that a row has not is NaN."""
    s = moved(scene(**{**PLANE, "n": 3, "t": 5, "heads": 32, "max_kv_len": 900}), GPU)
    wider = torch.full((*s.kv.planes.shape[:3], 576 + 128), torch.nan, dtype=s.q.dtype, device=GPU)
    wider[..., :576] = s.kv.planes
    planes = wider[..., :576]
    got = latent_pages_attention(s.q, planes, s.metadata, s.tail.planes, s.scale, gpu_traits(GPU))
    check(got, dense_answer(s, with_tail=True)[0], s.q.dtype)


def test_a_wrong_number_of_a_row_shows_in_it_alone():
    """NaN that queries do see is no less an error here than elsewhere, and other rows are as they were."""
    s = moved(scene(**{**PLANE, "n": 2, "t": 2, "heads": 16, "max_kv_len": 200, "lengths": (130, 70, 0)}), GPU)
    first_page = s.metadata.table.data[s.metadata.rows[0], 0].long()
    planes = s.kv.planes.clone()
    planes[first_page * 64 + 5] = torch.nan
    got = latent_pages_attention(s.q, planes, s.metadata, s.tail.planes, s.scale, gpu_traits(GPU))
    assert bool(got[0].isnan().all())
    check(got[1:], dense_answer(s, with_tail=True)[0][1:], s.q.dtype)


CHOSEN = [
    {"n": 1, "t": 1, "heads": 64, "max_kv_len": 64, "top": 64},
    {"n": 2, "t": 3, "heads": 128, "max_kv_len": 9_000, "top": 2_048},
    {"n": 16, "t": 16, "heads": 16, "max_kv_len": 3_000, "top": 257, "lengths": (3_000, 1, 300, 65, 0)},
    {"n": 4, "t": 64, "heads": 20, "max_kv_len": 700, "top": 100, "dtype": torch.float16, "page_size": 16},
]


def beside_index_keys(planes):
    """The same planes as an engine keeps them: 128 numbers of NaN behind each are no part of it."""
    beside = planes.new_full((*planes.shape[:-1], 128), torch.nan)
    return torch.cat([planes, beside], dim=-1)[..., : planes.shape[-1]]


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("options", CHOSEN, ids=str)
def test_chosen_keys_equal_dense_attention_to_them(options, splits):
    """NaN in every slot that is not chosen, and beside all planes; queries have as many keys as they please."""
    top = options["top"]
    s = moved(scene(**{**PLANE, **{name: value for name, value in options.items() if name != "top"}}), GPU)
    rows, n = s.metadata.positions.shape
    positions, count = torch.zeros((2, rows, n, top), dtype=torch.int32, device=GPU).unbind()
    count = count[..., 0]
    for row, length in enumerate(s.metadata.kv_len.tolist()):
        for query in range(n):
            few = min(length, top - query % 3)
            positions[row, query, :few] = torch.randperm(length, device=GPU)[:few].sort()[0]
            count[row, query] = few
    chosen = SparseKeys(positions, count.contiguous(), s.metadata.mask)
    metadata = replace(s.metadata, chosen=chosen)
    planes, size = s.kv.planes.clone(), s.metadata.page_size
    want = latent_attention_reference(s.q.float(), planes, metadata, s.tail.planes.float(), 512, s.scale)
    used = torch.zeros(len(planes), dtype=torch.bool, device=GPU)
    for row, of in enumerate(s.metadata.rows.tolist()):
        for query in range(n):
            at = positions[row, query, : count[row, query]].long()
            used[s.metadata.table.data[of, at // size].long() * size + at % size] = True
    planes[~used] = torch.nan
    planes, tail = beside_index_keys(planes), beside_index_keys(s.tail.planes)
    got = chosen_planes_attention(s.q, planes, metadata, tail, s.scale, gpu_traits(GPU), splits)
    check(got, want, s.q.dtype)


def test_more_queries_than_the_second_dimension_of_a_grid_takes():
    """1,024 rows that are one row, of 64 queries each: every one gets the bits that it gets alone."""
    s = moved(scene(**{**PLANE, "n": 64, "t": 64, "heads": 8, "max_kv_len": 400, "lengths": (400, 0)}), GPU)
    positions = torch.arange(0, 400, 4, dtype=torch.int32, device=GPU)

    def call(rows):
        def many(x):
            return x[:1].expand(rows, *x.shape[1:]).contiguous()

        names = ("rows", "kv_len", "positions", "tail_positions", "mask")
        metadata = replace(s.metadata, **{name: many(getattr(s.metadata, name)) for name in names})
        listed = positions.expand(rows, 64, -1).contiguous()
        count = torch.full((rows, 64), 100, dtype=torch.int32, device=GPU)
        metadata = replace(metadata, chosen=SparseKeys(listed, count, metadata.mask))
        planes, tail = s.kv.planes, many(s.tail.planes)
        return chosen_planes_attention(many(s.q), planes, metadata, tail, s.scale, gpu_traits(GPU), 1), metadata

    alone, metadata = call(1)
    want = latent_attention_reference(s.q[:1].float(), s.kv.planes, metadata, s.tail.planes[:1].float(), 512, s.scale)
    check(alone, want, torch.bfloat16)
    assert bool((call(1024)[0] == alone).all())


def test_a_captured_phase_follows_its_buffers():
    """Captured on padding rows, replayed on others: lengths, tables, rows and masks are data."""
    size = {**PLANE, "n": 9, "t": 9, "heads": 16, "max_kv_len": 9_000}
    first, second = (moved(scene(seed=seed, **size), GPU) for seed in (1, 2))
    names = ("rows", "kv_len", "positions", "tail_positions", "mask")
    own = {name: getattr(first.metadata, name).clone() for name in names}
    table = replace(first.metadata.table, data=first.metadata.table.data.clone())
    kv, q = replace(first.kv, data=first.kv.data.clone()), first.q.clone()
    tail = replace(first.tail, data=first.tail.data.clone())
    metadata = replace(first.metadata, table=table, **own)
    backend = make_backend("gluon", need_of(16))

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


def pair_of(folder, heads=4, family="deepseek v3"):
    """A tiny model whose latents are as wide as DeepSeek's, and a head for it."""
    tiny = FAMILIES[family]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "index_head_dim": 128}
    sizes = {name: size for name, size in sizes.items() if name != "index_head_dim" or name in tiny.config}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    return replace(tiny, config={**tiny.config, **sizes}).save(folder, seed=5).pair


@pytest.mark.parametrize(
    ("family", "shape"),
    [("deepseek v3", None), ("deepseek v3", (3, 4, 12)), ("deepseek v32", None), ("deepseek v32", (3, 4, 12))],
    ids=str,
)
def test_rounds_of_a_model_with_latents_of_512_agree_with_triton(family, shape, tmp_path, monkeypatch):
    """Captured, with poisoned pages: bfloat16 rounds differently, so tokens may part at near ties."""
    pair, kernel = pair_of(tmp_path, family=family), KERNELS[family]
    prompts = pair.prompts([3, 140, 64, 12], seed=3)
    options = {"page_size": 64, "context_length": 256, "max_running_requests": 4, "dtype": "bfloat16", "device": "cuda"}
    called, real = [], getattr(gluon_backend, kernel)
    monkeypatch.setattr(gluon_backend, kernel, lambda *args: called.append(args) or real(*args))
    made = []
    for name in ("triton", "gluon"):
        llm = build(pair, shape, **options, attention_backend=name, check_level=3)
        assert isinstance(llm.engine.launcher, CudaGraphs)
        assert llm.engine.runner.backend.name == name
        assert bool(called) == (name == "gluon")
        outputs = llm.generate(prompts, greedy(24))
        llm.scheduler.check_integrity()
        made.append((tokens(outputs), [sum(each) / len(each) for each in accept_lens(outputs)]))
        llm.close()
    first = [next((i for i, both in enumerate(zip(*pair, strict=True)) if both[0] != both[1]), 24)
             for pair in zip(made[0][0], made[1][0], strict=True)]  # fmt: skip
    assert sum(first) > 0.5 * 24 * len(prompts), f"tokens part after {first}"


@pytest.mark.parametrize("shape", [None, (3, 4, 12)], ids=str)
def test_auto_takes_it_and_pages_of_64_for_128_heads_and_triton_on_pages_of_16(shape, tmp_path, monkeypatch, caplog):
    """Captured, pools by what rows can use. `auto` chooses what `gluon` is, so tokens are equal; on pages of 16 it
    says why it does not."""
    if not load_table().holds_for(gpu_traits(GPU)):
        pytest.skip("the table of `auto` is of another kind of GPU")
    monkeypatch.delitem(BACKENDS, "flashmla")  # which `auto` would take
    pair = pair_of(tmp_path, heads=128)
    prompts = pair.prompts([3, 140, 64, 12], seed=3)
    options = {
        "context_length": 256,
        "max_running_requests": 4,
        "dtype": "bfloat16",
        "device": "cuda",
        "check_level": 3,
    }
    called, real = [], gluon_backend.latent_pages_attention
    monkeypatch.setattr(gluon_backend, "latent_pages_attention", lambda *args: called.append(args) or real(*args))
    made = []
    for name, page in (("auto", None), ("gluon", 64), ("auto", 16)):
        called.clear()
        with caplog.at_level("INFO", "treetop"):
            llm = build(pair, shape, **options, attention_backend=name, page_size=page)
        assert isinstance(llm.engine.launcher, CudaGraphs)
        backend = llm.engine.runner.backend
        if page is None:
            assert llm.engine.layout.page_size == 64
            assert set(backend.parts) == {"gluon", "triton"}
            assert any("gluon" in why for why in backend.reasons.values())
        assert bool(called) == (page != 16)
        outputs = llm.generate(prompts, greedy(24))
        llm.scheduler.check_integrity()
        made.append(tokens(outputs))
        llm.close()
    assert made[0] == made[1]
    assert backend.name == "triton"
    assert "; gluon: it serves pages of 64 tokens, not of 16" in caplog.text


@pytest.mark.parametrize("shape", [None, (3, 4, 12)], ids=str)
def test_auto_takes_the_gather_where_a_table_names_it_for_so_many_chosen_keys(shape, tmp_path, monkeypatch):
    """On pages of 64. Every call of a round that runs eagerly is dense attention to what its indexer chose; captured
    rounds give the same tokens. What another rounding makes an indexer choose is no near tie, so tokens of another
    backend say nothing."""
    classes = {"tail h1x64x576e2c9 rows1 n1 keys8192": {"triton": Timing(30.0), "gluon": Timing(20.0)}}
    table = TunedTable(gpu_traits(GPU).num_sms, "2026-01-01", classes)
    monkeypatch.setattr(auto, "load_table", lambda: table)
    pair = pair_of(tmp_path, heads=64, family="deepseek v32")
    prompts = pair.prompts([3, 140, 64, 12], seed=3)
    options = {
        "context_length": 256,
        "max_running_requests": 4,
        "dtype": "bfloat16",
        "device": "cuda",
        "overlap": False,
        "prefill_graph_max_tokens": 0,
    }
    errors, called, real = [], [], gluon_backend.chosen_planes_attention

    def compared(q, pages, metadata, tail, scale, *how):
        got = real(q, pages, metadata, tail, scale, *how)
        called.append(metadata.chosen.positions.shape[2])
        if not torch.cuda.is_current_stream_capturing():
            want = latent_attention_reference(q.float(), pages, metadata, tail.float(), 512, scale)
            live = (metadata.kv_len > 0)[:, None, None, None]
            difference, want = (torch.where(live, each, 0.0) for each in (got - want, want))
            errors.append(difference.norm() / want.norm().clamp(min=1e-6))
        return got

    monkeypatch.setattr(gluon_backend, "chosen_planes_attention", compared)
    made = []
    for graphs in ("auto", "off"):  # kernels of the first are compiled on all cores
        called.clear()
        llm = build(pair, shape, **options, graphs=graphs, check_level=3)
        assert isinstance(llm.engine.launcher, CudaGraphs) == (graphs == "auto")
        errors.clear()
        outputs = llm.generate(prompts, greedy(24))
        llm.scheduler.check_integrity()
        assert 9 in called
        assert (len(errors) > 20) == (graphs == "off")
        assert all(float(error) < TOLERANCE[torch.bfloat16] for error in errors)
        backend = llm.engine.runner.backend
        assert llm.engine.layout.page_size == 64
        assert set(backend.parts) == {"gluon", "triton"}
        assert any("c9" in shape_class and "gluon 20.0" in why for shape_class, why in backend.reasons.items())
        made.append(tokens(outputs))
        llm.close()
    assert made[0] == made[1]
