"""Tail and merge, attention sinks and the gathered page table: the Triton kernels against dense attention.

Tests of the kernels run in the interpreted session.
"""

import math
from dataclasses import replace

import pytest
import torch

from support.grids import few_of
from support.interpreted import interpreted
from support.scenes import INT_MIN, assert_close, assert_close_lse, dense_answer, scene
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention import attention
from treetop.kernels.attention.attention import paged_attention, paged_attention_reference
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.pages import gather_table, gather_table_reference
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.tail import tail_and_merge, tail_and_merge_reference
from treetop.kernels.kv import PageTable
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL

CPU = torch.device("cpu")

VARIETY = [
    {},
    {"n": 1, "t": 1},
    {"n": 3, "t": 9, "heads": 2, "page_size": 1},
    {"n": 9, "t": 16, "heads": 8, "kv_heads": 1, "dim": 32, "page_size": 16},
    {"heads": 14, "dim": 24, "page_size": 3, "max_kv_len": 20},
    {"n": 40, "t": 70, "heads": 2, "kv_heads": 1, "dim": 64, "dtype": torch.float16, "max_kv_len": 50},
    {"n": 6, "t": 12, "heads": 4, "window": 5, "page_size": 8, "max_kv_len": 40},
]
SMALL = [
    {"n": 6, "t": 12, "heads": 4, "window": 5, "chunked": True, "page_size": 8, "max_kv_len": 40},
    {"heads": 6, "dim": 24, "page_size": 3, "max_kv_len": 20},
    {"n": 20, "t": 30, "heads": 2, "kv_heads": 1, "dim": 64, "dtype": torch.float16, "max_kv_len": 40},
    {"n": 6, "t": 12, "heads": 4, "window": 5, "page_size": 8, "max_kv_len": 40},
]
CAUSAL = [{"n": 1}, {"n": 9, "page_size": 1}, {"n": 40, "max_kv_len": 90, "window": 11}]


def prefix_of(s):
    """What a library would say of the prefix: garbage where a row is empty, and a transposed lse."""
    out, lse = dense_answer(s, with_tail=False)
    empty = s.metadata.kv_len == 0
    out[empty] = float("nan")
    lse[empty] = float("inf")
    transposed = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return PrefixPart(out.to(s.q.dtype), transposed, s.metadata.kv_len)


def sinks_of(s, low=False):
    """One logit a head; low: so far below every score that no number shows it."""
    return torch.full((s.q.shape[2],), -80.0) if low else torch.randn(s.q.shape[2]) * 2


def test_the_reference_of_tail_and_merge_is_dense_attention():
    """From what a library says of the prefix, whatever it leaves where a prefix is empty, with and without a sink."""
    s = scene(n=4, t=6, window=9)
    for sinks in (None, sinks_of(s)):
        got = tail_and_merge_reference(s.q, prefix_of(s), s.tail.data, s.metadata, s.scale, sinks)
        assert_close(got, dense_answer(s, with_tail=True, sinks=sinks)[0], s)


def test_a_sink_enters_the_torch_backend_once():
    """prefix_tail, causal, and the merge of two parts give dense attention with one more logit a head."""
    s = scene(n=4, t=6)
    backend, sinks = TorchBackend(torch.float32, CPU), sinks_of(s)
    metadata = replace(s.metadata, table=PageTable(FULL, s.clean_table))
    plan = backend.plan(backend.begin(metadata), metadata)
    want = dense_answer(s, with_tail=True, sinks=sinks)[0]
    assert_close(backend.prefix_tail(s.q, s.clean, plan, s.tail, s.scale, sinks), want, s)
    c = scene(n=6, causal=True)
    metadata = replace(c.metadata, table=PageTable(FULL, c.clean_table))
    plan = backend.plan(backend.begin(metadata), metadata)
    out = backend.causal(c.q, c.clean, plan, c.scale, sinks)
    want = dense_answer(c, with_tail=False, sinks=sinks)[0]
    assert_close(out[c.real], want[c.real], c)


