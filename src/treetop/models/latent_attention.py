"""Compressed attention (MLA): a token leaves one latent and a rotated key, which all heads share.

What would make a head's key of the latent is applied to the query instead, and what would make its value to what
attention gives (absorbed): so attention reads one plane of `rank + rope_dim` numbers for all heads, of which the first
`rank` are the value. The products that absorb are the rows of one stored weight, `kv_b_proj`.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix B; names of tensors by `transformers`' deepseek_v2.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treetop.attention.layer import Attend, Index, WriteKV
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.attention.latent import LatentNorm
from treetop.kernels.rope import head_order
from treetop.kernels.table import Ops
from treetop.models.config import AttentionSpec, LatentSpec
from treetop.models.indexer import Indexer, indexer_params
from treetop.models.layers import RMSNorm, Rotary, norm_param, reorder_heads
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.heads_product import HeadsProduct
from treetop.weights.held import Weights


class LatentAttention:
    """Products, norms of latents, rotation and attention, called as `SelfAttention`.

    name: of its parameters.
    layer: its index among the model's.
    """

    def __init__(
        self, spec: AttentionSpec, latent: LatentSpec, weights: Weights, name: str, layer: int, ops: Ops
    ) -> None:
        self.layer, self.scale, self._latent, self._ops = layer, spec.scale, latent, ops
        self.down, self.query = weights.linear(f"{name}.down"), weights.linear(f"{name}.query")
        self.output, up = weights.linear(f"{name}.output"), weights[f"{name}.up"]
        by_head = up.view(-1, latent.qk_nope_head_dim + latent.value_dim, latent.rank)
        self.to_key = HeadsProduct(by_head[:, : latent.qk_nope_head_dim], ops)
        self.to_value = HeadsProduct(by_head[:, latent.qk_nope_head_dim :].transpose(1, 2), ops)
        self._heads = len(by_head)
        self.products: list[Product] = [self.down, self.query, self.to_key, self.to_value, self.output]
        self.gate = weights.linear(f"{name}.gate") if latent.gate else None
        if self.gate is not None:
            self.products.append(self.gate)
        self.norm = LatentNorm(weights[f"{name}.norm"], latent.norm_eps)
        self.query_norm: RMSNorm | None = None
        if latent.query_rank is not None:
            self.query_norm = RMSNorm(weights[f"{name}.query_norm"], latent.norm_eps, ops)
        self.indexer, self._shares = None, None if spec.index is None else spec.index.shares
        if spec.index is not None and self._shares is None:
            self.indexer = Indexer(spec.index, weights, f"{name}.indexer", ops)
            self.products += self.indexer.products

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        down, first, nope = self.down.parts(x), self._latent.query_rank or 0, self._latent.qk_nope_head_dim
        of = x if self.query_norm is None else self.query_norm.of_parts(down[..., :first], x.dtype)[0]
        q = self.query(of).unflatten(-1, (self._heads, -1))
        write: WriteKV = partial(self._write, self.to_key(q[..., :nope]), q[..., nope:], down[..., first:], rotary)
        index: Index | None = self._shares
        if self.indexer is not None:
            index = self.indexer.asks(x, of, rotary.angles)
            write = partial(self._write_both, write, x, rotary)
        values = self.to_value(attend(self.layer, write, self.scale, index=index))
        if self.gate is not None:
            gate = self.gate(x)
            opened = self._ops.functions.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
            values = values * opened.to(values.dtype)[..., None]
        return self._ops.parallel.share(self.output.parts(values.flatten(2)))

    def _write(
        self,
        absorbed: Tensor,
        q_rope: Tensor,
        down: Tensor,
        rotary: Rotary,
        target: Tensor,
        slots: Tensor | None,
        scales: Tensor | None,
    ) -> Tensor:
        """A `WriteKV`."""
        q = self._ops.write_latent(absorbed, q_rope, down, rotary.angles, target, slots, self.norm, scales=scales)
        return q if rotary.query_scale is None else q * rotary.query_scale

    def _write_both(
        self, latents: WriteKV, x: Tensor, rotary: Rotary, target: Tensor, slots: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """A `WriteKV`, of the indexer's keys too, which are a plane's last numbers."""
        assert self.indexer is not None
        plane, key = target.split([target.shape[-1] - self.indexer.spec.head_dim, self.indexer.spec.head_dim], dim=-1)
        self.indexer.write(x, rotary.angles, key, slots, scales)
        return latents(plane, slots, scales)


def latent_params(
    spec: AttentionSpec, latent: LatentSpec, name: str, stored: str, width: int, hidden: int
) -> list[Param]:
    """Of attention whose input is `width` wide. stored: the prefix of its tensors.

    Ranks have whole heads of all but what makes the latents, which each has.
    """
    rope_dim, heads, rank, nope = spec.rope.head_dim, spec.num_heads, latent.rank, latent.qk_nope_head_dim
    order = head_order(spec.rope) or range(rope_dim)
    head, both = nope + rope_dim, nope + latent.value_dim
    order_rope_of_head = partial(reorder_heads, order=(*range(nope), *(nope + i for i in order)))
    order_rope_of_plane = partial(reorder_heads, order=(*range(rank), *(rank + i for i in order)))
    plane = CheckpointTensor(f"{stored}.kv_a_proj_with_mqa.weight", (rank + rope_dim, width), order_rope_of_plane)
    if latent.query_rank is None:
        down, of_query, norms = [plane], CheckpointTensor(f"{stored}.q_proj.weight", (heads * head, width)), []
    else:
        down = [CheckpointTensor(f"{stored}.q_a_proj.weight", (latent.query_rank, width)), plane]
        of_query = CheckpointTensor(f"{stored}.q_b_proj.weight", (heads * head, latent.query_rank))
        norms = [norm_param(f"{name}.query_norm", f"{stored}.q_a_layernorm.weight", latent.query_rank)]
    indexer = []
    if spec.index is not None and spec.index.shares is None:
        assert latent.query_rank is not None
        indexer = indexer_params(spec.index, rope_dim, f"{name}.indexer", f"{stored}.indexer", width, latent.query_rank)
    gate = (
        [matrix(f"{name}.gate", CheckpointTensor(f"{stored}.g_proj.weight", (heads, width)), shard=0)]
        if latent.gate
        else []
    )
    query = replace(of_query, transform=order_rope_of_head, unit=head)
    up = CheckpointTensor(f"{stored}.kv_b_proj.weight", (heads * both, rank), unit=both)
    return [
        matrix(f"{name}.down", *down),
        matrix(f"{name}.query", query, shard=0),
        Param(f"{name}.up", (heads * both, rank), (up,), "heads", 0),
        matrix(
            f"{name}.output",
            CheckpointTensor(f"{stored}.o_proj.weight", (hidden, heads * latent.value_dim), unit=latent.value_dim),
            shard=1,
        ),
        _latent_norm(latent, f"{name}.norm", f"{stored}.kv_a_layernorm.weight"),
        *norms,
        *indexer,
        *gate,
    ]


def _latent_norm(latent: LatentSpec, name: str, stored: str) -> Param:
    """A scale of the latent is its norm's: in float32 at least, rounded once."""
    if latent.scale == 1:
        return norm_param(name, stored, latent.rank)
    return replace(vector(name, CheckpointTensor(stored, (latent.rank,), partial(_times, latent.scale))), wide=True)


def _times(scale: float, weight: Tensor) -> Tensor:
    return weight.to(torch.float64) * scale
