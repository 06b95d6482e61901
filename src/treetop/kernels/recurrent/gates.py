"""What the recurrence of a gated delta net reads of a layer's products, and the norm and gate of what it gives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.recurrent.states import StateInputs

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, whatever a model's norms add."""


def delta_inputs_reference(
    mixed: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, key_heads: int, key_dim: int
) -> StateInputs:
    """SiLU of what the convolution gives, as queries and keys of length 1, and values; decays and beta of the gates.

    mixed: [rows, n, channels], queries, keys, values. gates: [rows, n, 2 * heads], b, then a. rate: [heads], minus
    e^A_log, and bias: [heads], in float32 at least. Queries are multiplied by key_dim^-1/2.
    """
    wide, keys = torch.promote_types(mixed.dtype, torch.float32), key_heads * key_dim
    q, k, v = F.silu(mixed).to(wide).split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
    b, a = gates.to(wide).chunk(2, dim=-1)
    q, k = (_of_length_1(x.unflatten(-1, (key_heads, key_dim))) for x in (q, k))
    g = rate.to(wide) * F.softplus(a + bias.to(wide))
    return StateInputs(q * key_dim**-0.5, k, v.unflatten(-1, (len(rate), -1)).contiguous(), g, torch.sigmoid(b))


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + LENGTH_EPS)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each head, times weight, times SiLU of a gate.

    x: [rows, n, heads, dim] float32 at least. gate: [rows, n, heads * dim]. weight: [dim]. Returns it as gate is.
    """
    dtype, wide = gate.dtype, x.dtype
    x = x.to(dtype).to(wide)
    normed = (x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)).to(dtype) * weight
    return (normed * F.silu(gate.to(wide)).view(x.shape)).to(dtype).flatten(-2)
