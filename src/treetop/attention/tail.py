"""Masked attention in plain tensor operations, and sinks."""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with a mask, in plain tensor operations, with its log-sum-exp.

    q: [rows, n, heads, d]. k: [rows, m, kv_heads, d]. v: [rows, m, kv_heads, value_dim]. visible: [rows, n, m] bool.
    cap: scores are its tanh(scores / cap).
    Returns out [rows, n, heads, value_dim] and lse [rows, n, heads] float32; a query that sees nothing gets out 0 and
    lse -inf.
    """
    rows, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("bnhgd,bmhd->bnhgm", grouped, k) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~visible[:, :, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    seen = lse > float("-inf")
    weights = torch.exp(scores - torch.where(seen, lse, 0)[..., None])
    out = torch.einsum("bnhgm,bmhd->bnhgd", weights, v)
    return out.reshape(rows, n, heads, v.shape[-1]), lse.reshape(rows, n, heads).to(torch.float32)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with a sink from attention without: out shrinks by the share of its mass.

    out: [rows, n, heads, d]. lse: [rows, n, heads] float32. sinks: [heads] float32. A query that saw nothing stays 0.
    """
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)
