"""The shared tail in tensor operations: masked attention over a handful of dense keys, and the merge of two parts.

`kernels/tail.py` does both in one launch on a GPU.
"""

import torch
from torch import Tensor

from treetop.attention.contract import Queries, TailKV


def tail_visible(queries: Queries) -> Tensor:
    """Which tail keys a query sees: its mask, and the window by position. Returns [rows, n, t] bool."""
    if queries.window is None:
        return queries.mask
    distance = queries.positions[:, :, None] - queries.tail_positions[:, None, :]
    return queries.mask & (distance < queries.window)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with a mask, in plain tensor operations, with its log-sum-exp.

    q: [rows, n, heads, d]. k, v: [rows, m, kv_heads, d]. visible: [rows, n, m] bool. Returns out like q and lse
    [rows, n, heads] float32; a query that sees nothing gets out 0 and lse -inf.
    """
    rows, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("bnhgd,bmhd->bnhgm", grouped, k) * scale
    scores = scores.masked_fill(~visible[:, :, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    seen = lse > float("-inf")
    weights = torch.exp(scores - torch.where(seen, lse, 0)[..., None])
    out = torch.einsum("bnhgm,bmhd->bnhgd", weights, v)
    return out.reshape(rows, n, heads, dim), lse.reshape(rows, n, heads).to(torch.float32)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over two disjoint sets of keys from each set's (out, lse); a side with lse -inf weighs 0."""
    total = torch.logaddexp(a[1], b[1])
    weight_a = torch.exp(a[1] - total)[..., None].to(a[0].dtype)
    weight_b = torch.exp(b[1] - total)[..., None].to(b[0].dtype)
    return a[0] * weight_a + b[0] * weight_b


def merged_prefix_tail(
    prefix: tuple[Tensor, Tensor],
    q: Tensor,
    tail: TailKV,
    queries: Queries,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`prefix_tail` for a backend that only does the prefix. Every query sees itself in the tail, so none is empty."""
    part = attend(q, tail.k, tail.v, tail_visible(queries), scale)
    if sinks is None:
        return merge(prefix, part)
    return with_sinks(merge(prefix, part), torch.logaddexp(prefix[1], part[1]), sinks)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with a sink from attention without: out shrinks by the share of its mass.

    out: [rows, n, heads, d]. lse: [rows, n, heads] float32. sinks: [heads] float32. A query that saw nothing stays 0.
    """
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)
