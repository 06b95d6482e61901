"""Rotary position embedding: tables from a Hugging Face config, and the rotation.

There is one rotation, of the whole head, whose first half pairs with its second. What other conventions differ in, the
dimensions that pair and those without RoPE, is an order of a head's dimensions (`head_order`), in which
weights are read once: so no operation knows of it. Dimensions without RoPE have an angle of zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies are divided by the factor, high ones stay, and between them lies a ramp, or nothing.

    Source: Llama 3.1's published configuration; Llama 4 Scout's, whose two bounds are one.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequencies with fewer turns in the original context than beta_slow are divided by the factor, those with more
    than beta_fast stay, and between them lies a ramp over dimensions.

    truncate: the ramp begins and ends at whole dimensions.
    attention_factor: cos and sin are multiplied by it. Source: YaRN, arXiv:2309.00071, section 3.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """Position p has the frequencies that a text of p + 1 tokens has: those of a larger theta past max_position.

    So a key's rotation depends on its position alone, as if each token were decoded by itself: what a prefix cache, a
    chunk or a tree makes of it is the same. Source: arXiv:2309.00071, section 3.3, and `transformers`' formula.
    """

    factor: float
    max_position: int


@dataclass(frozen=True, slots=True)
class Proportional:
    """What has RoPE has the frequencies that it would have if all of the head had RoPE, divided by the factor.

    Dimension i pairs with i + head_dim / 2, whatever the part with RoPE. Source: Gemma 4's published configuration.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Turned queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / length)).

    Source: Llama 4's published code, where it tempers attention over long texts; Ministral 3 has it too.
    """

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of a layer's heads.

    rotary_dim: how many of a head's first dimensions turn; None is all, 0 is none.

    interleaved: in a checkpoint, dimension 2i pairs with 2i + 1, not i with i + rotary_dim / 2. query_scale: what
    queries are multiplied by after it.
    """

    head_dim: int
    theta: float
    scaling: LinearScaling | Llama3 | Yarn | DynamicNTK | Proportional | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    query_scale: QueryScale | None = None

    @property
    def rotary_size(self) -> int:
        """Dimensions with RoPE."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, slots=True)
class RopeTable:
    """data: [rows, 2, head_dim], cos then sin; the first half of sin carries the sign of the half rotation.

    query_scale: [rows], what rotated queries are multiplied by; None where it is 1 at every position.
    """

    data: Tensor
    query_scale: Tensor | None = None

    def at(self, positions: Tensor) -> "Rotation":
        """The angles at `positions` [rows, n]."""
        data = self.data[positions]
        return Rotation(data[:, :, :1], data[:, :, 1:])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a batch. cos, sin: [rows, n, 1, head_dim], to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(spec: RopeSpec, positions: Tensor) -> Tensor:
    """[1 or positions, rotary_size / 2] float32, as precise as checkpoints were trained with. positions: float32."""
    scaling = spec.scaling
    whole = spec.head_dim if isinstance(scaling, Proportional) else spec.rotary_size
    exponent = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32) / whole
    if isinstance(scaling, DynamicNTK):
        length = (positions + 1).clamp(min=scaling.max_position)
        grown = 1 + scaling.factor * (length / scaling.max_position - 1)
        theta = spec.theta * grown ** (spec.rotary_size / (spec.rotary_size - 2))
        return 1.0 / theta[:, None] ** exponent
    inverse = 1.0 / spec.theta**exponent
    if isinstance(scaling, LinearScaling | Proportional):
        inverse = inverse / scaling.factor
    elif isinstance(scaling, Llama3):
        wavelength = 2 * math.pi / inverse
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position / wavelength
        kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).to(torch.float32)
        inverse = inverse * ((1 - kept) / scaling.factor + kept)
    elif isinstance(scaling, Yarn):
        kept = 1 - _ramp(spec, scaling)
        inverse = inverse / scaling.factor * (1 - kept) + inverse * kept
    return inverse[None]


def _ramp(spec: RopeSpec, yarn: Yarn) -> Tensor:
    """[rotary_size / 2]: 0 for dimensions that keep their frequency, 1 for those whose frequency is divided."""

    def dimension(turns: float) -> float:
        """The one that turns so often in the original context."""
        return (
            spec.rotary_size * math.log(yarn.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_size - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(spec.rotary_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_table(spec: RopeSpec, num_positions: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """Tables of `num_positions` rows; sized by the target's context, never by the draft's config (vllm-48894)."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angle = positions[:, None] * inverse_frequencies(spec, positions)
    factor = spec.scaling.attention_factor if isinstance(spec.scaling, Yarn) else 1.0
    cos, sin = angle.cos() * factor, angle.sin() * factor
    nope = num_positions, (spec.head_dim - spec.rotary_size) // 2
    cos, sin = torch.cat([cos, torch.ones(nope)], dim=-1), torch.cat([sin, torch.zeros(nope)], dim=-1)
    table = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)
    return RopeTable(table.to(device, dtype), _query_scale(spec.query_scale, num_positions, dtype, device))


def _query_scale(
    scale: QueryScale | None, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if scale is None or num_positions - 1 + scale.offset < scale.length:
        return None
    times = (torch.arange(num_positions, dtype=torch.float32) + scale.offset) / scale.length
    return (1 + scale.beta * torch.log(1 + times.floor())).to(device, dtype)


def head_order(spec: RopeSpec) -> tuple[int, ...] | None:
    """Which of a checkpoint's dimensions of a head stands at each of ours; None if they stand there already.

    Each half begins with its half of the pairs with RoPE, and ends with half of what has no RoPE.
    """
    if isinstance(spec.scaling, Proportional):
        return None
    half, nope = spec.rotary_size // 2, range(spec.rotary_size, spec.head_dim)
    first = range(0, spec.rotary_size, 2) if spec.interleaved else range(half)
    second = range(1, spec.rotary_size, 2) if spec.interleaved else range(half, spec.rotary_size)
    order = (*first, *nope[: len(nope) // 2], *second, *nope[len(nope) // 2 :])
    return None if order == tuple(range(spec.head_dim)) else order


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] in place by the angles at its positions."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x.mul_(rotation.cos).addcmul_(swapped, rotation.sin)
