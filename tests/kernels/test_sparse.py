"""The kernels of sparse attention (DSA) choose the keys that the reference chooses, and attend to them alone.

Tests of the kernels run in the interpreted session.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from support.grids import few_of
from support.interpreted import interpreted
from support.scenes import assert_close, scene
from treetop.attention.contract import TailKV
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention import index_topk
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.index_scores import paged_index_scores, paged_index_scores_reference
from treetop.kernels.attention.index_topk import choose_by_scores, choose_by_scores_reference
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import FP8, PagedKV, PageTable
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.phase import Phase

CPU = torch.device("cpu")
GPU = gpu_traits(CPU)
LATENT, ROPE_DIM, INDEX = 16, 6, 10
PLANE = {"kv_heads": 1, "dim": LATENT + ROPE_DIM + INDEX, "latent": LATENT}


def sparse_scene(**options):
    """Planes with an indexer's keys, and a query whose scores are whole numbers: many are equal, and all are exact."""
    s = scene(**{**PLANE, "heads": 5, **options})
    generator = torch.Generator().manual_seed(7)

    def whole(pages, index):
        before = index.float()
        index.copy_(torch.where(before.isnan(), before, torch.randint(-1, 2, index.shape, generator=generator)))
        return pages

    scales = s.kv.scales
    kv = PagedKV(whole(s.kv.data, s.kv.data[:, 0, 0, -INDEX:]), LATENT, INDEX, scales)
    numbers = kv.data.float()
    clean = torch.where(numbers.isnan(), s.clean.data.float(), numbers).to(kv.data.dtype)
    clean = PagedKV(clean, LATENT, INDEX, scales)
    tail = TailKV(whole(s.tail.data, s.tail.data[:, :, 0, 0, -INDEX:]), LATENT, INDEX, scales)
    rows, n = s.q.shape[:2]
    heads = torch.randint(-1, 2, (rows, n, 3, INDEX + 2), generator=generator)[..., :INDEX].to(s.q.dtype)
    weights = torch.randint(-2, 3, (rows, n, 3), generator=generator).float()
    q, k, tail_k = (each[..., : LATENT + ROPE_DIM] for each in (s.q, s.k, s.tail_k))
    causal = s.metadata.causal
    query = IndexQuery(heads, weights, 4)
    return (
        replace(s, kv=kv, clean=clean, tail=tail, q=q, k=k, tail_k=tail_k),
        query,
        None if causal else tail,
    )


def on_clean(s):
    """What references look at, who gather all there is."""
    return replace(s.metadata, table=PageTable(FULL, s.clean_table))


VARIETY = [
    ({}, 3),
    ({}, 60),
    ({"n": 1, "t": 1, "page_size": 16}, 1),
    ({"n": 2, "t": 9, "page_size": 1, "heads": 17}, 8),
    ({"n": 2, "t": 2, "page_size": 64, "max_kv_len": 70, "dtype": torch.float16}, 7),
    ({"n": 2, "t": 9, "page_size": 8, "fp8": True}, 5),
    ({"causal": True, "page_size": 2, "fp8": True}, 3),
    ({"causal": True, "page_size": 2}, 3),
    ({"causal": True, "n": 1, "page_size": 16, "max_kv_len": 20}, 30),
]
"""Scenes, and how many keys are chosen; in the second and the last that is all."""


