"""Compressed attention by position is its arithmetic in order, to the bit, in any tree, chunk, batch and launch; so is
attention to chosen keys, by their ranks.

Tests of the kernels run in the interpreted session. Products are a stand-in's (`support.tensor_core`);
tests/gpu/test_gpu_latent_segments.py has the real ones.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from support.interpreted import INTERPRETED, interpreted
from support.latent_rows import LatentSetting, make_latent_row
from support.scenes import assert_close, dense_answer, scene
from support.segment_rows import SCALE, nodes_alone, same_bits, tree
from support.tensor_core import attention_by_position, tensor_core
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.segments_backend import SegmentsBackend
from treetop.kernels.attention import latent_segments
from treetop.kernels.attention.segment_attention import SegmentLaunch
from treetop.types.ids import FULL

CPU = torch.device("cpu")
SMALL = LatentSetting(block=16, unit=32, launch=SegmentLaunch(16, 3, 1000), prefill=SegmentLaunch(32))
SPARSE = replace(SMALL, top_k=34, page_size=3)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def trees(count, shape=(3, 4, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tree(*shape, generator) for _ in range(count)]


@pytest.fixture(autouse=True)
def _products():
    with tensor_core() if INTERPRETED else nullcontext():
        yield


@interpreted
@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({"n": 3, "t": 9, "page_size": 1, "dim": 26, "latent": 20}, False),
        slow({"n": 1, "t": 1, "heads": 17, "dim": 48, "latent": 32}, False),
        slow({"n": 5, "t": 9, "dim": 22, "latent": 16, "fp8": True}, False),
        ({"n": 9, "dim": 40, "latent": 32, "fp8": True, "dtype": torch.float16}, True),
        slow({"n": 40, "max_kv_len": 90, "dim": 32, "latent": 26, "heads": 3}, True),
    ],
    ids=str,
)
def test_the_backend_equals_dense_attention(options, causal):
    """Poisoned pages, an empty row and a padding row; queries that are the last of a tree's nodes."""
    s = scene(**options, kv_heads=1, causal=causal)
    group = GroupNeed(FULL, s.q.shape[2], 1, s.q.shape[3], latent=options["latent"])
    backend = SegmentsBackend(Need(s.q.dtype, CPU, s.metadata.page_size, (group,)))
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.causal(s.q, s.kv, plan, s.scale) if causal else backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    assert_close(out[s.real], dense_answer(s, not causal)[0][s.real], s)
    assert not out[~s.real].any()


def chosen(setting, row, node, keys):
    """Positions of what a node sees: the best of its indexer's scores, of equal ones the earlier."""
    if setting.top_k is None:
        return range(len(keys))
    heads, weights = row.q[node, :, setting.dim :].float(), row.q[node, :, setting.dim].float()
    of_keys = keys[:, 0, 0, setting.dim :].float()
    scores = ((of_keys @ heads.T).relu() * weights).sum(dim=1)
    return sorted(scores.sort(descending=True, stable=True).indices[: setting.top_k].tolist())


@interpreted
@pytest.mark.parametrize(
    ("setting", "dtype"),
    [(SMALL, torch.float16), (SPARSE, torch.float16), slow(SPARSE, torch.float32), slow(SMALL, torch.float32)],
    ids=["all, float16", "chosen, float16", "chosen, float32", "all, float32"],
)
def test_every_bit_is_that_of_the_sums_in_order(setting, dtype):
    """Trees within a block, across a block's and a segment's end, and before any key. What nobody may see is
    infinite."""
    rows = [make_latent_row(n, p, setting, dtype=dtype) for n, p in zip([0, 30, 63], trees(3), strict=True)]
    got = setting.decode(rows)
    assert got.isfinite().all()
    for i, row in enumerate(rows):
        for node, head in ((0, 0), (6, 3), (4, 1)):
            keys, _ = row.committed(node)
            planes = keys[chosen(setting, row, node, keys), 0, 0, : setting.dim]
            seen = {place: (plane, plane[: setting.rank]) for place, plane in enumerate(planes)}
            want = attention_by_position(row.q[node, head, : setting.dim], seen, SCALE, 16, 32)
            assert same_bits(got[i, node, head], want), (i, node, head)


LARGE = [slow(shape) for shape in ((8, 5, 60), (5, 4, 16), (1, 8, 9))]


