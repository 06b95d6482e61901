"""What sparse attention (DSA) chooses keys by: an indexer's keys, its queries' scores, and the best of them.

A query's score of a key is the sum over the indexer's heads of weight * relu(q . k). It attends to the `top_k` best of
the keys that it may see; of equal ones the earlier come first. Constants that scale all scores alike are left out.
Source: DeepSeek-V3.2-Exp's report, section 2.1; `transformers`' deepseek_v32, whose choice among equals is not defined.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.kv import PagedKV, write_pages
from treetop.kernels.rope import Rotation, rotate_


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What chooses the keys of one layer.

    heads: [rows, n, index_heads, index_dim].
    weights: [rows, n, index_heads], no less than float32.
    top_k: keys that a query attends to at most.
    """

    heads: Tensor
    weights: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """Layer norm of an index key. weight, bias: [index_dim], no less than float32."""

    weight: Tensor
    bias: Tensor
    eps: float


def write_index_keys(key: Tensor, norm: IndexNorm, angles: Rotation, target: Tensor, slots: Tensor | None) -> None:
    """Norm index keys, rotate their first numbers, as many as the angles are of, and write them where they belong.

    key: [rows, n, index_dim]. target: a tail's columns [rows, n, 1, 1, index_dim]; or, with slots [rows, n] int64,
    pages [slots, 1, 1, index_dim], where what goes to slot 0 is dropped.
    """
    normed = F.layer_norm(key.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.bias, norm.eps)
    plane = turned_first(normed[:, :, None], angles)[:, :, None].to(target.dtype)
    if slots is None:
        target.copy_(plane)
    else:
        write_pages(PagedKV(target), slots, plane)


def turned_first(heads: Tensor, angles: Rotation) -> Tensor:
    """Heads [rows, n, heads, dim] whose first numbers are rotated, as many as the angles are of."""
    turned = angles.cos.shape[-1]
    return torch.cat([rotate_(heads[..., :turned].clone(), angles), heads[..., turned:]], dim=-1)


def index_scores(query: IndexQuery, keys: Tensor) -> Tensor:
    """How much each query wants each key, in no less than float32. keys: [rows, m, index_dim]. Returns [rows, n, m]."""
    wide = query.weights.dtype
    by_head = torch.einsum("bnhd,bmd->bnhm", query.heads.to(wide), keys.to(wide)).relu_()
    return torch.einsum("bnhm,bnh->bnm", by_head, query.weights)


def choose_keys(query: IndexQuery, keys: Tensor, visible: Tensor) -> Tensor:
    """The keys that each query attends to.

    keys: [rows, m, index_dim], each query's in the order of their positions, whatever lies between them. visible:
    [rows, n, m] bool. Returns [rows, n, m] bool: `query.top_k` of the visible ones, or all if they are no more.
    """
    scores = index_scores(query, keys).masked_fill_(~visible, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : query.top_k]
    return torch.zeros_like(visible, memory_format=torch.contiguous_format).scatter_(2, best, True) & visible
