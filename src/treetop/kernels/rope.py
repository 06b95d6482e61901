"""Rotary position embedding: tables from a Hugging Face config, and the rotation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation frequencies of one model. kind: default, linear or llama3; the numbers are the config's."""

    head_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class RopeTable:
    """data: [rows, 2, head_dim], cos then sin; the first half of sin carries the sign of the half rotation."""

    data: Tensor

    def at(self, positions: Tensor) -> "Rotation":
        """The angles at `positions` [rows, n]."""
        data = self.data[positions]
        return Rotation(data[:, :, :1], data[:, :, 1:])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a batch. cos, sin: [rows, n, 1, head_dim], to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[head_dim / 2] float32, the precision that checkpoints were trained with.

    Source of the llama3 ramp: Llama 3.1's published configuration.
    """
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    inverse = 1.0 / spec.theta**exponent
    if spec.kind == "linear":
        return inverse / spec.factor
    if spec.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = spec.low_freq_factor, spec.high_freq_factor
        smooth = ((spec.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse * ((1 - smooth) / spec.factor + smooth)
    return inverse


def rope_table(spec: RopeSpec, num_positions: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """Tables of `num_positions` rows; sized by the target's context, never by the draft's config (vllm-48894)."""
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec)
    cos, sin = angle.cos(), angle.sin()
    table = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)
    return RopeTable(table.to(device, dtype))


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] in place by the angles at its positions."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x.mul_(rotation.cos).addcmul_(swapped, rotation.sin)
