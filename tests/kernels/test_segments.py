"""Attention by position is its arithmetic in order, to the bit, whatever the batch, the tree, the chunk and the launch.

Tests of the kernels run in the interpreted session. Products are a stand-in's (`support.tensor_core`);
tests/gpu/test_gpu_segments.py has the real ones.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from support.examples import EVERYTHING
from support.grids import few_of
from support.interpreted import INTERPRETED, interpreted
from support.scenes import assert_close, dense_answer, scene
from support.segment_rows import SCALE, Row, Setting, make_row, nodes_alone, same_bits, tree
from support.tensor_core import attention_by_position, by_pairs, starts_of_segments, tensor_core
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import refusal
from treetop.attention.segments_backend import SegmentsBackend
from treetop.kernels.attention import segments
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.segment_attention import (
    SegmentLaunch,
    choose_segment_launch,
    launch_for_codes,
    segment_attention,
)
from treetop.kernels.attention.segment_prefill import choose_prefill_launch
from treetop.kernels.attention.segments import SegmentPlan, block_of, plan_reference, plan_segments, segments_before
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.types.ids import FULL, draft_group

CPU = torch.device("cpu")
SMALL = Setting(block=16, unit=32, launch=SegmentLaunch(16, 3, 1000), prefill=SegmentLaunch(32))
CODED = replace(SMALL, fp8=True)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def trees(count, shape=(5, 4, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tree(*shape, generator) for _ in range(count)]


def ties(kv, tail, q):
    """All scores of a query are equal."""
    kv[:, 0], tail[:, 0] = 0.5, 0.5


def zeros(kv, tail, q):
    """Queries and values of zeros, of either sign."""
    q[:, ::2], q[:, 1::2] = 0.0, -0.0
    kv[::2, 1], kv[1::2, 1], tail[:, 1] = -0.0, 0.0, -0.0


def huge_and_tiny(kv, tail, q):
    """Values near the largest float16 and below the least normal one, that cancel or vanish beside others."""
    kv[::3, 1] *= 9e3
    kv[1::3, 1] *= 1e-6
    tail[::2, 1] *= -9e3
    q *= 20.0  # most weights are 0, some below the least normal number


def need_of(s):
    """What an engine with the layers of a scene asks of its backend."""
    group = GroupNeed(s.metadata.table.group, s.q.shape[2], s.kv.data.shape[2], s.q.shape[3], s.metadata.window)
    return Need(s.q.dtype, CPU, s.metadata.page_size, (group,))


def test_the_segments_of_positions():
    """The host's count, the numpy list, and that each segment begins and ends with a block."""
    for unit in (16, 512):
        for end in (0, 1, *(units * unit + more for units in (1, 16, 17, 64, 66, 256, 260, 400) for more in (0, 1))):
            assert segments_before(end, unit) == len(starts_of_segments(end, unit)) - 1
    assert all(segments.UNIT % block_of(dim, size) == 0 for dim in (64, 128, 256, 512) for size in (2, 4))


@pytest.fixture(autouse=True)
def _products():
    with tensor_core() if INTERPRETED else nullcontext():
        yield


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    "options",
    few_of(
        [
            {"n": 2, "t": 3},
            {"n": 1, "t": 1},
            {"n": 4, "t": 4, "window": 17, "dtype": torch.float16, "dim": 24},
            {"n": 4, "t": 4, "dim": 24, "fp8": True},
        ],
        *(0, 2, 3),
    ),
    ids=str,
)
def test_the_backend_equals_dense_attention(options):
    """Poisoned pages, an empty row and a padding row; queries that are the last of a tree's nodes; sinks."""
    s = scene(**options)
    backend = SegmentsBackend(need_of(s))
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    for sinks in (None, torch.randn(s.q.shape[2])):
        out = backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale, sinks)
        assert_close(out, dense_answer(s, True, sinks)[0], s)


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"n": 9, "page_size": 1},
        {"n": 40, "max_kv_len": 90, "window": 11, "dtype": torch.float16},
        {"n": 9, "window": 11, "dtype": torch.float16, "fp8": True},
    ],
    ids=str,
)
def test_a_prefill_equals_dense_attention(options):
    s = scene(**options, causal=True)
    backend = SegmentsBackend(need_of(s))
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    for sinks in (None, torch.randn(s.q.shape[2])):
        out = backend.causal(s.q, s.kv, plan, s.scale, sinks)
        assert_close(out[s.real], dense_answer(s, False, sinks)[0][s.real], s)
        assert not out[~s.real].any()


