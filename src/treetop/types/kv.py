"""What a token leaves behind in a layer."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PartDtype = Literal["float8_e4m3fn", "bfloat16", "float16", "float32", "float64", "int16"]
_BYTES: dict[PartDtype, int] = {
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int16": 2,
}


class KVPart(NamedTuple):
    """Numbers of a plane that are stored alike.

    numbers: how many.
    group: of so many numbers each the largest is written as the largest of the dtype, and a float32 factor, which lies
        behind all numbers of the part, brings them back; 0 is none.
    """

    numbers: int
    dtype: PartDtype
    group: int = 0

    @property
    def num_bytes(self) -> int:
        return self.numbers * _BYTES[self.dtype] + 4 * (self.numbers // self.group if self.group else 0)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A token's K/V in one layer: `planes` of [heads, head_dim] numbers, which lie together.

    Keys are the first plane and values the last: grouped-query attention has two planes, compressed attention one that
    is both. The numbers are of the engine's dtype, or FP8. Or a plane is stored in parts, as bytes, each in a way of
    its own: so that a library can read it (`attention.contract.BackendSpec.stores`).

    value_dim: how many of the last plane's first numbers are the value; None is all.
    index_dim: how many of a plane's last numbers are no key's but an indexer's, which chooses what sparse attention
        reads.
    fp8: numbers are e4m3, each times a scale of its layer, plane and head.
    parts: of a plane, one behind the other, `head_dim` numbers together; () where all its numbers are stored alike.
    """

    planes: int
    heads: int
    head_dim: int
    value_dim: int | None = None
    index_dim: int = 0
    fp8: bool = False
    parts: tuple[KVPart, ...] = ()

    def __post_init__(self) -> None:
        assert not self.parts or sum(part.numbers for part in self.parts) == self.head_dim
        assert not any(part.group and part.numbers % part.group for part in self.parts)

    @property
    def width(self) -> int:
        """What is stored of a head's plane: numbers, or bytes where it is stored in parts."""
        return sum(part.num_bytes for part in self.parts) if self.parts else self.head_dim

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what is stored."""
        return self.planes, self.heads, self.width

    @property
    def numbers(self) -> int:
        """How many of them a token takes in a layer."""
        return self.planes * self.heads * self.width

    def itemsize(self, engine: int) -> int:
        """Bytes of one of them. engine: of a number of the engine's dtype."""
        return 1 if self.fp8 or self.parts else engine

    @property
    def output_dim(self) -> int:
        """Numbers of a head that attention gives."""
        return self.head_dim if self.value_dim is None else self.value_dim


def paired(kv_heads: int, head_dim: int) -> KVFormat:
    """Keys and values apart."""
    return KVFormat(2, kv_heads, head_dim)


def compressed(rank: int, rope_dim: int) -> KVFormat:
    """One plane that all heads share: a latent, which is the value too, and a key's part with RoPE."""
    return KVFormat(1, 1, rank + rope_dim, rank)


def expert_ids(count: int) -> KVFormat:
    """No K/V, but `count` ids of experts, in whole words of 32 bits."""
    count += count % 2
    return KVFormat(1, 1, count, parts=(KVPart(count, "int16"),))