@interpreted
@pytest.mark.parametrize("shape", [(3, 3, 6), *LARGE], ids=str)
@pytest.mark.parametrize(
    "setting",
    [SMALL, slow(SPARSE), slow(replace(SMALL, fp8=True)), replace(SPARSE, fp8=True)],
    ids=["all", "chosen", "all in FP8", "chosen in FP8"],
)
def test_a_node_has_the_bits_of_plain_decoding_and_of_a_prefill(shape, setting):
    """Whatever the tree, and whatever stands beside the row; rows of fewer keys than are chosen, and of more."""
    rows = [make_latent_row(n, parent, setting) for n, parent in zip((62, 7), trees(2, shape), strict=True)]
    got = setting.decode(rows)
    last = shape[2] - 1
    for row, out in zip(rows, got, strict=True):
        nodes_alone(setting, row, out, [last // 2, last], chunks=(2,))


@interpreted
@pytest.mark.parametrize("setting", [SMALL, SPARSE], ids=["all", "chosen"])
def test_a_prefill_has_one_result_in_chunks_of_any_size(setting):
    """The end of a long row, alone and beside a short one."""
    keys = make_latent_row(52, [-1], setting, heads=2).kv
    q = make_latent_row(0, [-1] * 12, setting, heads=2, seed=2).q
    whole = setting.prefilled([keys], [q])[0]
    short = setting.prefilled([keys[:3]], [q[:2]])[0]
    for chunk in (5, 8):
        for start in range(0, 12, chunk):
            stop = min(start + chunk, 12)
            got = setting.prefilled([keys[: 40 + stop], keys[:3]], [q[start:stop], q[:2]])
            assert same_bits(got[0], whole[start:stop])
            assert same_bits(got[1], short)


@interpreted
@pytest.mark.parametrize("setting", [SMALL, SPARSE], ids=["all", "chosen"])
@pytest.mark.parametrize("shape", [(2, 1, 2), slow((2, 2, 3)), slow((1, 1, 1))], ids=str)
def test_no_launch_shows(shape, setting):
    """Programs, blocks of queries, and parts that are not kept, in the middle of a row too; another bound; runs."""
    rows = [make_latent_row(n, p, setting) for n, p in zip((67, 0), trees(2, shape), strict=True)]
    want = setting.decode(rows)
    for launch, shares in (
        (SegmentLaunch(16, 1, 4), 4),
        (SegmentLaunch(32, 2, 5), 100),
        (None, 2),
    ):
        again = replace(setting, launch=launch, max_kv_len=100, shares=shares)
        assert same_bits(again.decode(rows), want), (launch, shares)
    keys, q = zip(*(row.committed(shape[2] - 1) for row in rows), strict=True)
    ends = setting.prefilled(keys, q)
    for launch in (SegmentLaunch(16), None):
        again = replace(setting, prefill=launch).prefilled(keys, q)
        assert all(same_bits(a, b) for a, b in zip(again, ends, strict=True))


@interpreted
def test_as_long_as_all_keys_are_chosen_sums_are_those_of_all():
    """So it does not show whether a bound on lengths has the choice left out."""
    row = make_latent_row(61, trees(1)[0], SMALL)
    every = replace(SMALL, top_k=100)
    assert same_bits(every.decode([row])[0], SMALL.decode([row])[0])
    keys, q = row.committed(6)
    assert same_bits(every.prefilled([keys], [q])[0], SMALL.prefilled([keys], [q])[0])


@interpreted
@pytest.mark.slow
def test_planes_of_published_widths():
    """The blocks and segments of an engine, past a segment's end; more heads than a program takes."""
    setting = LatentSetting(rank=512, dim=576, index=128, page_size=64)
    row = make_latent_row(509, trees(1, (2, 6, 8))[0], setting, heads=20)
    nodes_alone(setting, row, setting.decode([row])[0], [7], chunks=(2,))


def by_column(metadata, keys):
    """A mutant: what was chosen of a path stands at its column, not at its rank."""
    own = query_rows(metadata, keys)
    if own.mask is None:
        return own
    at = torch.arange(own.mask.shape[2])
    return replace(own, tail_positions=own.kv_len[:, None] + at, positions=own.kv_len[:, None] + len(at) - 1)


query_rows = latent_segments.query_rows


@interpreted
def test_a_path_by_columns_is_noticed(monkeypatch):
    setting = replace(SPARSE, top_k=32)  # the last rank is the last of a segment
    row = make_latent_row(62, trees(1, (3, 4, 7))[0], setting)
    want = setting.decode([row])[0]
    monkeypatch.setattr(latent_segments, "query_rows", by_column)
    got = setting.decode([row])[0]
    assert same_bits(got[0], want[0])  # the root stands at both
    assert not same_bits(got, want)
