"""Layers that keep a state by row, but for gated delta nets (`config.LinearSpec`): their sizes as data.

A spec says what its layers keep (`state`), what one of several ranks computes (`of_rank`), and what checkpoints call
the block of its tensors (`block`). Its layer is in a file of its own, see `models.attention`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, TypeVar

from treetop.types.errors import ConfigError
from treetop.types.ids import GroupName
from treetop.types.state import StateGroup


class RecurrentSpec(Protocol):
    """See the module."""

    block: ClassVar[str]

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        """What so many layers of it keep of a row."""

    def of_rank(self: "S", size: int) -> "S":
        """What one of `size` ranks computes. Raises ConfigError if it cannot be divided."""


S = TypeVar("S", bound=RecurrentSpec)


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A short convolution between two gates (`models.short_convolution`); its state is a window of inputs.

    channels: of the convolution. taps: 2 and more. bias: of it and of both products.
    """

    block: ClassVar[str] = "conv"
    channels: int
    taps: int
    bias: bool = False

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        return StateGroup(
            name,
            num_layers,
            channels=self.channels,
            taps=self.taps,
            heads=0,
            key_heads=0,
            key_dim=0,
            value_dim=0,
            delta=False,
            per_channel=False,
            parts=(self.channels,),
        )

    def of_rank(self, size: int) -> "ConvSpec":
        if self.channels % size:
            raise ConfigError(f"--tp-size {size}: {self.channels} channels of a convolution cannot be divided")
        return replace(self, channels=self.channels // size)


@dataclass(frozen=True, slots=True)
class KimiSpec:
    """Kimi delta attention (`models.mixers.kimi_delta`): as many heads of keys as of values, of one width.

    narrow: products of decays and of the gate are of two matrices, with head_dim numbers between them.
    floor: no decay's logarithm is below it; None for decays without a bound.
    """

    block: ClassVar[str] = "self_attn"
    heads: int
    head_dim: int
    taps: int
    narrow: bool = True
    floor: float | None = None

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        return StateGroup(
            name,
            num_layers,
            channels=3 * self.heads * self.head_dim,
            taps=self.taps,
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            delta=True,
            per_channel=True,
        )

    def of_rank(self, size: int) -> "KimiSpec":
        if self.heads % size:
            raise ConfigError(f"--tp-size {size}: {self.heads} heads of Kimi delta attention cannot be divided")
        return replace(self, heads=self.heads // size)


@dataclass(frozen=True, slots=True)
class LightningSpec:
    """Lightning attention (`models.mixers.lightning`): as many heads of keys as of values, of one width.

    of_slopes: what the slopes of all heads are multiplied by in this layer.
    """

    block: ClassVar[str] = "self_attn"
    heads: int
    head_dim: int
    of_slopes: float

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        return StateGroup(
            name,
            num_layers,
            channels=0,
            taps=1,
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            delta=False,
            per_channel=False,
        )

    def of_rank(self, size: int) -> "LightningSpec":
        if size > 1:
            raise ConfigError(f"--tp-size {size}: lightning attention has a norm over all heads; use --tp-size 1")
        return self


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A layer of Mamba-2 (`models.mamba2`): head i of `heads` reads the key and query of group i * groups // heads.

    head_dim: of a value. state_dim: of a key, and of a query.
    taps: of the convolution of values, keys and queries; 2 and more. conv_bias: its.
    bias: of both products.
    limits: of a token's step.
    norm: whether the gate or the norm of a group comes first; None for the gate alone.
    norm_groups: of what the norm is taken, by parts; `groups` but where a norm is over all.
    scales: what z, values, keys, queries and steps are multiplied by.
    of_input: what the layer's input is multiplied by, and what its output is.
    """

    block: ClassVar[str] = "mamba"
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["gate first", "norm first"] | None = "gate first"
    norm_groups: int = 1
    norm_eps: float = 1e-5
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    of_input: float = 1.0
    of_output: float = 1.0

    @property
    def inner(self) -> int:
        """Numbers of all heads' values."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all groups' keys."""
        return self.groups * self.state_dim

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        return StateGroup(
            name,
            num_layers,
            channels=self.inner + 2 * self.keys,
            taps=self.taps,
            heads=self.heads,
            key_heads=self.groups,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
            delta=False,
            per_channel=False,
            parts=(self.inner, self.keys, self.keys),
        )

    def of_rank(self, size: int) -> "MambaSpec":
        """Whole groups of heads, with what is normed together."""
        if self.groups % size or (self.norm is not None and self.norm_groups % size):
            raise ConfigError(
                f"--tp-size {size}: {self.groups} groups of Mamba-2, whose norms are of {self.norm_groups} parts,"
                " cannot be divided; use --tp-size 1"
            )
        parts = max(self.norm_groups // size, 1)
        return replace(self, heads=self.heads // size, groups=self.groups // size, norm_groups=parts)