@interpreted
@pytest.mark.pairwise
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (40, False), (40, True)])
@pytest.mark.parametrize("shares", [1, 7, 1000])
@pytest.mark.parametrize(("n", "lengths"), [(1, [0, 31, 32, 600]), (16, [0, 47, 48, 130]), (5, [1100, 3])])
def test_the_plan_is_its_reference(n, lengths, shares, window, chunked):
    rows = [make_row(length, parent) for length, parent in zip(lengths, trees(4, (3, 4, n)), strict=False)]
    metadata = replace(SMALL, window=window, chunked=chunked).metadata_of(rows)[0]
    got, want = plan_segments(metadata, shares, 16, gpu_traits(CPU), 16), plan_reference(metadata, shares, 16, 16)
    for name in ("first", "offsets", "path"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    used = int(want.offsets[-1])
    assert got.items.shape == want.items.shape
    assert torch.equal(got.items[:used], want.items[:used])
    assert got.alone == (n == 1)


def loads_of(plan, programs, length, alone):
    """Keys that each of so many programs folds that take items in their order, whoever has fewest the next one."""
    rows, offsets, loads = len(plan.first), plan.offsets.tolist(), [0] * programs
    starts = [min(start, length + alone) for start in starts_of_segments(length + alone, plan.unit)]
    for place in range(offsets[-1]):
        row = int(plan.items[place])
        segments = len(starts) - 1
        run = segments - (offsets[row + 1] - offsets[row])
        first, last = (0, run) if place < rows else (run + place - offsets[row], run + place - offsets[row] + 1)
        loads[loads.index(min(loads))] += starts[last] - starts[first]
    return loads


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize(
    ("rows", "length", "programs", "most"),
    [(32, 32768, 33, 1.05), (32, 8192, 33, 1.05), (8, 32768, 33, 1.15), (32, 32768, 66, 1.15), (64, 32768, 66, 1.05)],
)
def test_programs_fold_about_equally_many_keys(n, rows, length, programs, most):
    """Over the mean. Every third of 33 programs had three times the mean while each took every 33rd item of 96."""
    metadata = SMALL.metadata_of([make_row(1, [-1] * n, heads=1, kv_heads=1)] * rows)[0]
    metadata = replace(metadata, kv_len=torch.full((rows,), length), max_kv_len=length)
    metadata = replace(metadata, tail_positions=metadata.tail_positions - 1 + length)
    loads = loads_of(plan_reference(metadata, programs, 64), programs, length, n == 1)
    assert sum(loads) == rows * (length + (n == 1))
    assert max(loads) <= most * sum(loads) / programs


def test_rows_that_see_as_many_keys_of_a_window_are_an_item_each():
    """Wherever the window lies in its segments, of 1 to 4 units here."""
    rows = 32
    metadata = replace(SMALL, window=128).metadata_of([make_row(1, [-1], heads=1, kv_heads=1)] * rows)[0]
    kv_len = 3000 + 97 * torch.arange(rows)
    metadata = replace(metadata, kv_len=kv_len, max_kv_len=8192, tail_positions=kv_len[:, None])
    assert int(plan_reference(metadata, 33, 64).offsets[-1]) == rows


@interpreted
def test_any_number_of_programs_has_the_same_bits_in_every_layer_of_a_plan():
    """And each layer's launch leaves the queues as the next one needs them. The interpreter runs programs one after
    another, so the first takes all that none has of its own; tests/gpu/test_gpu_segments.py has them side by side."""
    rows = [make_row(length, [-1, 0], heads=4, kv_heads=2) for length in (300, 40, 0)]
    metadata, kv, tail = SMALL.metadata_of(rows)
    q = torch.stack([row.q for row in rows])
    gpu = gpu_traits(CPU)
    outs = []
    for launch in (SegmentLaunch(16, 1, 1000), SegmentLaunch(16, 2, 1000), SegmentLaunch(16, 7, 1000)):
        plan = plan_segments(metadata, 7, 16, gpu, 32)
        for _ in range(2):
            outs.append(segment_attention(q, kv.data, plan, tail.data, SCALE, None, gpu, launch))
            assert not plan.queues.any()
    assert all(same_bits(out, outs[0]) for out in outs)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "change", "window", "chunked", "with_sinks", "fp8"),
    [
        (torch.float16, None, 32, True, False, False),
        (torch.float16, huge_and_tiny, None, False, False, False),
        (torch.float32, zeros, 19, False, True, False),
        (torch.float16, huge_and_tiny, 19, False, True, True),
        slow(torch.float16, None, None, False, False, True),
        slow(torch.float32, zeros, 32, True, True, True),
        slow(torch.float16, None, 19, False, False, False),
        slow(torch.float16, ties, None, False, True, False),
        slow(torch.float16, zeros, 19, False, True, False),
        slow(torch.float32, None, 32, True, False, False),
        slow(torch.float32, ties, None, False, True, False),
        slow(torch.float32, huge_and_tiny, None, False, False, False),
    ],
)
def test_every_bit_is_that_of_the_sums_in_order(*, dtype, change, window, chunked, with_sinks, fp8):
    """Trees within a block, across a block's and a segment's end, and before any key. What nobody may see is
    infinite, of codes NaN."""
    lengths = [0, 30, 95]
    sinks = torch.linspace(-2, 30, 4) if with_sinks else None
    sizes = {"dtype": dtype, "change": change, "fp8": fp8}
    rows = [make_row(n, p, **sizes) for n, p in zip(lengths, trees(3, (3, 4, 7)), strict=True)]
    setting = replace(SMALL, window=window, chunked=chunked, sinks=sinks, fp8=fp8)
    scales, got = setting.scales(rows[0].kv), setting.decode(rows)
    assert got.isfinite().all()
    for i, row in enumerate(rows):
        for node, head in ((0, 0), (6, 3), (4, 1)):
            sink = None if sinks is None else float(sinks[head])
            seen = row.seen(node, head // 2, window, chunked)
            factors = None if scales is None else scales[:, head // 2].tolist()
            want = attention_by_position(row.q[node, head], seen, SCALE, 16, 32, sink, factors)
            assert same_bits(got[i, node, head], want), (i, node, head)


@interpreted
def test_codes_of_heads_wider_than_256_have_the_same_bits():
    """Before Hopper their queries are loaded again for each block that a row's end or paths lie in."""
    row = make_row(45, trees(1, (2, 2, 3))[0], heads=2, kv_heads=1, dim=272, fp8=True)
    got, factors = CODED.decode([row])[0], CODED.scales(row.kv)[:, 0].tolist()
    for node, head in ((0, 0), (2, 1)):
        want = attention_by_position(row.q[node, head], row.seen(node, 0), SCALE, 16, 32, None, factors)
        assert same_bits(got[node, head], want), (node, head)


LARGE = [slow(shape) for shape in ((8, 5, 60), (5, 4, 16), (1, 8, 9), (2, 30, 31))]


@interpreted
@pytest.mark.parametrize("shape", [(3, 3, 6), *LARGE], ids=str)
@pytest.mark.parametrize(
    "setting",
    [slow({}), {"window": 21, "page_size": 3}, slow({"window": 32, "chunked": True}), {"fp8": True, "page_size": 3}],
    ids=str,
)
def test_a_node_has_the_bits_of_plain_decoding_and_of_a_prefill(shape, setting):
    """Whatever the tree, and whatever stands beside the row."""
    setting = replace(SMALL, sinks=torch.linspace(-1, 3, 4), **setting)
    rows = [make_row(n, parent, fp8=setting.fp8) for n, parent in zip((94, 7), trees(2, shape), strict=True)]
    got = setting.decode(rows)
    alone = setting.decode(rows[:1])
    assert same_bits(alone[0], got[0])
    last = shape[2] - 1
    for row, out in zip(rows, got, strict=True):
        nodes_alone(setting, row, out, sorted({0, last // 2, last}), chunks=(1, 3))


@interpreted
@pytest.mark.parametrize("shares", [1, 1000])
def test_a_node_so_deep_that_its_window_begins_segments_behind_the_roots_has_its_bits(shares):
    """Its block of queries begins in the middle of the row's run, whose first segments none of them sees."""
    setting = replace(SMALL, window=150, shares=shares)
    row = make_row(240, [node - 1 for node in range(40)], heads=2, kv_heads=1)
    got = setting.decode([row])[0]
    for node in (0, 15, 24, 33, 39):
        want = attention_by_position(row.q[node, 0], row.seen(node, 0, 150), SCALE, 16, 32, None, None)
        assert same_bits(got[node, 0], want), node


@interpreted
@pytest.mark.parametrize("setting", [SMALL, CODED], ids=["16 bits", "FP8"])
def test_a_prefill_has_one_result_in_chunks_of_any_size(setting):
    """Of a long row beside a short one, from the first token on."""
    keys = make_row(75, [-1], heads=1, kv_heads=1, fp8=setting.fp8).kv
    q = make_row(0, [-1] * 75, heads=1, kv_heads=1, seed=2).q
    whole = setting.prefilled([keys], [q])[0]
    for chunk in (7, 16, 33):
        parts = [
            setting.prefilled([keys[: start + chunk], keys[:9]], [q[start : start + chunk], q[:9]])
            for start in range(0, 75, chunk)
        ]
        assert same_bits(torch.cat([part[0] for part in parts]), whole)
        assert all(same_bits(part[1], whole[:9]) for part in parts)


LAUNCHES = [
    SegmentLaunch(16, 1, 1),
    SegmentLaunch(16, 7, 4),
    SegmentLaunch(32, 2, 5, column_shares=2),
    SegmentLaunch(64, 40, 6),
]


@interpreted
@pytest.mark.parametrize(
    ("shape", "setting"),
    [((2, 2, 3), SMALL), slow((2, 2, 3), CODED), *(slow(each, SMALL) for each in ((1, 1, 1), (5, 4, 16)))],
    ids=lambda value: str(value) if isinstance(value, tuple) else "FP8" if value.fp8 else "16 bits",
)
def test_no_launch_shows(shape, setting):
    """Programs, blocks of queries, and parts that are not kept, in the middle of a row too; another bound; runs of
    one segment, of a few, and of whole rows; columns of values divided among programs."""
    rows = [make_row(n, parent, fp8=setting.fp8) for n, parent in zip((100, 0, 140), trees(3, shape), strict=True)]
    want = setting.decode(rows)
    for launch in LAUNCHES:
        for shares in (1, 4, 100) if EVERYTHING else (4,):
            again = replace(setting, launch=launch, max_kv_len=500, shares=shares)
            assert same_bits(again.decode(rows), want), (launch, shares)
    keys, q = zip(*(row.committed(shape[2] - 1) for row in rows), strict=True)
    ends = setting.prefilled(keys, q)
    for block_m in (16, 64):
        again = replace(setting, prefill=SegmentLaunch(block_m)).prefilled(keys, q)
        assert all(same_bits(a, b) for a, b in zip(again, ends, strict=True))


OTHER_GPUS = [
    GpuTraits(128, False, 99 << 10, True),  # RTX 4090
    GpuTraits(148, True, 227 << 10, True, True),  # B200
    GpuTraits(170, True, 99 << 10, True),  # RTX 5090
]


@pytest.mark.parametrize("gpu", OTHER_GPUS, ids=lambda gpu: str(gpu.num_sms))
@pytest.mark.parametrize(("dim", "size"), [(64, 2), (128, 2), (128, 4), (256, 2), (512, 2)])
def test_where_registers_lack_a_thread_has_few_sums(dim, size, gpu):
    """Of a segment and of all before it 32 each at most, or the fewest queries that are a product; decoding and in
    prefills."""
    call = CallShape(8, 16, 8, 8, dim, size, 8192)
    for launch in (choose_segment_launch(call, 500, 10**6, gpu), choose_prefill_launch(call, gpu)):
        assert launch.block_m == 16 or launch.block_m * dim <= 32 * 32 * launch.warps
        coded = launch_for_codes(launch, call, gpu)
        assert coded.block_m == 16 or coded.block_m * dim <= 16 * 32 * coded.warps


@pytest.mark.parametrize(
    ("dim", "n", "warps"), [(64, 16, (4, 4)), (128, 8, (4, 4)), (128, 16, (8, 4)), (256, 16, (8, 4))]
)
def test_many_sums_are_of_more_warps_before_hopper(dim, n, warps):
    """Of an A100, and as before of an H200, which has the operands of products outside registers."""
    call = CallShape(8, n, 8, 4, dim, 2, 8192)
    gpus = GpuTraits(108, False, 163 << 10, True), GpuTraits(132, True, 227 << 10, True)
    assert tuple(choose_segment_launch(call, 500, 10**6, gpu).warps for gpu in gpus) == warps


@interpreted
@pytest.mark.parametrize(
    ("group", "dim"), [(3, 96), (7, 64), *(slow(*each) for each in ((1, 64), (2, 80), (5, 128), (8, 256)))]
)
def test_heads_of_every_kind(group, dim):
    """The blocks and segments of an engine, past a segment's end; pages of one, and larger than a block."""
    row = make_row(507, trees(1, (2, 6, 8))[0], heads=group, kv_heads=1, dim=dim)
    setting = Setting(page_size=(1, 128)[group % 2])
    nodes_alone(setting, row, setting.decode([row])[0], [7], chunks=(2,))


@interpreted
@pytest.mark.slow
def test_segments_of_more_than_one_unit():
    """Of two, four and eight: a row long enough for these, of short units."""
    setting = replace(SMALL, unit=16)
    row = make_row(4230, trees(1, (2, 6, 4))[0], heads=1, kv_heads=1)
    got = setting.decode([row])[0]
    nodes_alone(setting, row, got, [3], chunks=(1,))
    want = attention_by_position(row.q[3, 0], row.seen(3, 0), SCALE, 16, 16)
    assert same_bits(got[3, 0], want)


@interpreted
def test_the_order_of_columns_does_not_show():
    row = make_row(93, trees(1, (2, 4, 7))[0])
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    assert same_bits(SMALL.decode([row.turned(order)])[0], SMALL.decode([row])[0][order])


@interpreted
def test_what_a_node_has_does_not_show_in_those_beside_it():
    """Values that are infinite, of a node that others do not follow."""
    row = make_row(93, [-1, 0, 0, 1, 2])
    tail = row.tail.clone()
    tail[2, 1] = float("inf")
    want, got = SMALL.decode([row])[0], SMALL.decode([replace(row, tail=tail)])[0]
    assert same_bits(got[[0, 1, 3]], want[[0, 1, 3]])
    assert not same_bits(got[2], want[2])


@interpreted
@pytest.mark.parametrize("length", [17, 60, 64])
def test_products_may_take_codes_of_two_steps_by_pairs(length):
    """As on cards before Hopper, of each 32 the first two of every four before the others: what all queries share ends
    with such a run, so bits are those of plain decoding and of prefills."""
    setting = Setting(block=32, unit=64, launch=SegmentLaunch(16, 3, 1000), prefill=SegmentLaunch(32), fp8=True)
    row = make_row(length, trees(1, (2, 6, 8))[0], heads=1, kv_heads=1, dtype=torch.float32, fp8=True)
    with tensor_core(by_pairs):
        nodes_alone(setting, row, setting.decode([row])[0], [3, 7], chunks=(2,))


@interpreted
@pytest.mark.parametrize("latent", [None, 20])
def test_fp8_is_read_of_plain_and_of_compressed_attention(latent):
    """A draft's too, which has Triton's kernels."""
    groups = GroupNeed(FULL, 8, 1, 28, latent=latent), GroupNeed(draft_group(0), 8, 8, 64)
    assert refusal("segments", Need(torch.bfloat16, CPU, 64, groups, exact=True, fp8_kv=True)) is None


# ------------------------------------------------------------------------------------------------- mutants


def by_length(metadata, shares, block, gpu, unit):
    """A mutant: segments are shares of the longest row."""
    return plan_segments(metadata, shares, block, gpu, max(16, metadata.max_kv_len // 64 * 16))


def in_column_order(metadata, shares, block, gpu, unit):
    """A mutant: a query's columns stand in the order that they have in the tail."""
    plan = plan_segments(metadata, shares, block, gpu, unit)
    path = torch.where(plan.path < 0, 10**6, plan.path).sort(dim=2).values
    return replace(plan, path=torch.where(path == 10**6, -1, path).to(torch.int32))


@interpreted
def test_a_share_by_length_is_noticed():
    rows: list[Row] = [make_row(length, parent) for length, parent in zip((100, 260), trees(2, (2, 2, 3)), strict=True)]
    setting = replace(SMALL, plan=by_length)
    assert same_bits(SMALL.decode(rows)[0], SMALL.decode(rows[:1])[0])
    assert not same_bits(setting.decode(rows)[0], setting.decode(rows[:1])[0])


@interpreted
def test_a_tail_in_column_order_is_noticed():
    """Whose columns come before their parents'. Values of a prefill tell, as nodes after their parents do not."""
    row = make_row(93, trees(1, (2, 6, 8))[0])
    order = list(range(7, -1, -1))
    setting = replace(SMALL, plan=in_column_order)
    assert same_bits(setting.decode([row])[0], SMALL.decode([row])[0])
    assert not same_bits(setting.decode([row.turned(order)])[0], SMALL.decode([row])[0][order])
    assert isinstance(setting.plan(setting.metadata_of([row])[0], 3, 16, gpu_traits(CPU), 32), SegmentPlan)
