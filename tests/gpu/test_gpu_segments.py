"""Attention by position on a GPU: the same bits in every batch, tree, chunk, launch and graph, in each dtype.

python -m pytest tests/gpu/test_gpu_segments.py -q -m "not slow"
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from support.segment_rows import SCALE, Setting, as_plain_and_prefilled, make_row, same_bits, tree
from treetop.kernels.attention.attention import paged_attention_reference
from treetop.kernels.attention.segment_attention import SegmentLaunch, segment_attention
from treetop.kernels.attention.segments import plan_segments
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]
HEADS = {"heads": 8, "kv_heads": 2, "dim": 128}
WHETHER_FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
"""Of K/V."""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def parents(shape, seed=0):
    return tree(*shape, torch.Generator().manual_seed(seed))


def cancelling(kv, tail, q):
    """Values of widely different size that cancel, some of which vanish beside others; scores that spread."""
    kv[::3, 1] *= 3000
    kv[1::5, 1] *= 1e-5
    tail[::2, 1] *= -3000
    q *= 3


def tiny(kv, tail, q):
    """Values below the least normal number of float16, and queries of zeros of either sign in some heads."""
    kv[:, 1] *= 1e-7
    tail[:, 1] *= 1e-7
    q[:, 0], q[:, 1] = 0.0, -0.0


def ties(kv, tail, q):
    kv[:, 0], tail[:, 0] = 0.5, 0.5


@WHETHER_FP8
def test_it_is_attention(fp8):
    """Against dense attention in float32."""
    setting = Setting(device=GPU, fp8=fp8)
    sizes = {"dtype": torch.bfloat16, "fp8": fp8, **HEADS}
    rows = [make_row(length, parents((5, 4, 16), length), **sizes) for length in (0, 700, 5000)]
    metadata, kv, tail = setting.metadata_of(rows)
    q = torch.stack([row.q for row in rows]).to(GPU)
    pages, columns, scales = setting.stored(kv.data), setting.stored(tail.data), setting.scales(kv.data)
    want = paged_attention_reference(q.float(), pages, metadata, columns, SCALE, scales=scales)[0]
    got = setting.decode(rows).to(GPU)
    assert float((got - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize(
    ("length", "change", "dtype"),
    [
        (1023, cancelling, torch.bfloat16),
        (45, tiny, torch.bfloat16),
        (3333, None, torch.bfloat16),
        (510, cancelling, torch.float16),
        (0, tiny, torch.float16),
        (1023, ties, torch.float16),
        (510, cancelling, torch.float32),
        *(slow(*each) for each in product((0, 45, 510, 1023, 3333), (None, cancelling, tiny, ties), DTYPES)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("fp8", [False, slow(True)], ids=["16 bits", "FP8"])
def test_a_node_has_the_bits_of_plain_decoding_and_of_a_prefill(fp8, dtype, change, length):
    """Trees within a block, across its end and a segment's."""
    setting = Setting(device=GPU, fp8=fp8)
    row = make_row(length, parents((5, 4, 16), length), dtype=dtype, change=change, fp8=fp8, **HEADS)
    as_plain_and_prefilled(setting, row, setting.decode([row])[0], [0, 1, 7, 12, 15])


