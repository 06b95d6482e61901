"""What a token leaves behind in a layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A token's K/V in one layer: `planes` of [heads, head_dim] numbers, which lie together.

    Keys are the first plane and values the last: grouped-query attention has two planes, compressed attention one that
    is both. The numbers are of the engine's dtype; a narrower format adds a scale for each plane and head.
    """

    planes: int
    heads: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.planes, self.heads, self.head_dim

    @property
    def numbers(self) -> int:
        """How many a token takes in a layer."""
        return self.planes * self.heads * self.head_dim


def paired(kv_heads: int, head_dim: int) -> KVFormat:
    """Keys and values apart."""
    return KVFormat(2, kv_heads, head_dim)
