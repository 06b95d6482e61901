"""Rows of unequal length on a GPU: their programs meet through memory, captured, whatever lengths a replay has.

python -m pytest tests/gpu/test_gpu_stream_k.py -q
"""

from dataclasses import replace

import pytest
import torch

from treetop.attention.contract import TailKV
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention import paged_attention_reference
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, PageTable
from treetop.kernels.tree.tree import ancestor_mask
from treetop.types.ids import FULL
from treetop.types.phase import Phase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
PAGE, BOUND, RANK = 16, 32768, 512
BATCHES = [
    lambda rows: [1024] * rows,
    lambda rows: [8192] + [1024] * (rows - 1),
    lambda rows: [1] * (rows // 2) + [32768] + [700] * (rows - rows // 2 - 1),
    lambda rows: [0] * rows,
    lambda rows: [20000, 0, 31000] + [300] * (rows - 3),
    lambda rows: torch.randint(0, 4000, (rows,)).tolist(),
    lambda rows: [0] * (rows - 1) + [32767],
]


def call(rows, n, *, kv_heads=8, group=4, dim=128, planes=2, window=None, dtype=torch.bfloat16):
    """Queries of trees over pages that rows share, which changes nothing, and the tail."""
    torch.manual_seed(rows + n)
    with DEVICE:
        pages = torch.randn(4097 * PAGE, planes, kv_heads, dim, dtype=dtype)
        table = torch.randint(1, 4097, (rows, BOUND // PAGE), dtype=torch.int32)
        tail = torch.randn(rows, n, planes, kv_heads, dim, dtype=dtype)
        tree = ancestor_mask((torch.rand(rows, n) * torch.arange(n)).long(), n)
        spots = torch.zeros((rows, n), dtype=torch.int64)
        q = torch.randn(rows, n, kv_heads * group, dim, dtype=dtype)
        kv_len = torch.zeros(rows, dtype=torch.int64)
        metadata = AttentionMetadata(
            Phase.VERIFY, PageTable(FULL, table), torch.arange(rows), kv_len, BOUND, PAGE, spots, window, spots, tree
        )
    return q, pages, metadata, tail


def expected(q, pages, metadata, tail, rank):
    """Dense attention in float32, a row at a time."""
    outs = []
    for i in range(len(q)):
        one = slice(i, i + 1)
        mine = replace(
            metadata,
            rows=metadata.rows[one],
            kv_len=metadata.kv_len[one],
            positions=metadata.positions[one],
            tail_positions=metadata.tail_positions[one],
            mask=metadata.mask[one],
        )
        if rank is None:
            outs.append(paged_attention_reference(q[one].float(), pages, mine, tail[one], 0.1)[0])
        else:
            outs.append(latent_attention_reference(q[one].float(), pages, mine, tail[one], rank, 0.1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("rows", "n", "options"),
    [
        (32, 1, {}),
        (32, 16, {}),
        (8, 16, {}),
        (5, 1, {}),
        (32, 64, {"kv_heads": 2}),
        (16, 4, {"window": 3000}),
        (8, 4, {"kv_heads": 2, "dtype": torch.float32}),
        (32, 4, {"kv_heads": 1, "group": 16, "dim": 576, "planes": 1}),
    ],
    ids=str,
)
def test_a_captured_call_serves_every_batch_with_the_same_bits_each_time(rows, n, options):
    """Against dense attention; a hundred replays, so that members of a team come in many orders."""
    q, pages, metadata, tail = call(rows, n, **options)
    rank = RANK if options.get("planes") == 1 else None
    backend, kv, seen = TritonBackend(DEVICE), PagedKV(pages, rank), TailKV(tail, rank)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.prefix_tail(q, kv, metadata, seen, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # layers, whose calls overlap and share counters
            out = backend.prefix_tail(q, kv, metadata, seen, 0.1)
    depth = metadata.mask.sum(dim=2) - 1
    for lengths in (batch(rows) for batch in BATCHES):
        metadata.kv_len.copy_(torch.tensor(lengths))
        metadata.positions.copy_(metadata.kv_len[:, None] + depth)  # the tail's positions, too
        graph.replay()
        first, want = out.clone(), expected(q, pages, metadata, tail, rank)
        error = float((first - want).norm() / want.norm())
        assert error < (1e-5 if q.dtype == torch.float32 else 8e-3), f"{lengths}: error {error}"
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, first), lengths
        assert not backend._arrivals.any()
