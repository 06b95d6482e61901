"""The words of a hand-over: one worker prefills a request, another decodes it.

decode worker --what to prefill--> prefill worker: computes, packs pieces into slots
decode worker <--pulls the slots--                 and gives a slot back once its release is confirmed

Pages never meet the network. Host values only, which can cross a process boundary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from treetop.types.errors import CapacityError
from treetop.types.ids import GroupName, RequestId
from treetop.types.layout import KVGroup
from treetop.types.sampling import TokenLogprobs

ALIGNMENT = 16
"""Bytes: every stretch of a payload begins at a multiple."""


class SlotRef(NamedTuple):
    """A slot as it stood when it was offered. generation: bumped before the slot is used again."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start .. start + count` of a request whose prompt has `total`, which travel in one slot."""

    start: int
    count: int
    total: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def last(self) -> bool:
        """The row's record comes with it."""
        return self.end == self.total

    def first_seen(self, window: int | None) -> int:
        """The first of its tokens whose K/V travel for a group: a query at `total` or later can still see it.

        All of them without a window. Earlier ones may be gone where they were computed, and are never looked at where
        they would go. So a request that got only some of its pieces can go on by itself only from where its first piece
        began, if a group has a window; without windows from the end of the last whole piece.
        """
        if window is None:
            return self.start
        return max(self.start, min(self.end, self.total - window + 1))


class Stretch(NamedTuple):
    """Bytes of a payload under one checksum: a KV head of a group, all its layers; or the record, group None.

    offset: from the slot's first byte. num_bytes: without the zeros up to the next multiple of `ALIGNMENT`.
    """

    group: GroupName | None
    head: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What a piece's slot holds: [group][kv_head][layer][token][plane][head_dim], then the last piece's record.

    groups: those of one rank, in their layout's order. itemsize: bytes of a number. record_bytes: of a row's record.
    Head-major, so that ranks of another size pull ranges of heads; by tokens, so that page sizes may differ.
    """

    groups: tuple[KVGroup, ...]
    itemsize: int
    record_bytes: int

    def stretches(self, piece: Piece) -> tuple[Stretch, ...]:
        """In the order of a payload, which is that of its checksums."""
        counts = tuple(piece.end - piece.first_seen(group.window) for group in self.groups)
        return _stretches(self, counts, piece.last)

    def of_rank(self, size: int) -> "Payload":
        """What one of `size` ranks has of a whole model's; with more ranks than heads neighbours have the same."""
        return _of_rank(self, size)

    def num_bytes(self, piece: Piece) -> int:
        """From the slot's first byte to the payload's last, filled up to `ALIGNMENT`."""
        end = self.stretches(piece)[-1]
        return _aligned(end.offset + end.num_bytes)

    def tokens_per_slot(self, slot_bytes: int) -> int:
        """Most tokens of a piece, whichever they are. Raises CapacityError if a slot does not hold one."""
        fixed = _aligned(self.record_bytes) + (ALIGNMENT - 1) * sum(group.kv.heads for group in self.groups)
        per_token = sum(group.kv.heads * self._head_bytes(group) for group in self.groups)
        if slot_bytes < fixed + per_token:
            raise CapacityError(
                f"handover_slot_bytes: need {fixed + per_token} = record and alignment {fixed} + a token {per_token},"
                f" have {slot_bytes}; raise --handover-slot-bytes"
            )
        return (slot_bytes - fixed) // per_token

    def _head_bytes(self, group: KVGroup) -> int:
        """Of one token and one KV head, in all layers."""
        return group.num_layers * group.kv.planes * group.kv.head_dim * self.itemsize


@lru_cache(maxsize=64)
def _stretches(payload: Payload, counts: tuple[int, ...], last: bool) -> tuple[Stretch, ...]:
    """Pieces of a prompt have the same but for the last one. counts: tokens of each group."""
    found, offset = [], 0
    for group, count in zip(payload.groups, counts, strict=True):
        size = count * payload._head_bytes(group)
        for head in range(group.kv.heads):
            found.append(Stretch(group.name, head, offset, size))
            offset = _aligned(offset + size)
    if last:
        found.append(Stretch(None, 0, offset, payload.record_bytes))
    return tuple(found)


@lru_cache(maxsize=64)
def _of_rank(payload: Payload, size: int) -> Payload:
    parts = [replace(each, kv=replace(each.kv, heads=max(each.kv.heads // size, 1))) for each in payload.groups]
    return replace(payload, groups=tuple(parts))


def first_head(group: KVGroup, rank: int, size: int) -> int:
    """Of a whole group's heads the first that a rank of `size` has."""
    return rank * group.kv.heads // size


class FirstToken(NamedTuple):
    """What the prompt's last chunk sampled: the root. logprobs: if the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


# ---------------------------------------------------------------- what a scheduler tells its desk


class Admitted(NamedTuple):
    """Decode: a request has a row, and waits for its K/V from `start` on, which the prefix cache does not have."""

    request_id: RequestId
    start: int


class Imported(NamedTuple):
    """Decode: what was in landing slot `slot` is in the row's pages, or was refused; the slot is free again.

    Also if the request has ended meanwhile.
    """

    request_id: RequestId
    slot: int


class Computed(NamedTuple):
    """Prefill: the pages hold `num_tokens` tokens. first: once these are all."""

    request_id: RequestId
    num_tokens: int
    first: FirstToken | None = None


class Packed(NamedTuple):
    """Prefill: slot `slot` holds this piece. checksums: of each stretch, in the payload's order; none if it was not
    packed, because the request has ended. The slot is written no more.
    """

    request_id: RequestId
    slot: int
    piece: Piece
    checksums: tuple[int, ...]


class Gone(NamedTuple):
    """A request has ended, or is no more the desk's: aborted, retracted, failed. Exports or imports of it that are in
    flight still end with `Packed` or `Imported`, unless the engine has failed.
    """

    request_id: RequestId


DecodeEvent = Admitted | Imported | Gone
PrefillEvent = Computed | Packed | Gone


class Schema(NamedTuple):
    """What two workers must have in common, so that one's K/V and records are the other's.

    wire: version of the messages. target, draft: fingerprints of the checkpoints. groups, record: each group and each
    field of a record in words. shape: k, S, T. slot_bytes: a piece that fits one's slot must fit the other's.
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

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def difference(self, other: "Schema") -> str | None:
        """The first field in which another differs, with both values; None if there is none."""
        for name, mine, theirs in zip(self._fields, self, other, strict=True):
            if mine != theirs:
                return f"{name}: {_short(mine)} here, {_short(theirs)} there"
        return None


def words_of_groups(groups: Sequence[KVGroup]) -> tuple[str, ...]:
    """Groups of the whole model, all ranks' heads, as a schema has them."""
    return tuple(
        f"{each.name}: {each.num_layers} layers, {each.kv.planes} planes, {each.kv.heads} heads of {each.kv.head_dim},"
        f" window {each.window}"
        for each in groups
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
