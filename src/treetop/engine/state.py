"""Device state by request row. The last row is the dummy request: null pages, nothing committed, for ever."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.kernels.kv import PageTable
from treetop.kernels.rows import DraftState, RowTables
from treetop.kernels.sampling import WarpParams
from treetop.types.ids import GroupName
from treetop.types.layout import Layout
from treetop.types.messages import PageEdit, RowSetup

_ANY_VOCABULARY = 2**31 - 1
"""A larger top-k means the same."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Tables of `num_rows` rows, written in place, never rebound.

    page_tables: group -> its table, [num_rows, page_columns] int32. committed: [num_rows] int64, tokens whose K/V are
    in the pages of every group. root: [num_rows] int64, the token after them, whose K/V are in none.
    """

    page_tables: dict[GroupName, PageTable]
    committed: Tensor
    root: Tensor
    seed: Tensor
    params: WarpParams
    draft: DraftState | None

    def apply_edits(self, edits: tuple[PageEdit, ...]) -> None:
        """Write page-table cells."""
        for group, table in self.page_tables.items():
            mine = [edit for edit in edits if edit.group == group]
            if mine:
                cells = torch.tensor([(e.row, e.column, e.page) for e in mine], device=table.data.device)
                table.data[cells[:, 0], cells[:, 1]] = cells[:, 2].to(torch.int32)

    def forget_pages(self, rows: list[int]) -> None:
        """Level 3: fill the tables of rows about to be set up with what no page is."""
        for table in self.page_tables.values():
            table.data[rows] = torch.iinfo(torch.int32).min

    def apply_setups(self, setups: tuple[RowSetup, ...]) -> None:
        """Move requests into rows: every per-request field is written, whatever the row held before."""
        if not setups:
            return
        device = self.committed.device
        rows = torch.tensor([s.row for s in setups], device=device)
        fields: list[tuple[Tensor, list[int] | list[float]]] = [
            (self.committed, [s.committed for s in setups]),
            (self.seed, [s.seed for s in setups]),
            (self.params.temperature, [s.params.temperature for s in setups]),
            (self.params.top_k, [min(max(s.params.top_k, 0), _ANY_VOCABULARY) for s in setups]),
            (self.params.top_p, [s.params.top_p for s in setups]),
            (self.params.min_p, [s.params.min_p for s in setups]),
        ]
        for table, values in fields:
            table[rows] = torch.tensor(values, dtype=table.dtype, device=device)

    def warp_params(self, rows: Tensor) -> WarpParams:
        """Sampling parameters of `rows` [rows] int64."""
        p = self.params
        return WarpParams(p.temperature[rows], p.top_k[rows], p.top_p[rows], p.min_p[rows])

    @property
    def tables(self) -> RowTables:
        """What a round reads at its start and writes at its end."""
        return RowTables(self.committed, self.root, self.draft)


def make_state(layout: Layout, draft_hidden: int | None, dtype: torch.dtype, zeros: Zeros) -> RowState:
    """Zeroed tables; draft_hidden None without a draft head."""
    n, long, real = layout.num_rows, torch.int64, torch.float32
    draft = None
    if draft_hidden is not None:
        k = layout.max_topk
        draft = DraftState(zeros((n, k), long), zeros((n, k), real), zeros((n, draft_hidden), dtype))
    top_p = zeros((n,), real)
    top_p.fill_(1.0)
    columns = layout.page_columns
    return RowState(
        page_tables={name: PageTable(name, zeros((n, columns), torch.int32)) for name in layout.token_groups},
        committed=zeros((n,), long),
        root=zeros((n,), long),
        seed=zeros((n,), long),
        params=WarpParams(zeros((n,), real), zeros((n,), long), top_p, zeros((n,), real)),
        draft=draft,
    )
