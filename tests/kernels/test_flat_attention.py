"""Attention to the nodes of trees that a budget has cut, one after the other: as by row, and nothing else is read."""

from dataclasses import replace

import pytest
import torch

from support.interpreted import interpreted
from support.operation_cases import clean
from support.scenes import scene
from treetop.kernels.attention.attention import paged_attention, paged_attention_reference
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.flat import packed_nodes
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.tree import FlatNodes

NAN, CPU = float("nan"), torch.device("cpu")


def cut(counts, width):
    """Where nodes stand of rows with so many."""
    count = torch.tensor(counts)
    start = count.cumsum(0) - count
    node = torch.arange(width).expand(len(counts), -1)
    there = node < count[:, None]
    at = (torch.arange(len(counts))[:, None] * width + node)[there]
    return FlatNodes(count, start, at, start[:, None] + torch.where(there, node, 0))


def flat_call(counts, **options):
    """A scene whose rows keep their first nodes; what lies behind the last flat node, and in padding, is NaN."""
    width = options.get("n", 6)
    s = scene(**{"t": width, "n": width, **options})
    flat = cut(counts, width)
    there = torch.arange(width) < flat.count[:, None]
    mask = s.metadata.mask & there[:, None] | torch.eye(width, dtype=torch.bool)
    metadata = replace(s.metadata, mask=mask, flat=flat)

    def flattened(by_row):
        memory = torch.full((len(flat.at) + 3, 1, *by_row.shape[2:]), NAN, dtype=by_row.dtype)
        memory[: len(flat.at)] = packed_nodes(flat, by_row)
        return memory[: len(flat.at)]

    return s, metadata, flattened(s.q), flattened(s.tail.data)


@interpreted
@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize(
    ("counts", "splits", "options"),
    [
        ([1, 6, 3, 2, 6], 1, {}),
        ([6, 1, 1, 4, 1], 3, {"window": 19}),
        ([1, 1, 1, 1, 1], 2, {}),
        ([20, 1, 7, 13, 2], 3, {"n": 20}),
        ([5, 20, 1, 1, 9], 1, {"n": 20, "window": 11}),
    ],
)
def test_flat_nodes_attend_as_their_rows_do(counts, splits, options, helped):
    """Rows of one node beside whole ones, blocks without a query, splits, windows, helpers of long rows."""
    s, metadata, q, tail = flat_call(
        counts, lengths=[170, 33, 150, 5, 0], max_kv_len=170, heads=4, kv_heads=2, **options
    )
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    arrivals = torch.zeros(16, dtype=torch.int32) if helped else None
    out, lse = paged_attention(
        q, s.kv.data, metadata, tail, s.scale, None, gpu_traits(CPU), launch, s.kv.scales, arrivals=arrivals
    )
    want, want_lse = paged_attention_reference(
        q, s.clean.data, replace(metadata, table=clean(s).table), tail, s.scale, None, s.kv.scales
    )
    assert out.shape == want.shape == q.shape
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)