@interpreted
@pytest.mark.parametrize(("options", "top_k"), few_of(VARIETY, *range(0, 9, 2)), ids=str)
def test_the_backend_chooses_and_attends_as_pytorchs(options, top_k):
    """On pages that are poisoned where no query may look, against float64; on both sides of top_k."""
    s, query, tail = sparse_scene(**options)
    query = replace(query, top_k=top_k)
    ours, theirs = TritonBackend(CPU), TorchBackend(torch.float64, CPU)
    plan = ours.plan(ours.begin(s.metadata), s.metadata)
    wide = [each.double() for each in (query.heads, query.weights)]
    want_plan = theirs.plan(theirs.begin(on_clean(s)), on_clean(s))
    wide_kv, wide_tail = s.clean, s.tail
    if s.kv.scales is None:
        wide_kv, wide_tail = (replace(each, data=each.data.double()) for each in (s.clean, s.tail))
    want = theirs.choose(IndexQuery(*wide, top_k), wide_kv, want_plan, None if tail is None else wide_tail)
    got = ours.choose(query, s.kv, plan, tail)
    bound, t = s.metadata.max_kv_len, 0 if tail is None else tail.data.shape[1]
    assert (got is None) == (bound + t <= top_k)
    assert (ours.hidden(plan, got) == -1).all()
    narrowed = ours.narrowed(plan, got)
    if got is not None:
        assert got.positions.shape == (*s.q.shape[:2], top_k)
        for row, query_of in product(*map(range, s.q.shape[:2])):
            if s.real[row, query_of]:
                kept = got.positions[row, query_of, : got.count[row, query_of]]
                seen = want[row, query_of].clone()
                if tail is None and not s.metadata.kv_len[row]:
                    seen[0] = False  # PyTorch's softmax must not be empty
                assert kept.tolist() == seen[:bound].nonzero().flatten().tolist()
                if tail is not None:
                    assert torch.equal(got.columns[row, query_of], seen[bound:])
    want_plan = theirs.narrowed(want_plan, want)
    q = s.q.double()
    if tail is None:
        out = ours.causal(s.q, s.kv, narrowed, s.scale)
        expected = theirs.causal(q, wide_kv, want_plan, s.scale)
        assert (out[~s.real] == 0).all()
        real = s.real & (s.metadata.kv_len > 0)[:, None]
    else:
        out = ours.prefix_tail(s.q, s.kv, narrowed, tail, s.scale)
        expected = theirs.prefix_tail(q, wide_kv, want_plan, wide_tail, s.scale)
        real = s.real
    assert_close(torch.where(real[:, :, None, None], out, 0), expected * real[:, :, None, None], s)
    rank = s.clean.value_dim
    again = latent_attention_reference(
        q,
        wide_kv.planes,
        replace(narrowed, table=on_clean(s).table),
        wide_tail.planes if t else None,
        rank,
        s.scale,
        s.kv.scales,
    )
    torch.testing.assert_close(again[real], expected[real], atol=1e-12, rtol=0)


@interpreted
@pytest.mark.parametrize("dtype", few_of([torch.float32, torch.float16], 1))
def test_scores_are_the_references(dtype):
    """Random ones too, within a rounding of their sum; of visible keys alone, for nothing else is written. Of codes
    in FP8, too."""
    for options in ({"n": 1}, {"n": 2, "t": 9, "max_kv_len": 140, "page_size": 16}, {"causal": True, "n": 33}):
        s, _, tail = sparse_scene(**options, dtype=dtype)
        torch.manual_seed(3)
        query = IndexQuery(torch.randn(*s.q.shape[:2], 3, INDEX).to(dtype), torch.randn(*s.q.shape[:2], 3), 4)
        of_tail = None if tail is None else tail.index_keys
        bound = s.metadata.max_kv_len
        seen = torch.arange(bound) < s.metadata.extents[..., None]
        for stored in (dtype, FP8):
            keys, clean = s.kv.index_keys.to(stored), s.clean.index_keys.to(stored)
            codes = None if of_tail is None else of_tail.to(stored)
            got = paged_index_scores(query, keys, s.metadata, codes, GPU)
            want = paged_index_scores_reference(query, clean, on_clean(s), codes)
            torch.testing.assert_close(got[..., :bound][seen], want[..., :bound][seen], atol=3e-5, rtol=0)
            torch.testing.assert_close(got[..., bound:], want[..., bound:], atol=3e-5, rtol=0)


def metadata_of(extents, mask=None):
    """Of rows whose one query sees so many positions."""
    rows = len(extents)
    kv_len = torch.tensor(extents)
    table = PageTable(FULL, torch.zeros((rows, 1), dtype=torch.int32))
    positions = kv_len[:, None] - 1
    tail_positions = None if mask is None else positions.expand(-1, mask.shape[2])
    bound = max(extents)
    return AttentionMetadata(
        Phase.VERIFY, table, torch.arange(rows), kv_len, bound, 1, positions, None, tail_positions, mask
    )


INFINITY, NAN = float("inf"), float("nan")
HARD = {
    "equal": torch.zeros,
    "both zeros": lambda width: torch.zeros(width).index_fill_(0, torch.arange(0, width, 2), -0.0),
    "rising": lambda width: torch.arange(width).float(),
    "falling": lambda width: -torch.arange(width).float(),
    "all -inf": lambda width: torch.full((width,), -INFINITY),
    "some not numbers": lambda width: torch.where(torch.arange(width) % 5 == 0, NAN, torch.randn(width)),
    "infinities": lambda width: torch.where(torch.arange(width) % 3 == 0, INFINITY, -INFINITY),
    "neighbours": lambda width: (torch.arange(width) % 7 + 0x3F800000).to(torch.int32).view(torch.float32),
    "few values": lambda width: torch.randint(-2, 3, (width,)).float(),
    "tiny": lambda width: torch.randint(-3, 4, (width,)).float() * 1e-45,
    "random": lambda width: torch.randn(width) * 10.0 ** torch.randint(-30, 30, (width,)),
}


