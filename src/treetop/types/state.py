"""What layers with a recurrence keep of a row."""

from dataclasses import dataclass
from math import prod

from treetop.types.errors import ConfigError
from treetop.types.ids import GroupName


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers of one kind of recurrence, whose states lie by row: no pages, and of one size however long a row is.

    A row keeps in each layer the state [heads, key_dim, value_dim], the convolution's last taps - 1 inputs, and the
    updates of the tokens that are not in the state yet, at most as many as a round can commit.

    channels: of the convolution's input; 0 without one, which is taps 1.
    heads: of values; 0 for a convolution alone. key_heads: key_heads divides heads, and value head i reads key head
        i // (heads // key_heads).
    delta: what the state has for a key already is subtracted from the key's value (the delta rule).
    per_channel: decays are numbers of [heads, key_dim], else of [heads].
    parts: channels of the convolution's parts, of each of which ranks have a share; () for queries, keys and values.

    Numbers of states and updates are of float32, or of the engine's dtype if that is wider; those of convolutions are
    of the engine's dtype. element_size: bytes of one of these.
    """

    name: GroupName
    num_layers: int
    channels: int
    taps: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    per_channel: bool
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = (self.channels, self.heads, self.key_heads, self.key_dim, self.value_dim)
        if self.num_layers < 1 or self.taps < 1 or min(counts) < 0 or (self.channels == 0) != (self.taps == 1):
            raise ConfigError(
                f"no recurrence has layers {self.num_layers}, taps {self.taps}, channels {self.channels}, heads"
                f" {self.heads} of {self.key_heads} key heads, key {self.key_dim}, value {self.value_dim}"
            )
        if self.heads and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ConfigError(f"{self.heads} heads of a recurrence cannot share {self.key_heads} key heads evenly")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a row in one layer."""
        return self.heads, self.key_dim, self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of a row in one layer."""
        return self.channels, self.taps - 1

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the convolution's parts."""
        keys = self.key_heads * self.key_dim
        return self.parts or (keys, keys, self.heads * self.value_dim)

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Of a token in one layer."""
        return (self.heads, self.key_dim) if self.per_channel else (self.heads,)

    @property
    def update_numbers(self) -> int:
        """Numbers of what a token adds to one layer's state: a key, a value's difference, a decay."""
        if not self.heads:
            return 0
        return self.key_heads * self.key_dim + self.heads * self.value_dim + prod(self.decay_shape)

    def row_bytes(self, element_size: int) -> int:
        """Bytes of a row's states and convolutions: layers x (heads x key x value x 4 + channels x (taps - 1) x 2),
        for an engine in 16 bits.
        """
        state, conv = prod(self.state_shape), prod(self.conv_shape)
        return self.num_layers * (state * state_itemsize(element_size) + conv * element_size)

    def pending_bytes(self, commit_width: int, element_size: int) -> int:
        """Bytes of the updates that a row's state does not have yet: layers x commit width x (k + d + g)."""
        return self.num_layers * commit_width * self.update_numbers * state_itemsize(element_size)

    def stash_bytes(self, nodes: int, element_size: int) -> int:
        """Bytes of what a round keeps of `nodes`: layers x nodes x (k + d + g, and the convolution's input)."""
        of_node = self.update_numbers * state_itemsize(element_size) + self.channels * element_size
        return self.num_layers * nodes * of_node


def state_itemsize(element_size: int) -> int:
    """Bytes of a number of a state. element_size: of one of the engine's dtype."""
    return max(element_size, 4)
