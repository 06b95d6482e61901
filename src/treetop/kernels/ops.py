"""The small operations of a layer, by device: PyTorch's own, or one Triton launch each."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.kernels.fused import (
    HeadNorms,
    add,
    add_reference,
    add_rms_norm,
    add_rms_norm_reference,
    embed_and_norm,
    embed_and_norm_reference,
    joined,
    norm_heads_,
    rotate_and_write,
)
from treetop.kernels.kv import PagedKV, write_pages
from treetop.kernels.linear import FewRowsGated, FewRowsLinear, GatedLinear, LibraryLinear, Linear, library_gated
from treetop.kernels.products import Call, ChosenProduct, Shape
from treetop.kernels.rope import RopeTable, Rotation, rotate_
from treetop.kernels.topk import top_logprobs, top_logprobs_reference
from treetop.kernels.triton_guard import gpu_traits, why_not

_HALF = (torch.float16, torch.bfloat16)


class Ops(Protocol):
    """linear, gated: a product with a weight [out, in], or gate and up of one, prepared once.

    add: the sum of x and the parts of delta. add_rms_norm: that sum (x alone without delta), and its norm.
    embed_and_norm: a draft's input, see `kernels.fused.embed_and_norm_reference`. angles:
    what `rotate_and_write` takes, made once a forward from the RoPE table [positions, 2, dim] and positions [rows, n].
    rotate_and_write: see `kernels.fused.rotate_and_write_reference`; it may use up qkv. top_logprobs: see
    `kernels.topk`.
    """

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> GatedLinear: ...

    def add(self, x: Tensor, delta: Tensor) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def embed_and_norm(self, table: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def angles(self, table: RopeTable, positions: Tensor) -> Any: ...

    def rotate_and_write(
        self, qkv: Tensor, angles: Any, target: Tensor, slots: Tensor | None, norms: HeadNorms | None
    ) -> Tensor: ...

    def top_logprobs(self, logits: Tensor, k: int, offset: Tensor) -> tuple[Tensor, Tensor]: ...


class TorchOps:
    """Any device, any dtype. products: what to take on a CPU for weights of a shape; the default for others."""

    def __init__(self, products: Mapping[Shape, ChosenProduct] | None = None) -> None:
        self._products = products or {}

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return LibraryLinear(weight, bias, self._calls(weight))

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> GatedLinear:
        return library_gated(weight, bias, self._calls(weight))

    def _calls(self, weight: Tensor) -> tuple[Call, ...] | None:
        chosen = self._products.get((weight.shape[0], weight.shape[1]))
        return None if chosen is None else chosen.calls

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return add_reference(x, delta)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, delta, weight, eps)

    def embed_and_norm(self, table: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return embed_and_norm_reference(table, tokens, hidden, weight, eps)

    def angles(self, table: RopeTable, positions: Tensor) -> Rotation:
        return table.at(positions)

    def rotate_and_write(
        self, qkv: Tensor, angles: Rotation, target: Tensor, slots: Tensor | None, norms: HeadNorms | None
    ) -> Tensor:
        kv_heads, whole = target.shape[-2], joined(qkv)
        if norms is not None:
            norm_heads_(whole, kv_heads, norms)
        rotate_(whole[:, :, :-kv_heads], angles)
        kv = whole[:, :, -2 * kv_heads :].view(*whole.shape[:2], 2, kv_heads, whole.shape[3])
        if slots is None:
            target.copy_(kv)
        else:
            write_pages(PagedKV(target), slots, kv)
        return whole[:, :, : -2 * kv_heads]

    def top_logprobs(self, logits: Tensor, k: int, offset: Tensor) -> tuple[Tensor, Tensor]:
        return top_logprobs_reference(logits, k, offset)


class TritonOps:
    """A GPU, up to float32. compressed: weights are kept in 12 bits too, where products of few rows gain by it."""

    def __init__(self, device: torch.device, compressed: bool) -> None:
        self._gpu, self._compressed = gpu_traits(device), compressed

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        few = bias is None and weight.dtype in _HALF
        return FewRowsLinear(weight, self._gpu, self._compressed) if few else LibraryLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> GatedLinear:
        few = bias is None and weight.dtype in _HALF
        return FewRowsGated(weight, self._gpu, self._compressed) if few else library_gated(weight, bias)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return add(x.contiguous(), delta, self._gpu)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x.contiguous(), delta, weight, eps, self._gpu)

    def embed_and_norm(self, table: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return embed_and_norm(table, tokens, hidden, weight, eps, self._gpu)

    def angles(self, table: RopeTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        return table.data, positions

    def rotate_and_write(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        target: Tensor,
        slots: Tensor | None,
        norms: HeadNorms | None,
    ) -> Tensor:
        heads = qkv.shape[3] - 2 * target.shape[-2]
        return rotate_and_write(qkv, heads, *angles, target, slots, self._gpu, norms)

    def top_logprobs(self, logits: Tensor, k: int, offset: Tensor) -> tuple[Tensor, Tensor]:
        return top_logprobs(logits, k, self._gpu, offset) if k <= 16 else top_logprobs_reference(logits, k, offset)


def ops_for(
    device: torch.device,
    dtype: torch.dtype,
    compressed: bool = False,
    products: Mapping[Shape, ChosenProduct] | None = None,
) -> Ops:
    """Triton's where it runs; PyTorch's elsewhere, and in float64. compressed, products: as in these."""
    usable = device.type == "cuda" and dtype != torch.float64 and why_not(device) is None
    return TritonOps(device, compressed) if usable else TorchOps(products)
