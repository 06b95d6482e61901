"""The functions that a fault can replace, in one table built at construction.

Each is pure and small, and each is where a memory fault of the field once sat. `debug/faults.py` holds the buggy twins;
nothing else replaces an entry.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.kv import PageTable, commit_tail
from treetop.kernels.tree import next_level_mask
from treetop.spec.round_ops import Parts, draft_positions, extend_mask, feature_nodes
from treetop.spec.verify import accept
from treetop.types.ids import GroupName, PageId
from treetop.types.layout import Layout, SpecShape
from treetop.types.sampling import FinishReason
from treetop.types.tree import Accepted, DraftTree


def pad_rows(rows: Sequence[int], bucket: int, dummy: int, previous: Sequence[int]) -> list[int]:
    """The row list of a bucket: the batch, then the dummy row. `previous`, what the buffer held before, is not used."""
    assert len(previous) >= bucket >= len(rows)
    return [*rows, *[dummy] * (bucket - len(rows))]


def hand_out(tensor: Tensor, memory: Tensor) -> Tensor:
    """What outlives the round's buffers: a copy in `memory`, never a view (sgl-23037). It does not wait."""
    return memory.copy_(tensor, non_blocking=True)


def table_of(tables: Mapping[GroupName, PageTable], group: GroupName) -> PageTable:
    """The page table that a group's layers read: their own (sgl-24617)."""
    return tables[group]


def draft_tail_width(level: int, shape: SpecShape) -> int:
    """Tail columns that a draft level sees: k for each level up to its own (sgl-27360)."""
    return (level + 1) * shape.topk


def extend_extent(committed: Tensor, width: int) -> Tensor:
    """Positions that draft extend finds in the pages: the committed ones; its own are in the tail (sgl-26628)."""
    assert width > 0
    return committed


def pages_to_free(pages: Sequence[PageId], num_tokens: int, page_size: int) -> Sequence[PageId]:
    """Pages of a lease that its release gives back: all, also a last one that is not full (sgl-31616)."""
    assert len(pages) * page_size >= num_tokens
    return pages


def shared_groups(groups: Sequence[GroupName]) -> Sequence[GroupName]:
    """Groups whose cached pages a prefix hit takes over: every one, the draft's too (sgl-19796)."""
    return groups


def next_prompt_token(ids: Sequence[int], end: int) -> int | None:
    """The token after a chunk that ends at `end`, from prompt and output alike; None at the end (sgl-26329)."""
    return ids[end] if end < len(ids) else None


def first_stop(new_ids: Sequence[int], stop_ids: AbstractSet[int], limit: int) -> tuple[int, FinishReason] | None:
    """The earliest stop among new tokens, as (number of tokens emitted, reason), or None.

    stop_ids: EOS and the request's own. limit: tokens that max_tokens and the context still allow. At the same token a
    stop wins over the limit (sgl-33758).
    """
    if len(new_ids) < limit and stop_ids.isdisjoint(new_ids):
        return None
    for index, token in enumerate(new_ids):
        if token in stop_ids:
            return index + 1, "stop"
        if index + 1 >= limit:
            return index + 1, "length"
    return None


@dataclass(frozen=True, slots=True)
class Pure:
    """The table. layout: the class of the capacity algebra."""

    layout: type[Layout] = Layout
    pad_rows: Callable[[Sequence[int], int, int, Sequence[int]], list[int]] = pad_rows
    hand_out: Callable[[Tensor, Tensor], Tensor] = hand_out
    table_of: Callable[[Mapping[GroupName, PageTable], GroupName], PageTable] = table_of
    draft_tail_width: Callable[[int, SpecShape], int] = draft_tail_width
    draft_positions: Callable[[Tensor, int, int], Tensor] = draft_positions
    next_level_mask: Callable[[Tensor, Tensor], Tensor] = next_level_mask
    extend_extent: Callable[[Tensor, int], Tensor] = extend_extent
    extend_mask: Callable[[int, torch.device], Tensor] = extend_mask
    feature_nodes: Callable[[Tensor, int], Tensor] = feature_nodes
    commit: Callable[[Tensor, Tensor, Tensor, Tensor], None] = commit_tail
    accept: Callable[[DraftTree, Tensor, Tensor, int], Accepted] = accept
    pages_to_free: Callable[[Sequence[PageId], int, int], Sequence[PageId]] = pages_to_free
    shared_groups: Callable[[Sequence[GroupName]], Sequence[GroupName]] = shared_groups
    next_prompt_token: Callable[[Sequence[int], int], int | None] = next_prompt_token
    first_stop: Callable[[Sequence[int], AbstractSet[int], int], tuple[int, FinishReason] | None] = first_stop

    @property
    def parts(self) -> Parts:
        """Those of the small operations of a round."""
        return Parts(
            self.draft_positions,
            self.next_level_mask,
            self.extend_mask,
            self.feature_nodes,
            self.commit,
            self.accept,
        )