@pytest.mark.parametrize(
    ("lengths", "change", "dtype", "shape", "options"),
    [
        ((1023, 45, 0), cancelling, torch.bfloat16, (5, 4, 16), {}),
        ((1023, 45, 3333), tiny, torch.float16, (5, 4, 16), {"page_size": 1}),
        ((1023, 45, 3333), None, torch.bfloat16, (8, 5, 60), {"window": 333, "page_size": 64}),
        ((1020, 17, 510), cancelling, torch.float16, (1, 6, 7), {"window": 333, "chunked": True}),
        ((510,), None, torch.float32, (5, 4, 16), {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_codes_have_the_bits_of_plain_decoding_and_of_a_prefill(lengths, change, dtype, shape, options):
    """K/V in FP8, with sinks; a row's last block is in the middle of a step, at its ends and empty."""
    setting = Setting(device=GPU, sinks=torch.linspace(-1, 3, 8), fp8=True, **options)
    sizes = {"dtype": dtype, "change": change, "fp8": True, **HEADS}
    rows = [make_row(length, parents(shape, length), **sizes) for length in lengths]
    last = shape[2] - 1
    for row, got in zip(rows, setting.decode(rows), strict=True):
        as_plain_and_prefilled(setting, row, got, sorted({0, 1, last // 2, last}))


OPTIONS = [{}, {"window": 333, "page_size": 1}, {"page_size": 64}]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 5, 60), OPTIONS[1]),
        ((5, 4, 16), OPTIONS[0]),
        ((1, 5, 6), OPTIONS[1]),
        ((1, 63, 64), OPTIONS[2]),
        ((5, 4, 16), {"window": 333, "chunked": True}),
        *(
            slow(*each)
            for each in product(((8, 5, 60), (5, 4, 16), (1, 5, 6), (1, 63, 64), (6, 1, 7), (2, 30, 31)), OPTIONS)
        ),
    ],
    ids=str,
)
def test_trees_of_every_kind(shape, options):
    setting = Setting(device=GPU, sinks=torch.linspace(-1, 3, 8), **options)
    rows = [make_row(length, parents(shape, length), dtype=torch.bfloat16, **HEADS) for length in (1020, 17, 2000)]
    last = shape[2] - 1
    for row, got in zip(rows, setting.decode(rows), strict=True):
        as_plain_and_prefilled(setting, row, got, sorted({0, last // 2, last}))


@pytest.mark.parametrize(
    ("group", "dim", "dtype", "fp8"),
    [
        *[(group, dim, torch.bfloat16, False) for group, dim in ((1, 64), (3, 96), (8, 256), (4, 512))],
        (7, 128, torch.float16, False),
        (3, 80, torch.float32, False),
        *[(group, dim, torch.bfloat16, True) for group, dim in ((8, 64), (3, 96), (8, 256), (4, 512))],
        *[slow(group, dim, torch.bfloat16, False) for group, dim in ((2, 80), (5, 64), (6, 128))],
        *[slow(group, dim, torch.float16, False) for group, dim in ((4, 64), (1, 256))],
        *[slow(group, dim, torch.float32, False) for group, dim in ((8, 64), (1, 256))],
        *[slow(group, dim, torch.float16, True) for group, dim in ((7, 128), (2, 80), (1, 256))],
    ],
    ids=str,
)
def test_heads_of_every_kind(group, dim, dtype, fp8):
    setting = Setting(device=GPU, fp8=fp8)
    sizes = {"heads": 2 * group, "kv_heads": 2, "dim": dim, "dtype": dtype, "fp8": fp8}
    row = make_row(1500, parents((3, 4, 9)), **sizes)
    as_plain_and_prefilled(setting, row, setting.decode([row])[0], [8, 3], chunks=(4,))


@WHETHER_FP8
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=str)
def test_a_prefill_has_one_result_in_chunks_of_any_size(dtype, fp8):
    """Beside another row, from the first token on."""
    setting = Setting(device=GPU, fp8=fp8)
    count = 700
    keys = make_row(count, [-1], dtype=dtype, fp8=fp8, **HEADS).kv
    q = make_row(0, [-1] * count, dtype=dtype, seed=2, **HEADS).q
    whole = setting.prefilled([keys], [q])[0]
    for chunk in (7, 64, 130, 512):
        parts = [
            setting.prefilled([keys[: start + chunk], keys[:9]], [q[start : start + chunk], q[:9]])
            for start in range(0, count, chunk)
        ]
        assert same_bits(torch.cat([part[0] for part in parts]), whole), chunk
        assert all(same_bits(part[1], whole[:9]) for part in parts), chunk


LAUNCHES = [
    SegmentLaunch(16, 40, 7, 1, 4),
    SegmentLaunch(16, 1, 100, 4, 2),
    SegmentLaunch(32, 9, 5, 2, 3),
    SegmentLaunch(64, 3, 1, 4, 3, join_warps=8),
    SegmentLaunch(128, 3, 6, 8, 2, join_warps=8, column_shares=2),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "fp8"),
    [
        ((1, 1, 1), torch.bfloat16, False),
        ((5, 4, 16), torch.bfloat16, False),
        ((5, 4, 16), torch.bfloat16, True),
        slow((1, 1, 1), torch.bfloat16, True),
        *(slow(*each) for each in product(((1, 1, 1), (5, 4, 16), (8, 5, 60)), HALF, (False,))),
    ],
    ids=str,
)
def test_no_launch_shows(dtype, shape, fp8):
    """Blocks of queries, programs, parts that are not kept, warps and stages, runs."""
    setting = Setting(device=GPU, fp8=fp8)
    sizes = {"dtype": dtype, "fp8": fp8, **HEADS}
    rows = [make_row(length, parents(shape, length), **sizes) for length in (2500, 0, 640, 1029)]
    want = setting.decode(rows)
    for launch in LAUNCHES:
        for shares in (1, 5, 1000):
            assert same_bits(replace(setting, launch=launch, shares=shares).decode(rows), want), (launch, shares)


@WHETHER_FP8
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_no_launch_of_a_prefill_shows(dtype, fp8):
    setting = Setting(device=GPU, fp8=fp8)
    keys, q = make_row(1300, [-1], dtype=dtype, fp8=fp8, **HEADS).kv, make_row(0, [-1] * 300, dtype=dtype, **HEADS).q
    want = setting.prefilled([keys], [q])[0]
    for block_m, warps, stages in (
        (16, 2, 2),
        (16, 4, 3),
        (32, 1, 1),
        (64, 4, 3),
        (64, 8, 2),
        (128, 4, 2),
        (128, 8, 3),
    ):
        launch = SegmentLaunch(block_m, warps=warps, stages=stages)
        assert same_bits(replace(setting, prefill=launch).prefilled([keys], [q])[0], want), launch


@WHETHER_FP8
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 4, 16)], ids=str)
def test_batches_of_1_to_128(shape, fp8):
    """A row has its bits at every place of every batch."""
    setting = Setting(device=GPU, fp8=fp8)
    lengths = [(i * 977) % 1400 for i in range(128)]
    rows = [make_row(n, parents(shape, n), dtype=torch.bfloat16, fp8=fp8, **HEADS) for n in lengths]
    whole = setting.decode(rows)
    for batch in (1, 2, 3, 8, 17, 32, 64, 127):
        got = setting.decode(rows[-batch:])
        assert same_bits(got, whole[-batch:]), batch


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 4, 16)], ids=str)
def test_a_captured_phase_follows_its_buffers(shape):
    """Captured on one batch, replayed on others: the plan is made in the graph; the bound is the context limit."""
    setting, gpu = Setting(device=GPU, max_kv_len=9000), gpu_traits(GPU)
    batches = [
        [make_row(n, parents(shape, n), dtype=torch.bfloat16, **HEADS) for n in lengths]
        for lengths in ((5, 0, 1), (900, 3000, 65), (8001, 2, 511))
    ]
    made = [setting.metadata_of(batch) for batch in batches]
    slots = max(len(kv.data) for _, kv, _ in made)
    columns = max(metadata.table.data.shape[1] for metadata, _, _ in made)

    def tensors(index):
        metadata, kv, tail = made[index]
        pages = torch.nn.functional.pad(kv.data, (0, 0, 0, 0, 0, 0, 0, slots - len(kv.data)))
        table = torch.nn.functional.pad(metadata.table.data, (0, columns - metadata.table.data.shape[1]))
        q = torch.stack([row.q for row in batches[index]]).to(GPU)
        return [table, metadata.kv_len, metadata.positions, metadata.mask, pages, tail.data, q]

    static = [each.clone() for each in tensors(0)]
    table, kv_len, positions, mask, pages, tail, q = static
    metadata = replace(
        made[0][0], table=replace(made[0][0].table, data=table), kv_len=kv_len, positions=positions,
        tail_positions=positions, mask=mask,
    )  # fmt: skip

    def phase():
        plan = plan_segments(metadata, 33, 64, gpu)
        return [segment_attention(q, pages, plan, tail, SCALE, None, gpu) for _ in range(2)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        phase()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = phase()
    for index in (1, 2, 0, 1):
        for target, value in zip(static, tensors(index), strict=True):
            target.copy_(value)
        graph.replay()
        want = setting.decode(batches[index])
        for out in outs:
            assert same_bits(out.cpu(), want), index
