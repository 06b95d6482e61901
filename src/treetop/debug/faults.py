"""Named faults: each puts a past bug of the field back by replacing one entry of `Pure` with its buggy twin.

Never active unless named, by `TREETOP_FAULT` or by a caller that passes `fault(name).pure`. The identifiers are those
of the reports; `docs/testing.md` lists which guard catches which.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treetop.debug.two_group import ZERO_AFTER_ZERO
from treetop.engine.pure import Pure
from treetop.kernels.kv import PageTable
from treetop.kernels.tree import next_level_mask
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL, WINDOW, GroupName, PageId
from treetop.types.layout import Layout, SpecShape
from treetop.types.sampling import FinishReason
from treetop.types.tree import Accepted, DraftTree

ENVIRONMENT = "TREETOP_FAULT"


@dataclass(frozen=True, slots=True)
class Fault:
    """A bug put back.

    summary: what goes wrong. level: the check level whose guard catches it; None if the visibility decoder or a
    comparison of outputs must. guard: text that the guard's error holds. options: engine options it needs to do harm.
    seed: of the two-group pair that it needs to do harm; None is the embedded pair.
    """

    name: str
    summary: str
    replace: Mapping[str, Any]
    guard: str
    level: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def pure(self) -> Pure:
        """The table with this fault in it."""
        return replace(Pure(), **self.replace)


def active_fault(environment: Mapping[str, str]) -> Pure:
    """The table that the environment asks for; says so loudly if it holds a fault."""
    name = environment.get(ENVIRONMENT)
    if not name:
        return Pure()
    found = fault(name)
    _announce(found.name, found.summary)
    return found.pure


@cache
def _announce(name: str, summary: str) -> None:
    """One line on stderr, once a process."""
    print(f"treetop: FAULT {name} IS ACTIVE ({ENVIRONMENT}): {summary}", file=sys.stderr)


def fault(name: str) -> Fault:
    """A fault by name. Raises ConfigError listing the known ones."""
    if name not in FAULTS:
        raise ConfigError(f"{ENVIRONMENT}: no fault {name!r}; known are {', '.join(FAULTS)}")
    return FAULTS[name]


# ---------------------------------------------------------------- the buggy twins


def _all_levels_wide(level: int, shape: SpecShape) -> int:
    return shape.num_steps * shape.topk


class _NoTopkFactor(Layout):
    """The tail of the draft levels is sized without the factor k, while it is filled with it."""

    @property
    def draft_tail(self) -> int:
        return max(max(shape.num_steps - 1, 0) for shape in self.shapes)


class _NoHeadroom(Layout):
    """Page tables end at the context; a round at the wall goes past it."""

    @property
    def page_columns(self) -> int:
        return self.pages_for(self.max_context)


def _stale_padding(rows: Sequence[int], bucket: int, dummy: int, previous: Sequence[int]) -> list[int]:
    return [*rows, *previous[len(rows) : bucket]]


def _view(tensor: Tensor, memory: Tensor) -> Tensor:
    assert memory.shape == tensor.shape
    return tensor


def _full_table(tables: Mapping[GroupName, PageTable], group: GroupName) -> PageTable:
    return tables[FULL if group == WINDOW else group]


def _misses_itself(width: int, device: torch.device) -> Tensor:
    return torch.eye(width, dtype=torch.bool, device=device)


def _counts_twice(committed: Tensor, width: int) -> Tensor:
    return committed + width


def _one_too_far(committed: Tensor, level: int, k: int) -> Tensor:
    return (committed + level + 1)[:, None].expand(-1, k)


def _stride_of_path(path: Tensor, num_nodes: int) -> Tensor:
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    return (row * path.shape[1] + path).reshape(-1)


def _own_column(previous: Tensor, parent: Tensor) -> Tensor:
    column = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    return next_level_mask(previous, column)


def _in_place(pool: Tensor, tail: Tensor, source: Tensor, slots: Tensor) -> None:
    """Move entries inside the tail itself, last first: an early entry overwrites what a later one still reads."""
    rows, n = source.shape
    row = torch.arange(rows, device=source.device)
    for column in reversed(range(n)):
        tail[:, row, column] = tail[:, row, source[:, column]].clone()
    flat = tail[:, :rows, :n].flatten(1, 2)
    pool.index_copy_(1, slots.reshape(-1), flat)
    pool[:, 0].zero_()


def _whole_tree(tree: DraftTree, choice: Tensor, finite: Tensor, commit_width: int) -> Accepted:
    """As if siblings always differed: every node that agrees counts, however many there are at one depth."""
    rows, width = tree.tokens.shape
    wanted = tree.tokens == choice.gather(1, tree.parent)
    wanted[:, 0] = True
    on_path = ~(tree.mask & ~wanted[:, None, :]).any(dim=2)
    accept_len = on_path.sum(dim=1) - 1
    column = torch.where(on_path, tree.depth, commit_width)
    nodes = torch.arange(width, device=choice.device).expand(rows, -1)
    path = torch.zeros((rows, commit_width + 1), dtype=torch.int64, device=choice.device)
    path = path.scatter_(1, column, nodes)[:, :commit_width]
    tokens = choice.gather(1, path)
    sound = (finite | ~on_path).all(dim=1)
    return Accepted(path, accept_len, tokens, tokens.gather(1, accept_len[:, None])[:, 0], sound)


def _whole_pages_only(pages: Sequence[PageId], num_tokens: int, page_size: int) -> Sequence[PageId]:
    return pages[: num_tokens // page_size]


def _target_groups_only(groups: Sequence[GroupName]) -> Sequence[GroupName]:
    return [group for group in groups if group != DRAFT]


def _last_token_again(ids: Sequence[int], end: int) -> int | None:
    return ids[end - 1] if end < len(ids) else None


def _limit_first(new_ids: Sequence[int], stop_ids: Collection[int], limit: int) -> tuple[int, FinishReason] | None:
    if len(new_ids) >= limit:
        return limit, "length"
    stops = [index for index, token in enumerate(new_ids) if token in stop_ids]
    return (stops[0] + 1, "stop") if stops else None


def _registry(faults: Sequence[Fault]) -> dict[str, Fault]:
    return {each.name: each for each in faults}


FAULTS: dict[str, Fault] = _registry(
    [
        Fault(
            "sgl-27360",
            "each draft level fills the tail S levels wide",
            {"draft_tail_width": _all_levels_wide},
            "tail of phase draft",
            1,
        ),
        Fault(
            "sgl-27338",
            "the draft tail is sized without the factor k",
            {"layout": _NoTopkFactor},
            "tail of phase draft",
            1,
        ),
        Fault(
            "sgl-23037-padding",
            "the padding of the row list keeps the rows of an earlier, larger batch",
            {"pad_rows": _stale_padding},
            "padding of the row list",
            1,
        ),
        Fault(
            "sgl-23037-alias",
            "results are views of buffers that the next round overwrites",
            {"hand_out": _view},
            "shares memory with the round's buffers",
            1,
        ),
        Fault(
            "padding-siblings",
            "acceptance relies on siblings that differ, which the dummy row's do not",
            {"accept": _whole_tree},
            "padded batch",
            1,
            {"speculative_eagle_topk": 4, "speculative_num_steps": 1, "speculative_num_draft_tokens": 5},
            seed=ZERO_AFTER_ZERO,
        ),
        Fault(
            "sgl-24617",
            "window layers read the page table of the full group",
            {"table_of": _full_table},
            "were given the page table of full",
            1,
            seed=0,
        ),
        Fault(
            "sgl-26628-missed",
            "draft extend does not see the tokens it has just written",
            {"extend_mask": _misses_itself},
            "visibility",
            None,
        ),
        Fault(
            "sgl-26628-twice",
            "draft extend counts its own tokens as committed too",
            {"extend_extent": _counts_twice},
            "visibility",
            None,
            {"graphs": "sim"},
        ),
        Fault(
            "sgl-25015",
            "draft positions are one too far",
            {"draft_positions": _one_too_far},
            "visibility",
            None,
        ),
        Fault(
            "sgl-27545",
            "draft extend finds a row's features with stride S + 1 instead of T",
            {"feature_nodes": _stride_of_path},
            "detect_oob: feature_node",
            2,
        ),
        Fault(
            "sgl-26972",
            "page tables have no headroom at the context wall",
            {"layout": _NoHeadroom},
            "page_columns: need",
            1,
        ),
        Fault(
            "column-ancestors",
            "a branch of the draft tree sees its own column instead of its ancestors",
            {"next_level_mask": _own_column},
            "visibility",
            None,
        ),
        Fault(
            "in-place-compaction",
            "the accepted path is compacted inside the tail, last entry first",
            {"commit": _in_place},
            "commit: a committed slot",
            3,
        ),
        Fault(
            "unaligned-allocation",
            "a release gives back whole pages only, the last partial page is leaked",
            {"pages_to_free": _whole_pages_only},
            "leased",
            None,
        ),
        Fault(
            "prefix-without-draft",
            "a prefix hit shares the target's pages but not the draft's",
            {"shared_groups": _target_groups_only},
            "prefix hit",
            1,
            {"radix_cache": True},
        ),
        Fault(
            "chunk-tail",
            "the draft's last slot of a chunk holds a wrong next token",
            {"next_prompt_token": _last_token_again},
            "promised by the chunk before",
            1,
            {"chunked_prefill_size": 8},
        ),
        Fault(
            "limit-before-stop",
            "max_tokens is checked before EOS in the tokens of one round",
            {"first_stop": _limit_first},
            "emitted tokens",
            1,
        ),
    ]
)
