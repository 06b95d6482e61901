"""The two halves of a decoder layer, shared by targets and draft heads, and the parameters that each consists of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.fused import HeadNorms, joined
from treetop.kernels.gate import Gate
from treetop.kernels.moe.experts import Activation
from treetop.kernels.moe.routes import ALL_LIVE, RoutedTokens
from treetop.kernels.rope import RopeTable, head_order
from treetop.kernels.table import Ops
from treetop.models.config import AttentionSpec, DenseSpec, ModelConfig, NormKind
from treetop.models.target import LastTokens
from treetop.types.parallel import Summed, taken
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights
from treetop.weights.w8a8 import W8A8Linear

Transform = Callable[[Tensor], Tensor]


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.eps, self._ops = weight, eps, ops
        self._joined = ops.profile.joined
        self._reader: W8A8Linear | None = None

    def read_by(self, product: Product) -> None:
        """The product that reads what comes next: one that would write it in e4m3 first gets that from the norm."""
        if isinstance(product, W8A8Linear) and product.reads_codes(len(self.weight)):
            self._reader = product

    def __call__(self, x: Tensor) -> Tensor:
        return self._normed(x, None)[1]

    def after(self, x: Tensor, delta: Summed) -> tuple[Tensor, Tensor]:
        """x plus the parts of delta [parts, ...], and its norm."""
        return self._normed(x, delta)

    def _normed(self, x: Tensor, delta: Summed | None) -> tuple[Tensor, Tensor]:
        reader = self._reader
        if reader is None or not (delta is None or isinstance(delta, Tensor)):
            return self._ops.add_rms_norm(x, delta, self.weight, self.eps)
        total, normed, codes = self._ops.add_rms_norm_codes(x, delta, self.weight, self.eps, reader.how)
        reader.take(normed, codes)
        return total, normed

    def of_parts(self, parts: Summed, dtype: torch.dtype) -> Tensor:
        """The norm of a product in parts [parts, ...], rounded to dtype before, as one part."""
        return self(self._joined(taken(parts)).to(dtype))[None]


class LayerNorm:
    """(x - mean(x)) / rms(x - mean(x)) * weight + bias over the last dimension, in float32 at least."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, ops: Ops) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight, self._bias = weight.to(wide), None if bias is None else bias.to(wide)
        self._eps, self._ops = eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self._weight.dtype)
        return F.layer_norm(wide, self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)

    def after(self, x: Tensor, delta: Summed) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.after`."""
        total = self._ops.add(x, delta)
        return total, self(total)

    def of_parts(self, parts: Summed, dtype: torch.dtype) -> Tensor:
        """As `RMSNorm.of_parts`."""
        return self(joined(taken(parts)).to(dtype))[None]


Norm = RMSNorm | LayerNorm


def stream_norm(weights: Weights, name: str, kind: NormKind, eps: float, ops: Ops) -> Norm:
    """A norm of the residual stream."""
    if kind == "rms":
        return RMSNorm(weights[name], eps, ops)
    return LayerNorm(weights[name], weights.pop(f"{name}_bias"), eps, ops)


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


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE of a batch's heads. angles: what `Ops.angles` gives. query_scale: [rows, n, 1, 1], what rotated queries
    are multiplied by, if they are."""

    angles: Any
    query_scale: Tensor | None


def rotary_at(table: RopeTable, positions: Tensor, ops: Ops) -> Rotary:
    """positions: [rows, n] int64."""
    scale = table.query_scale
    return Rotary(ops.angles(table, positions), None if scale is None else scale[positions][..., None, None])


class SelfAttention:
    """Projections, norms of heads if there are any, rotation and attention. q, k and v come from one product.

    name: of its parameters.
    layer: its index among the model's.
    eps: of the norms of heads.
    """

    def __init__(self, spec: AttentionSpec, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> None:
        self.spec, self.layer, self.head_dim, self.scale, self._ops = spec, layer, spec.head_dim, spec.scale, ops
        self.qkv, self.output = weights.linear(f"{name}.qkv"), weights.linear(f"{name}.output")
        self.products = [self.qkv, self.output]
        self.gate = None if spec.gate is None else weights.linear(f"{name}.gate")
        if self.gate is not None:
            self.products.append(self.gate)
        self.norms = head_norms(spec, weights, name, eps, ops)
        self._late_weights = _late_weights(weights[f"{name}.qk_norm"]) if spec.norm_weights == "after" else None
        self._whole_norms = WholeNorms(spec, weights, name, eps, ops) if spec.whole_qk_norm else None
        self.sinks = weights[f"{name}.sinks"].float() if spec.sinks else None

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend, last: LastTokens | None = None) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks; [parts, lines, 1, ..] of `last`."""
        qkv = self.qkv.parts(x)
        if self._whole_norms is not None:
            qkv = self._whole_norms(qkv, x.dtype)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        attended = attend(self.layer, partial(self._write, qkv, rotary), self.scale, self.sinks)
        if last is not None:
            heads = attended.shape[2:]
            attended, x = last.of(attended.flatten(2)).unflatten(-1, heads), x if self.gate is None else last.of(x)
        return self._ops.parallel.share(self.output.parts(self._gated(attended, x).flatten(2)))

    def _write(
        self, qkv: Tensor, rotary: Rotary, target: Tensor, slots: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """A `WriteKV`. What reads another layer's K/V has queries alone.

        Weights after the rotation multiply queries alone, those of keys too: scores are the same.
        """
        if self.spec.kv_sharing_layer is not None:
            target = target[..., :0, :]
        q = self._ops.rotate_and_write(qkv, rotary.angles, target, slots, norms=self.norms, scales=scales)
        if self._late_weights is not None:
            q = q * self._late_weights
        return q if rotary.query_scale is None else q * rotary.query_scale

    def _gated(self, attended: Tensor, x: Tensor) -> Tensor:
        """What the output's product reads. attended: [rows, n, heads, dim]."""
        spec = self.spec
        if spec.value_dim is not None or spec.value_scale != 1:
            attended = attended[..., : spec.output_dim] * spec.value_scale
        if self.gate is None or spec.gate is None:
            return attended
        functions = self._ops.functions
        gate = (functions.sigmoid if spec.gate.kind == "sigmoid" else functions.softplus)(self.gate(x))
        return attended * (gate.view_as(attended) if spec.gate.per_number else gate[..., None])


def head_norms(spec: AttentionSpec, weights: Weights, name: str, eps: float, ops: Ops) -> HeadNorms | None:
    """Of a layer; values have no weight, nor have queries and keys any before the rotation in some models."""
    if not spec.qk_norm:
        return None
    if spec.norm_weights != "before":
        ones = torch.ones((2 + spec.value_norm, spec.head_dim), dtype=ops.context.dtype, device=ops.context.device)
        return HeadNorms(ones, eps)
    weight = weights[f"{name}.qk_norm"]
    if spec.value_norm and len(weight) == 2:
        weight = torch.cat([weight, torch.ones_like(weight[:1])])
    return HeadNorms(weight, eps)


def _late_weights(weight: Tensor) -> Tensor:
    """What queries are multiplied by where norms have weights after the rotation. weight: [2, dim], of q and k."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide).prod(dim=0).to(weight.dtype)


def self_attention_params(
    spec: AttentionSpec, name: str, stored: str, width: int, hidden: int, unit_offset: bool = False
) -> list[Param]:
    """`attention_params` of grouped-query attention."""
    dim, q, kv = spec.head_dim, spec.num_heads * spec.head_dim, spec.kv.heads * spec.head_dim
    rows, order = {"q": q} if spec.kv_sharing_layer is not None else {"q": q, "k": kv, "v": kv}, head_order(spec.rope)
    reorder = None if order is None else partial(reorder_heads, order=order)
    widen = partial(_widened, dim=dim, value_dim=spec.output_dim) if spec.output_dim < dim else None

    parts = max(spec.joined, 1)  # of a joined tensor
    gated = spec.gate is not None and spec.gate.in_queries
    own = {"q": q // parts, "k": kv // parts, "v": spec.kv.heads * spec.output_dim // parts}
    first = dict(zip("qkv", accumulate((0, own["q"], own["k"])), strict=True))

    def source(each: str, of: str, *shape: int) -> CheckpointTensor:
        turned = reorder if each in ("q", "k") else widen
        if spec.joined and each in rows:
            whole, lines = (sum(own.values()) * parts, *shape[1:]), slice(first[each], first[each] + own[each])
            cut = partial(_lines, parts=parts, lines=lines, then=turned)
            shared, apart = each in ("k", "v"), parts if spec.parts_apart else 1
            return CheckpointTensor(
                f"{stored}.qkv_proj.{of}", whole, cut, rows[each], unit=dim, shared=shared, parts=apart
            )
        if each == "v":
            narrow = (shape[0] // dim * spec.output_dim, *shape[1:])
            tensor = f"{stored}.{'k' if spec.values_of_keys else 'v'}_proj.{of}"
            return CheckpointTensor(tensor, narrow, turned, shape[0], unit=dim, shared=True)
        if each in ("q", "gate") and gated:
            half = partial(_half_of_heads, dim=dim, index=int(each == "gate"), then=reorder if each == "q" else None)
            return CheckpointTensor(f"{stored}.q_proj.{of}", (2 * shape[0], *shape[1:]), half, shape[0], unit=dim)
        if each == "o":
            return CheckpointTensor(f"{stored}.o_proj.{of}", shape, unit=spec.output_dim)
        return CheckpointTensor(f"{stored}.{each}_proj.{of}", shape, turned, unit=dim, shared=each == "k")

    qkv = tuple(source(each, "weight", n, width) for each, n in rows.items())
    params = [
        Param(f"{name}.qkv", (sum(rows.values()), width), qkv, "matrix", 0),
        matrix(f"{name}.output", source("o", "weight", hidden, spec.num_heads * spec.output_dim), shard=1),
    ]
    if spec.gate is not None:
        unit = spec.output_dim if spec.gate.per_number else 1
        rows_of_gate = spec.num_heads * unit
        own_gate = CheckpointTensor(f"{stored}.g_proj.weight", (rows_of_gate, width), unit=unit)
        of_gate = source("gate", "weight", q, width) if gated else own_gate
        params.append(Param(f"{name}.gate", (rows_of_gate, width), (of_gate,), "matrix", 0))
        if gated and spec.bias:
            params.append(Param(f"{name}.gate_bias", (q,), (source("gate", "bias", q),), "vector", 0))
    if spec.bias:
        biases = tuple(source(each, "bias", n) for each, n in rows.items())
        params.append(Param(f"{name}.qkv_bias", (sum(rows.values()),), biases, "vector", 0))
    if spec.output_bias:
        params.append(vector(f"{name}.output_bias", source("o", "bias", hidden), shard="first"))
    if spec.qk_norm and spec.norm_weights is not None:
        norms = tuple(_norm(f"{stored}.{each}_norm.weight", dim, unit_offset, reorder) for each in "qk" if each in rows)
        params.append(Param(f"{name}.qk_norm", (len(norms), dim), norms, "vector", wide=unit_offset))
    if spec.whole_qk_norm:
        wide = partial(_norm, unit_offset=unit_offset, reorder=reorder)
        params += [vector(f"{name}.{each}_norm", wide(f"{stored}.{each}_norm.weight", rows[each])) for each in "qk"]
    if spec.sinks:
        params.append(
            vector(f"{name}.sinks", CheckpointTensor(f"{stored}.{spec.sink_name}", (spec.num_heads,)), shard=0)
        )
    return params


def _widened(stored: Tensor, dim: int, value_dim: int) -> Tensor:
    """Rows of values [heads * value_dim, ...], zeros behind each head's."""
    heads = stored.view(-1, value_dim, *stored.shape[1:])
    wide = heads.new_zeros((len(heads), dim, *stored.shape[1:]))
    wide[:, :value_dim] = heads
    return wide.flatten(0, 1)


def _lines(stored: Tensor, parts: int, lines: slice, then: Transform | None) -> Tensor:
    """Some rows of each part of a tensor that holds several weights, perhaps turned."""
    found = stored[lines] if parts == 1 else stored.unflatten(0, (parts, -1))[:, lines].flatten(0, 1)
    return found if then is None else then(found)


def _half_of_heads(stored: Tensor, dim: int, index: int, then: Transform | None) -> Tensor:
    """The first or the second `dim` rows of each head's."""
    found = stored.unflatten(0, (-1, 2, dim))[:, index].flatten(0, 1)
    return found if then is None else then(found)


def reorder_heads(stored: Tensor, order: tuple[int, ...]) -> Tensor:
    """Rows of whole heads [heads * head_dim, ...], each head's in this order."""
    heads = stored.view(-1, len(order), *stored.shape[1:])
    return heads[:, list(order)].reshape(stored.shape)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up from one product. gate: the activation, if it is another."""

    def __init__(self, weights: Weights, name: str, ops: Ops, gate: Gate = "silu") -> None:
        self.gate_up, self.down = weights.gated(f"{name}.gate_up", gate), weights.linear(f"{name}.down")
        self.products: list[Product] = [self.gate_up, self.down]
        self._parallel = ops.parallel

    def __call__(self, x: Tensor, tokens: RoutedTokens = ALL_LIVE, stream: Tensor | None = None) -> Summed:
        """x: [..., hidden]. Returns parts [parts, ..., hidden], of all ranks and all tokens, live or not."""
        return self._parallel.share(self.parts(x))

    def parts(self, x: Tensor) -> Tensor:
        """This rank's share of it."""
        return self.down.parts(self.gate_up(x))


class SteppedMLP:
    """`GatedMLP` in steps: with a limited activation, or multipliers, which few models have."""

    def __init__(self, spec: DenseSpec, weights: Weights, name: str, ops: Ops) -> None:
        self.gate_up, self.down = weights.linear(f"{name}.gate_up"), weights.linear(f"{name}.down")
        self.products: list[Product] = [self.gate_up, self.down]
        self._activation, self._ops = Activation(spec.gate, spec.limit), ops
        self._of_gate, self._of_output = spec.of_gate, spec.of_output

    def __call__(self, x: Tensor, tokens: RoutedTokens = ALL_LIVE, stream: Tensor | None = None) -> Summed:
        return self._ops.parallel.share(self.parts(x))

    def parts(self, x: Tensor) -> Tensor:
        """This rank's share of it."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = gate if self._of_gate == 1 else gate * self._of_gate
        parts = self.down.parts(self._activation(gate, up, self._ops.functions))
        return parts if self._of_output == 1 else parts * self._of_output


def dense_mlp(spec: DenseSpec, weights: Weights, name: str, ops: Ops) -> GatedMLP | SteppedMLP:
    """name: of its parameters."""
    if spec.limit is not None or (spec.of_gate, spec.of_output) != (1, 1):
        return SteppedMLP(spec, weights, name, ops)
    return GatedMLP(weights, name, ops, spec.gate)


def mlp_params(spec: DenseSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. A checkpoint holds gate and up apart, or as one tensor, gate first."""
    inner, both = spec.inner_size, ("gate", "up")
    whole, down = f"{stored}.gate_up_proj", f"{stored}.down_proj"
    if spec.stored == "joined of Granite":
        whole, down = (f"{stored.removesuffix('mlp')}shared_mlp.{each}_linear" for each in ("input", "output"))

    def half(each: str) -> CheckpointTensor:
        if spec.stored == "apart":
            return CheckpointTensor(f"{stored}.{each}_proj.weight", (inner, hidden))
        return CheckpointTensor(
            f"{whole}.weight", (2 * inner, hidden), partial(_half, index=both.index(each)), rows=inner
        )

    params = [
        Param(f"{name}.gate_up", (2 * inner, hidden), tuple(map(half, both)), "matrix", 0),
        matrix(f"{name}.down", CheckpointTensor(f"{down}.weight", (hidden, inner)), shard=1),
    ]
    if spec.bias:
        biases = (CheckpointTensor(f"{stored}.{each}_proj.bias", (inner,)) for each in both)
        params.append(vector(f"{name}.gate_up_bias", *biases, shard=0))
        params.append(vector(f"{name}.down_bias", CheckpointTensor(f"{down}.bias", (hidden,)), shard="first"))
    return params


def _half(stored: Tensor, index: int) -> Tensor:
    """The first or the second half of the rows."""
    return stored.chunk(2)[index]


def norm_param(name: str, stored: str, size: int, unit_offset: bool = False) -> Param:
    """unit_offset: 1 is added to the stored weight, in float32, as the norm would."""
    return replace(vector(name, _norm(stored, size, unit_offset)), wide=unit_offset)


def stream_norm_params(name: str, stored: str, config: ModelConfig) -> list[Param]:
    """Of `stream_norm`. stored: the prefix of its tensors."""
    size, wide = config.hidden_size, config.norm != "rms"
    found = [norm_param(name, f"{stored}.weight", size, config.unit_offset)]
    if config.norm == "layer with bias":
        found.append(vector(f"{name}_bias", CheckpointTensor(f"{stored}.bias", (size,))))
    return [replace(each, wide=each.wide or wide) for each in found]


def _norm(stored: str, size: int, unit_offset: bool, reorder: Transform | None = None) -> CheckpointTensor:
    return CheckpointTensor(stored, (size,), partial(_offset_by_one, reorder=reorder) if unit_offset else reorder)


def _offset_by_one(stored: Tensor, reorder: Transform | None) -> Tensor:
    weight = stored if reorder is None else reorder(stored)
    return weight.to(torch.float64) + 1  # exactly: rounded once, to what the parameter is kept in