@interpreted
@pytest.mark.parametrize("name", few_of(HARD, *range(0, 11, 2)))
@pytest.mark.parametrize(("top_k", "chunk"), [pytest.param(1, 16, marks=pytest.mark.slow), (16, 32)])
def test_equal_bits_choose_equal_keys_whatever_the_chunks(name, top_k, chunk):
    """One launch or a tree of them; extents of nothing, of a few, and of all; with a tail and without."""
    torch.manual_seed(5)
    extents, t = (0, 2, top_k + 1, 70), 5
    mask = torch.rand(len(extents), 1, t) < 0.6
    mask[0] = False
    for tail in (None, mask):
        metadata = metadata_of(extents, tail)
        width = 70 + (0 if tail is None else t)
        scores = HARD[name](len(extents) * width).view(len(extents), 1, width).contiguous()
        got = choose_by_scores(scores, metadata, top_k, GPU, chunk)
        want = choose_by_scores_reference(scores, metadata, top_k)
        assert torch.equal(got.count, want.count)
        there = torch.arange(top_k) < want.count[..., None]
        assert torch.equal(torch.where(there, got.positions, 0), want.positions)
        shown = 0 if tail is None else want.columns.sum(dim=2)
        assert tail is None or torch.equal(got.columns, want.columns)
        seen = metadata.kv_len[:, None] + (0 if tail is None else tail.sum(dim=2))
        assert torch.equal(want.count + shown, seen.clamp(max=top_k))


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_queries_choose_what_all_choose(monkeypatch, causal):
    """As many at a time as memory is kept for: some rows, or some queries of one."""
    s, query, tail = sparse_scene(n=3, t=9, max_kv_len=20, causal=causal)
    backend = TritonBackend(CPU)
    whole = backend.choose(query, s.kv, s.metadata, tail)
    for most in (29, 6 * 29) if causal else (2 * 29,):
        monkeypatch.setattr(index_topk, "_SCORES", most)
        part = backend.choose(query, s.kv, s.metadata, tail)
        assert torch.equal(part.count, whole.count)
        there = torch.arange(4) < whole.count[..., None]
        assert torch.equal(part.positions[there], whole.positions[there])
        assert causal or torch.equal(part.columns, whole.columns)


@interpreted
@pytest.mark.parametrize(("splits", "heads"), few_of([(1, 16), (3, 32)], 0))
def test_all_keys_chosen_are_dense_attention_to_the_bit(splits, heads):
    """The same launch: blocks, splits and order are those of the dense kernel, of a query that is a row's only one;
    and of several in a prefill that is not split."""
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    cases = [{"n": 3, "causal": True}] if splits == 1 else [{"n": 1, "t": 7}]
    for options in cases:
        s, query, tail = sparse_scene(heads=heads, max_kv_len=50, **options)
        backend, every = TritonBackend(CPU), replace(query, top_k=50)
        chosen = index_topk.choose_paged_keys(
            every, s.kv.index_keys, s.metadata, None if tail is None else tail.index_keys, GPU
        )
        planes = None if tail is None else tail.planes
        want = latent_attention(s.q, s.kv.planes, s.metadata, planes, LATENT, s.scale, GPU, launch)
        narrowed = backend.narrowed(s.metadata, replace(chosen))
        seen = chosen.count + (0 if tail is None else chosen.columns.sum(dim=2))
        all_of_them = seen == s.metadata.extents + (0 if tail is None else s.metadata.mask.sum(dim=2))
        assert all_of_them[s.metadata.kv_len < 43].all()
        got = latent_attention(s.q, s.kv.planes, narrowed, planes, LATENT, s.scale, GPU, launch)
        assert torch.equal(got[all_of_them], want[all_of_them])


@interpreted
def test_a_key_that_no_query_may_see_is_found():
    """A position past a query's extent, before it none, and a hidden column of the tail."""
    s, query, tail = sparse_scene()
    backend = TritonBackend(CPU)
    chosen = backend.choose(query, s.kv, s.metadata, tail)
    assert (chosen.count[0] > 0).all()
    past = chosen.positions.clone()
    past[0, 1, 0] = 50
    assert backend.hidden(s.metadata, replace(chosen, positions=past)).tolist() == [50, -1, -1, -1]
    shown = chosen.columns.clone()
    shown[2, 0] = ~s.metadata.mask[2, 0]
    first = int(shown[2, 0].to(torch.int8).argmax())
    assert backend.hidden(s.metadata, replace(chosen, columns=shown)).tolist() == [-1, -1, 50 + first, -1]
