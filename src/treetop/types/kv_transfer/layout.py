"""What lies where: the bytes of a KV chunk in a staging slot, the slots of a rank, and what two workers must share.

Pages never meet the network; slots do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from treetop.types.errors import CapacityError
from treetop.types.ids import GroupName
from treetop.types.kv_chunk import ALIGNMENT, KVChunk
from treetop.types.kv_transfer.transport import Memory, Range
from treetop.types.layout import KVGroup

USUAL_TOKENS = 512
"""Of a chunk that a message proposes room for."""


class SlotRef(NamedTuple):
    """A slot as it stood when it was offered. generation: bumped before the slot is used again."""

    slot: int
    generation: int


class Segment(NamedTuple):
    """Bytes of a slot under one checksum: a KV head of a group, all its layers; or the record, group None.

    offset: from the slot's first byte.
    num_bytes: without the zeros up to the next multiple of `ALIGNMENT`.
    """

    group: GroupName | None
    head: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """What a chunk's slot holds: [group][kv_head][layer][token][plane][head_dim], then the last chunk's record.

    groups: those of one rank, in their layout's order.
    itemsize: bytes of a number of the engine's dtype.
    record_bytes: of a row's record.

    Head-major, so that ranks of another size pull ranges of heads; by tokens, so that page sizes may differ.
    """

    groups: tuple[KVGroup, ...]
    itemsize: int
    record_bytes: int

    def segments(self, chunk: KVChunk) -> tuple[Segment, ...]:
        """In the order of their bytes, which is that of their checksums."""
        counts = tuple(chunk.end - chunk.first_seen(group.window) for group in self.groups)
        return _segments(self, counts, chunk.last)

    def of_rank(self, size: int) -> "ChunkLayout":
        """What one of `size` ranks has of a whole model's; with more ranks than heads neighbours have the same."""
        return _of_rank(self, size)

    def num_bytes(self, chunk: KVChunk) -> int:
        """From the slot's first byte to the last segment's last, filled up to `ALIGNMENT`."""
        end = self.segments(chunk)[-1]
        return _aligned(end.offset + end.num_bytes)

    def tokens_per_slot(self, slot_bytes: int) -> int:
        """Most tokens of a chunk, whichever they are. Raises CapacityError if a slot does not hold one."""
        fixed = _aligned(self.record_bytes) + (ALIGNMENT - 1) * sum(group.kv.heads for group in self.groups)
        per_token = sum(group.kv.heads * self._head_bytes(group) for group in self.groups)
        if slot_bytes < fixed + per_token:
            raise CapacityError(
                f"disaggregation_slot_bytes: need {fixed + per_token} = record (with states of recurrent layers) and"
                f" alignment {fixed} + a token {per_token}, have {slot_bytes}; raise --disaggregation-slot-bytes to"
                f" {_aligned(fixed + USUAL_TOKENS * per_token)}, for chunks of {USUAL_TOKENS} tokens, or to at least"
                f" {_aligned(fixed + per_token)}"
            )
        return (slot_bytes - fixed) // per_token

    def _head_bytes(self, group: KVGroup) -> int:
        """Of one token and one KV head, in all layers."""
        return group.bytes_per_token(self.itemsize) // group.kv.heads


@lru_cache(maxsize=64)
def _segments(layout: ChunkLayout, counts: tuple[int, ...], last: bool) -> tuple[Segment, ...]:
    """Chunks of a prompt have the same but for the last one. counts: tokens of each group."""
    found, offset = [], 0
    for group, count in zip(layout.groups, counts, strict=True):
        size = count * layout._head_bytes(group)
        for head in range(group.kv.heads):
            found.append(Segment(group.name, head, offset, size))
            offset = _aligned(offset + size)
    if last:
        found.append(Segment(None, 0, offset, layout.record_bytes))
    return tuple(found)


@lru_cache(maxsize=64)
def _of_rank(layout: ChunkLayout, size: int) -> ChunkLayout:
    parts = [replace(each, kv=replace(each.kv, heads=max(each.kv.heads // size, 1))) for each in layout.groups]
    return replace(layout, groups=tuple(parts))


def first_head(group: KVGroup, rank: int, size: int) -> int:
    """Of a whole group's heads the first that a rank of `size` has."""
    return rank * group.kv.heads // size


class Schema(NamedTuple):
    """What two workers must have in common, so that one's K/V and records are the other's.

    wire: version of the messages.
    target, draft: fingerprints of the checkpoints.
    groups, record: each group and each field of a record in words.
    shape: k, S, T.
    slot_bytes: a chunk that fits one's slot must fit the other's.
    exactness: of `--exactness`, and whose sums; K/V that a batch has rounded are not those of bits.
    """

    wire: int
    target: str
    draft: str
    dtype: str
    groups: tuple[str, ...]
    record: tuple[str, ...]
    shape: tuple[int, int, int]
    vocab_size: int
    slot_bytes: int
    exactness: str

    def difference(self, other: "Schema") -> str | None:
        """The first field in which another differs, with both values; None if there is none."""
        for name, mine, theirs in zip(self._fields, self, other, strict=True):
            if mine != theirs:
                return f"{name}: {_short(mine)} here, {_short(theirs)} there"
        return None


class Staging(NamedTuple):
    """The slots of rank `rank` of a worker of `size`.

    memory: all of them, one after the other.

    layout: of a chunk on all ranks together.
    """

    memory: Memory
    num_slots: int
    slot_bytes: int
    layout: ChunkLayout
    schema: Schema
    rank: int = 0
    size: int = 1

    @property
    def tokens_per_slot(self) -> int:
        return self.layout.of_rank(self.size).tokens_per_slot(self.slot_bytes)

    def range_of(self, slot: int) -> Range:
        return Range(slot * self.slot_bytes, self.slot_bytes)


def words_of_groups(groups: Sequence[KVGroup]) -> tuple[str, ...]:
    """Groups of the whole model, all ranks' heads, as a schema has them."""
    return tuple(
        f"{each.name}: {each.num_layers} layers, {each.kv.planes} planes, {each.kv.heads} heads of {each.kv.head_dim},"
        f" {'chunks of' if each.chunked else 'window'} {each.window}, {each.kv.index_dim} numbers of an indexer"
        f"{', FP8' if each.kv.fp8 else ''}{f', in parts {each.kv.parts}' if each.kv.parts else ''}"
        for each in groups
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
