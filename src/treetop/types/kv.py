"""What a token leaves behind in a layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A token's K/V in one layer: `planes` of [heads, head_dim] numbers, which lie together.

    Keys are the first plane and values the last: grouped-query attention has two planes, compressed attention one that
    is both. The numbers are of the engine's dtype, or FP8.

    value_dim: how many of the last plane's first numbers are the value; None is all.
    index_dim: how many of a plane's last numbers are no key's but an indexer's, which chooses what sparse attention
        reads.
    fp8: numbers are e4m3, each times a scale of its layer, plane and head.
    """

    planes: int
    heads: int
    head_dim: int
    value_dim: int | None = None
    index_dim: int = 0
    fp8: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.planes, self.heads, self.head_dim

    @property
    def numbers(self) -> int:
        """How many a token takes in a layer."""
        return self.planes * self.heads * self.head_dim

    def itemsize(self, engine: int) -> int:
        """Bytes of a number. engine: of one of the engine's dtype."""
        return 1 if self.fp8 else engine

    @property
    def output_dim(self) -> int:
        """Numbers of a head that attention gives."""
        return self.head_dim if self.value_dim is None else self.value_dim


def paired(kv_heads: int, head_dim: int) -> KVFormat:
    """Keys and values apart."""
    return KVFormat(2, kv_heads, head_dim)


def compressed(rank: int, turned: int) -> KVFormat:
    """One plane that all heads share: a latent, which is the value too, and a key's part that turns."""
    return KVFormat(1, 1, rank + turned, rank)
