"""The two halves of a decoder layer, shared by targets and draft heads, and the parameters that each consists of."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.kernels.fused import HeadNorms, joined
from treetop.kernels.gate import Gate
from treetop.kernels.rope import head_order
from treetop.kernels.table import Ops
from treetop.models.config import AttentionSpec, DenseSpec
from treetop.models.params import Param, matrix, vector
from treetop.types.parallel import Summed, taken
from treetop.weights.format import Product, Source
from treetop.weights.held import Weights

Transform = Callable[[Tensor], Tensor]


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.eps, self._ops = weight, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.add_rms_norm(x, None, self.weight, self.eps)[1]

    def after(self, x: Tensor, delta: Summed) -> tuple[Tensor, Tensor]:
        """x plus the parts of delta [parts, ...], and its norm."""
        return self._ops.add_rms_norm(x, delta, self.weight, self.eps)

    def of_parts(self, parts: Summed, dtype: torch.dtype) -> Tensor:
        """The norm of a product in parts [parts, ...], rounded to dtype before, as one part."""
        return self(joined(taken(parts)).to(dtype))[None]


class NoNorm:
    """Stands where a layer reads the residual stream as it is."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, delta: Summed) -> tuple[Tensor, Tensor]:
        """x plus the parts of delta [parts, ...], twice."""
        total = self._ops.add(x, delta)
        return total, total


class WholeNorms:
    """Of queries and keys, each over all heads. name: of the attention's parameters."""

    def __init__(self, spec: AttentionSpec, weights: Weights, name: str, eps: float, ops: Ops) -> None:
        self._q, self._k = (RMSNorm(weights[f"{name}.{each}_norm"], eps, ops) for each in "qk")
        self._widths = [heads * spec.head_dim for heads in (spec.num_heads, spec.kv.heads, spec.kv.heads)]

    def __call__(self, qkv: Tensor, dtype: torch.dtype) -> Tensor:
        """qkv: [parts, rows, n, width], rounded to dtype before; returns one part."""
        q, k, v = joined(qkv).to(dtype).split(self._widths, dim=-1)
        return torch.cat([self._q(q), self._k(k), v], dim=-1)[None]


