"""The indexer of sparse attention (DSA): small heads that choose, for each query, the keys that a layer attends to.

Its queries are made of the latent that the layer's are made of, its keys and the weights of its heads of what the layer
reads. All ranks that share a model have all of it, and choose alike.
Source: DeepSeek-V3.2-Exp's report, section 2.1; names of tensors by `transformers`' deepseek_v32, which as here leaves
out the Hadamard rotation that both sides of its products share.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.attention.indexer import IndexNorm, IndexQuery
from treetop.kernels.table import Ops
from treetop.models.config import IndexSpec
from treetop.models.layers import reorder_heads
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights


class Indexer:
    """name: of its parameters."""

    def __init__(self, spec: IndexSpec, weights: Weights, name: str, ops: Ops) -> None:
        self.spec, self._ops = spec, ops
        self.query, self.key = weights.linear(f"{name}.query"), weights.linear(f"{name}.key")
        self.products: list[Product] = [self.query, self.key]
        self._weights = weights[f"{name}.weights"]
        self._norm = IndexNorm(weights[f"{name}.norm"], weights[f"{name}.norm_bias"], spec.norm_eps)

    def asks(self, x: Tensor, query_latent: Tensor, angles: Any) -> IndexQuery:
        """x: [rows, n, in], what the layer reads. query_latent: [rows, n, query_rank], normed. angles: see `Rotary`."""
        heads = self.query(query_latent).unflatten(-1, (self.spec.num_heads, -1))
        rows = x.flatten(0, -2).to(self._weights.dtype)
        weights = self._ops.profile.linear(rows, self._weights, None).view(*x.shape[:-1], -1)
        return IndexQuery(self._ops.rotate_index_heads(heads, angles), weights, self.spec.top_k)

    def write(self, x: Tensor, angles: Any, target: Tensor, slots: Tensor | None, scales: Tensor | None) -> None:
        """Write the keys of x; see `write_index_keys_reference`."""
        self._ops.write_index_keys(self.key(x), self._norm, angles, target, slots, scales=scales)


def indexer_params(spec: IndexSpec, rope_dim: int, name: str, stored: str, width: int, query_rank: int) -> list[Param]:
    """Of an indexer whose heads begin with `rope_dim` numbers with RoPE. width: of what the layer reads."""
    first = (*range(0, rope_dim, 2), *range(1, rope_dim, 2)) if spec.interleaved else range(rope_dim)
    order = partial(reorder_heads, order=(*first, *range(rope_dim, spec.head_dim)))
    heads, dim = spec.num_heads, spec.head_dim
    weights = CheckpointTensor(f"{stored}.weights_proj.weight", (heads, width))
    norm, bias = (
        vector(f"{name}.{ours}", CheckpointTensor(f"{stored}.k_norm.{theirs}", (dim,), order)) for ours, theirs in _NORM
    )
    return [
        matrix(f"{name}.query", CheckpointTensor(f"{stored}.wq_b.weight", (heads * dim, query_rank), order)),
        matrix(f"{name}.key", CheckpointTensor(f"{stored}.wk.weight", (dim, width), order)),
        Param(f"{name}.weights", (heads, width), (weights,), "router", wide=True),
        *(replace(each, wide=True) for each in (norm, bias)),
    ]


_NORM = (("norm", "weight"), ("norm_bias", "bias"))
