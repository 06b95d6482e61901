"""The buggy twins of the named faults: each does what a past bug did, in the place of one ordinary function."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import TailColumns
from treetop.cache.kv_cache_manager import KVCacheManager, Lease
from treetop.engine.model_runner import ModelRunner, Prefix
from treetop.engine.state import RowState
from treetop.kernels.kv import PageTable
from treetop.kernels.tree.accept import MaskedDrafts
from treetop.kernels.tree.tree import next_level_mask
from treetop.scheduler.request import Request
from treetop.scheduler.rows import Rows
from treetop.speculative.draft import Level
from treetop.types.ids import DRAFT, FULL, WINDOW, GroupName
from treetop.types.layout import KVGroup, Layout
from treetop.types.phase import Phase
from treetop.types.sampling import FinishReason
from treetop.types.tree import Accepted, DraftTree

# ---------------------------------------------------------------- capacity


def all_levels_wide(level: Level, committed: Tensor, lead: int) -> tuple[Tensor, Tensor, TailColumns]:
    rows, k, own = level.mask.shape
    width = level.all_positions.shape[1]
    mask = F.pad(level.mask, (0, width - own))
    return level.all_positions, mask, TailColumns(rows, own - k, k, width)


def no_topk_factor(layout: Layout) -> int:
    """The tail of the draft levels is sized without the factor k, while it is filled with it."""
    return max(max(shape.num_steps - 1, 0) for shape in layout.shapes)


def no_headroom(layout: Layout) -> int:
    """Page tables end at the context; a round at the wall goes past it."""
    return layout.pages_for(layout.max_context)


# ---------------------------------------------------------------- rows and results


def stale_padding(_: Any) -> Callable[[Sequence[int], int, int], list[int]]:
    """Padding is what the row list held before."""
    held: list[int] = []

    def pad_rows(rows: Sequence[int], bucket: int, dummy: int) -> list[int]:
        before = [*held, *[0] * bucket]
        held[: max(bucket, len(rows))] = [*rows, *before[len(rows) : bucket]]
        return held[:bucket]

    return pad_rows


def view(tensor: Tensor, memory: Tensor) -> Tensor:
    assert memory.shape == tensor.shape
    return tensor


def full_table(state: RowState, group: GroupName) -> PageTable:
    return state.page_tables[FULL if group == WINDOW else group]


# ---------------------------------------------------------------- who sees whom


def misses_itself(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.bool)


def counts_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    """Draft extend's extent holds the tokens that are still in its tail."""

    def metadata(runner: ModelRunner, phase: Phase, group: KVGroup, prefix: Prefix, *queries: Tensor) -> Any:
        rows, kv_len, max_kv_len = prefix
        more = runner.layout.commit_width if phase is Phase.EXTEND else 0
        return real(runner, phase, group, (rows, kv_len + more, max_kv_len), *queries)

    return metadata


def one_too_far(committed: Tensor, level: int, k: int) -> Tensor:
    return (committed + level + 1)[:, None].expand(-1, k)


def stride_of_path(path: Tensor, num_nodes: int) -> Tensor:
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    return (row * path.shape[1] + path).reshape(-1)


def own_column(previous: Tensor, parent: Tensor) -> Tensor:
    column = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    return next_level_mask(previous, column)


# ---------------------------------------------------------------- acceptance and commit


def whole_tree(
    tree: DraftTree, choice: Tensor, finite: Tensor, commit_width: int, masked_drafts: MaskedDrafts | None = None
) -> Accepted:
    """As if siblings always differed: every node that agrees counts, however many there are at one depth."""
    rows, width = tree.tokens.shape
    wanted = tree.tokens == choice.gather(1, tree.parent)
    if masked_drafts is not None:
        wanted &= ~masked_drafts.of_tree()
    wanted[:, 0] = True
    on_path = ~(tree.mask & ~wanted[:, None, :]).any(dim=2)
    accept_len = on_path.sum(dim=1) - 1
    column = torch.where(on_path, tree.depth, commit_width)
    nodes = torch.arange(width, device=choice.device).expand(rows, -1)
    path = torch.zeros((rows, commit_width + 1), dtype=torch.int64, device=choice.device)
    path = path.scatter_(1, column, nodes)[:, :commit_width]
    tokens = choice.gather(1, path)
    sound = (finite | ~on_path).all(dim=1)
    return Accepted(path, accept_len, tokens, tokens.gather(1, accept_len[:, None])[:, 0], sound, choice)


def in_place(pool: Tensor, tail: Tensor, source: Tensor, slots: Tensor) -> None:
    """Move entries inside the tail itself, last first: an early entry overwrites what a later one still reads."""
    rows, n = source.shape
    row = torch.arange(rows, device=source.device)
    for column in reversed(range(n)):
        tail[:, row, column] = tail[:, row, source[:, column]].clone()
    flat = tail[:, :rows, :n].flatten(1, 2)
    pool.index_copy_(1, slots.reshape(-1), flat)
    pool[:, 0].zero_()


# ---------------------------------------------------------------- host


def whole_pages_only(real: Callable[..., None]) -> Callable[..., None]:
    """A request leaves without its last page if that is not full: nobody gives it back."""

    def leave(rows: Rows, request: Request, ids: Sequence[int]) -> None:
        assert request.running is not None
        for pages in request.running.lease.pages.values():
            del pages[request.num_ids // rows._layout.page_size :]
        real(rows, request, ids)

    return leave


def target_groups_only(real: Callable[..., None]) -> Callable[..., None]:
    """A prefix hit leaves the draft without pages."""

    def share(ledger: KVCacheManager, lease: Lease, group: GroupName) -> None:
        if group != DRAFT:
            real(ledger, lease, group)

    return share


def last_token_again(ids: Sequence[int], end: int) -> int | None:
    return ids[end - 1] if end < len(ids) else None


def limit_first(new_ids: Sequence[int], stop_ids: AbstractSet[int], limit: int) -> tuple[int, FinishReason] | None:
    if len(new_ids) >= limit:
        return limit, "length"
    stops = [index for index, token in enumerate(new_ids) if token in stop_ids]
    return (stops[0] + 1, "stop") if stops else None