class SelfAttention:
    """Projections, norms of heads if there are any, rotation and attention. q, k and v come from one product.

    name: of its parameters. layer: its index among the model's. eps: of the norms of heads.
    """

    def __init__(self, spec: AttentionSpec, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> None:
        self.layer, self.head_dim, self.scale, self._ops = layer, spec.head_dim, spec.scale, ops
        self.qkv, self.output = weights.linear(f"{name}.qkv"), weights.linear(f"{name}.output")
        self.products = [self.qkv, self.output]
        self.norms = HeadNorms(weights[f"{name}.qk_norm"], eps) if spec.qk_norm else None
        self._whole_norms = WholeNorms(spec, weights, name, eps, ops) if spec.whole_qk_norm else None
        self.sinks = weights[f"{name}.sinks"].float() if spec.sinks else None

    def __call__(self, x: Tensor, angles: Any, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        qkv = self.qkv.parts(x)
        if self._whole_norms is not None:
            qkv = self._whole_norms(qkv, x.dtype)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        write = partial(self._ops.rotate_and_write, qkv, angles, norms=self.norms)
        attended = attend(self.layer, write, self.scale, self.sinks).flatten(2)
        return self._ops.parallel.share(self.output.parts(attended))


def attention_params(
    spec: AttentionSpec, name: str, stored: str, width: int, hidden: int, unit_offset: bool = False
) -> list[Param]:
    """Of attention whose input is `width` wide. stored: the prefix of its tensors. Ranks have whole heads.

    Heads of queries and keys are read in the order that the rotation wants. unit_offset: of norms, see `ModelConfig`.
    """
    dim, q, kv = spec.head_dim, spec.num_heads * spec.head_dim, spec.kv.heads * spec.head_dim
    rows, order = {"q": q, "k": kv, "v": kv}, head_order(spec.rope)
    reorder = None if order is None else partial(_reorder_heads, order=order)

    first = dict(zip("qkv", accumulate((0, q, kv)), strict=True))

    def source(each: str, of: str, *shape: int) -> Source:
        turned = reorder if each in ("q", "k") else None
        if spec.joined and each in rows:
            whole, lines = (q + 2 * kv, *shape[1:]), slice(first[each], first[each] + rows[each])
            cut = partial(_lines, lines=lines, then=turned)
            return Source(f"{stored}.qkv_proj.{of}", whole, cut, rows[each], unit=dim, shared=each in ("k", "v"))
        return Source(f"{stored}.{each}_proj.{of}", shape, turned, unit=dim, shared=each in ("k", "v"))

    qkv = tuple(source(each, "weight", n, width) for each, n in rows.items())
    params = [
        Param(f"{name}.qkv", (q + 2 * kv, width), qkv, "matrix", 0),
        matrix(f"{name}.output", source("o", "weight", hidden, q), shard=1),
    ]
    if spec.bias:
        params.append(vector(f"{name}.qkv_bias", *(source(each, "bias", n) for each, n in rows.items()), shard=0))
    if spec.output_bias:
        params.append(vector(f"{name}.output_bias", source("o", "bias", hidden), shard="first"))
    if spec.qk_norm:
        norms = tuple(_norm(f"{stored}.{each}_norm.weight", dim, unit_offset, reorder) for each in "qk")
        params.append(Param(f"{name}.qk_norm", (2, dim), norms, "vector", wide=unit_offset))
    if spec.whole_qk_norm:
        wide = partial(_norm, unit_offset=unit_offset, reorder=reorder)
        params += [vector(f"{name}.{each}_norm", wide(f"{stored}.{each}_norm.weight", rows[each])) for each in "qk"]
    if spec.sinks:
        params.append(vector(f"{name}.sinks", Source(f"{stored}.sinks", (spec.num_heads,)), shard=0))
    return params


def _lines(stored: Tensor, lines: slice, then: Transform | None) -> Tensor:
    """Some rows of a tensor that holds several weights, perhaps turned."""
    return stored[lines] if then is None else then(stored[lines])


def _reorder_heads(stored: Tensor, order: tuple[int, ...]) -> Tensor:
    """Rows of whole heads [heads * head_dim, ...], each head's in this order."""
    heads = stored.view(-1, len(order), *stored.shape[1:])
    return heads[:, list(order)].reshape(stored.shape)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up from one product. gate: the activation, if it is another."""

    def __init__(self, weights: Weights, name: str, ops: Ops, gate: Gate = "silu") -> None:
        self.gate_up, self.down = weights.gated(f"{name}.gate_up", gate), weights.linear(f"{name}.down")
        self.products: list[Product] = [self.gate_up, self.down]
        self._parallel = ops.parallel

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Summed:
        """x: [..., hidden]. Returns parts [parts, ..., hidden], of all ranks and all tokens, live or not."""
        return self._parallel.share(self.down.parts(self.gate_up(x)))


def mlp_params(spec: DenseSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors."""
    inner, both = spec.inner_size, ("gate", "up")

    def source(each: str, of: str, *shape: int) -> Source:
        return Source(f"{stored}.{each}_proj.{of}", shape)

    def half(each: str) -> Source:
        if not spec.joined:
            return source(each, "weight", inner, hidden)
        cut = partial(_half, index=both.index(each))
        return Source(f"{stored}.gate_up_proj.weight", (2 * inner, hidden), cut, rows=inner)

    params = [
        Param(f"{name}.gate_up", (2 * inner, hidden), tuple(map(half, both)), "matrix", 0),
        matrix(f"{name}.down", source("down", "weight", hidden, inner), shard=1),
    ]
    if spec.bias:
        params.append(vector(f"{name}.gate_up_bias", *(source(each, "bias", inner) for each in both), shard=0))
        params.append(vector(f"{name}.down_bias", source("down", "bias", hidden), shard="first"))
    return params


def _half(stored: Tensor, index: int) -> Tensor:
    """The first or the second half of the rows."""
    return stored.chunk(2)[index]


def norm_param(name: str, stored: str, size: int, unit_offset: bool = False) -> Param:
    """unit_offset: 1 is added to the stored weight, in float32, as the norm would."""
    return replace(vector(name, _norm(stored, size, unit_offset)), wide=unit_offset)


def _norm(stored: str, size: int, unit_offset: bool, reorder: Transform | None = None) -> Source:
    return Source(stored, (size,), partial(_offset_by_one, reorder=reorder) if unit_offset else reorder)


def _offset_by_one(stored: Tensor, reorder: Transform | None) -> Tensor:
    weight = stored if reorder is None else reorder(stored)
    return weight.to(torch.float64) + 1  # exactly: rounded once, to what the parameter is kept in