def test_a_sink_takes_its_share_by_hand():
    """One key of score 0 and a sink of log 3: the key keeps a quarter."""
    s = scene(n=1, t=1, max_kv_len=50)
    q, kv_len = torch.zeros_like(s.q), torch.zeros_like(s.metadata.kv_len)
    part = PrefixPart(torch.zeros_like(q), torch.zeros(q.shape[:3]), kv_len)
    sinks = torch.full((q.shape[2],), 3.0).log()
    got = tail_and_merge_reference(q, part, s.tail.data, s.metadata, s.scale, sinks)
    value = s.tail.v[:, 0].repeat_interleave(q.shape[2] // s.tail.v.shape[2], dim=1)
    assert_close(got[:, 0], value / 4, s)


GPU = gpu_traits(CPU)


@interpreted
@pytest.mark.parametrize("options", VARIETY, ids=str)
@pytest.mark.parametrize("with_sinks", few_of([False, True], 1))
def test_tail_and_merge_equals_dense_attention(options, with_sinks):
    """One launch from a library's (out, lse), garbage in empty rows and a base-2 lse included."""
    s = scene(**options)
    sinks = sinks_of(s) if with_sinks else None
    part = prefix_of(s)
    want = dense_answer(s, with_tail=True, sinks=sinks)[0]
    got = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, sinks, GPU)
    assert_close(got, want, s)
    two = 1.4426950408889634
    part = replace(part, lse=part.lse * two, unit=1 / two)
    assert_close(tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, sinks, GPU), want, s)


LATENT = [{"heads": 3, "n": 4}, {"heads": 5, "n": 9, "t": 20, "page_size": 8}, {"heads": 16, "n": 1, "t": 1}]


@interpreted
@pytest.mark.parametrize("options", LATENT, ids=str)
def test_a_tail_of_one_plane_is_merged_by_its_own_kernel(options):
    """Widths that are no powers of two, garbage in empty rows, wider planes, a base-2 lse, keys that are not finite.

    A query that saw nothing of a row with keys takes the tail alone, and a prefix that is not finite shows.
    """
    s = scene(kv_heads=1, dim=26, latent=20, **options)
    part, tail = prefix_of(s), s.tail.data.repeat(1, 1, 1, 1, 2)[..., :26]
    want = dense_answer(s, with_tail=True)[0]
    two = 1.4426950408889634
    for each in (part, replace(part, lse=part.lse * two, unit=1 / two)):
        got = tail_and_merge(s.q, each, tail, s.metadata, s.scale, None, GPU, value_dim=20)
        assert got.shape == (*s.q.shape[:3], 20)
        assert_close(got, want, s)
    empty, tail = part.kv_len == 0, s.tail.data.clone()
    tail[:, 0] = float("nan")
    sees = s.metadata.mask[:, :, 0]
    got = tail_and_merge(s.q, part, tail, s.metadata, s.scale, None, GPU, value_dim=20)
    assert torch.equal(got.isnan().all(dim=(2, 3)), sees)
    assert_close(got[~sees], want[~sees], s)
    for lse in (float("-inf"), float("nan")):
        part.lse[:], part.out[:] = lse, float("nan")
        got = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, GPU, value_dim=20)
        alone = tail_and_merge_reference(s.q, part, s.tail.data, s.metadata, s.scale, value_dim=20)
        assert bool(got[~empty].isnan().all()) == (lse != float("-inf"))
        torch.testing.assert_close(got, alone, equal_nan=True, atol=1e-5, rtol=1e-5)


@interpreted
def test_a_query_that_saw_nothing_of_a_row_with_keys_takes_the_tail_alone():
    """Whatever the library left in its output."""
    s = scene(n=4, t=6)
    part = prefix_of(s)
    part.lse[:], part.out[:] = float("-inf"), float("nan")
    got = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, GPU)
    assert bool(torch.isfinite(got).all())
    assert_close(got, tail_and_merge_reference(s.q, part, s.tail.data, s.metadata, s.scale), s)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_prefix_that_is_not_finite_shows(value):
    """Where a row has keys; rows without any give what they gave."""
    s = scene(n=4, t=6)
    part = prefix_of(s)
    clean = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, GPU)
    part.lse[:], part.out[:] = value, float("nan")
    empty = part.kv_len == 0
    assert 0 < int(empty.sum()) < empty.shape[0]
    for got in (
        tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, GPU),
        tail_and_merge_reference(s.q, part, s.tail.data, s.metadata, s.scale),
    ):
        assert bool(got[~empty].isnan().all())
        assert_close(got[empty], clean[empty], s)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("column", few_of([0, 3], 0))
