"""The small operations of a layer, by device: PyTorch's own, or one Triton launch each."""

from typing import Protocol

import torch
from torch import Tensor

from treetop.kernels.fused import add_rms_norm, add_rms_norm_reference, silu_mul, silu_mul_reference
from treetop.kernels.triton_guard import gpu_traits, why_not


class Ops(Protocol):
    """add_rms_norm: the sum of x and delta (x alone if None), and its norm. silu_mul: [..., 2n] to [..., n]."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


class TorchOps:
    """Any device, any dtype."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul_reference(gate_up)


class TritonOps:
    """A GPU, up to float32."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = gpu_traits(device)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x.contiguous(), delta, weight, eps, self._gpu)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up, self._gpu)


def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    """Triton's where it runs; PyTorch's elsewhere, and in float64."""
    usable = device.type == "cuda" and dtype != torch.float64 and why_not(device) is None
    return TritonOps(device) if usable else TorchOps()