def test_a_key_that_is_not_finite_shows_in_the_queries_that_see_it(splits, column):
    """As in dense attention: their output is NaN, never 0, and that of the others is right."""
    s = scene(n=4, t=6)
    s.tail.data[:, column, 0] = float("nan")
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    got, _ = paged_attention(s.q, s.kv.data, s.metadata, s.tail.data, s.scale, None, GPU, launch)
    sees = s.metadata.mask[:, :, column]
    assert bool(sees.any())
    assert torch.equal(got.isnan().all(dim=(2, 3)), sees)
    assert_close(got[~sees], dense_answer(s, with_tail=True)[0][~sees], s)
    part = prefix_of(s)
    merged = tail_and_merge(s.q, part, s.tail.data, s.metadata, s.scale, None, GPU)
    assert torch.equal(merged.isnan().all(dim=(2, 3)), sees)


@interpreted
@pytest.mark.parametrize(
    ("options", "splits", "items"),
    few_of([*((options, 1, 1) for options in SMALL), *zip(SMALL, (3, 3, 3, 3), (1, 1, 4, 1), strict=True)], 0, 7),
    ids=str,
)
def test_a_sink_enters_the_fused_kernel_once(options, splits, items, monkeypatch):
    """At the end of a single split, in the merge of several, item by item or some at a time."""
    monkeypatch.setattr(attention, "_items_to_merge", lambda count, _: math.gcd(items, count))
    s = scene(**options)
    sinks = sinks_of(s)
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    call = s.q, s.kv.data, s.metadata, s.tail.data, s.scale
    out, lse = paged_attention(*call, sinks, GPU, launch)
    want, want_lse = dense_answer(s, with_tail=True, sinks=sinks)
    assert_close(out, want, s)
    if s.q.dtype == torch.float32:
        assert_close_lse(lse, torch.logaddexp(want_lse, sinks), s)
    clean = replace(s.metadata, table=PageTable(FULL, s.clean_table))
    out, _ = paged_attention_reference(s.q, s.clean.data, clean, s.tail.data, s.scale, sinks)
    assert_close(out, want, s)
    low, _ = paged_attention(*call, sinks_of(s, low=True), GPU, launch)
    none, _ = paged_attention(*call, None, GPU, launch)
    assert_close(low, none, s)


@interpreted
@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_a_sink_enters_causal_attention_once(options):
    s = scene(**options, causal=True)
    backend, sinks = TritonBackend(CPU), sinks_of(s)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.causal(s.q, s.kv, plan, s.scale, sinks)
    assert_close(out, dense_answer(s, with_tail=False, sinks=sinks)[0], s)


@interpreted
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("columns", [1, 9, 300])
def test_the_gathered_table_holds_used_columns_and_null_pages(page_size, columns):
    """Columns at and past the extent are never read: INT_MIN there does not come through."""
    torch.manual_seed(0)
    rows = torch.tensor([2, 0, 3, 1])
    kv_len = torch.tensor([columns * page_size, 0, 0, max(columns * page_size // 2, 1)])
    table = torch.randint(1, 1000, (4, columns + 5), dtype=torch.int32)
    table[3] = 0
    used = torch.arange(columns + 5) * page_size < torch.zeros(4).long().index_put((rows,), kv_len)[:, None]
    table[~used] = INT_MIN
    got, lengths = gather_table(table, rows, kv_len, columns, page_size, GPU)
    want, want_lengths = gather_table_reference(table, rows, kv_len, columns, page_size)
    assert torch.equal(got, want)
    assert torch.equal(lengths, want_lengths)
    assert int(got.min()) >= 0
    assert lengths.dtype == got.dtype == torch.int32
    for index, row in enumerate(rows.tolist()):
        for column in range(columns):
            inside = column * page_size < int(kv_len[index])
            assert int(got[index, column]) == (int(table[row, column]) if inside else 0)
