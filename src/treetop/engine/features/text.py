"""The text of rows, for a drafter that reads it: see `kernels.tree.row_text`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.engine.features.feature import AcceptedRound, NewRoots, RowFeature
from treetop.kernels.table import Ops
from treetop.kernels.tree.row_text import NOTHING, PastTexts, remember
from treetop.types.layout import Layout
from treetop.types.messages import RowSetup


@dataclass(frozen=True, slots=True)
class RowText(RowFeature):
    """tokens: of each row up to its root, [num_rows, width] int32; the last column takes what must go nowhere.
    past: texts that rows held before; None where none are kept.
    owners: of each row's text, [num_rows] int64, by which past ones are told apart.
    committed: [num_rows] int64, the state's own.
    """

    tokens: Tensor
    past: PastTexts | None
    owners: Tensor
    committed: Tensor

    @classmethod
    def make(cls, layout: Layout, committed: Tensor, past_tokens: int, zeros: Zeros) -> "RowText":
        """past_tokens: of past texts, 0 for none."""
        tokens = zeros((layout.num_rows, layout.max_positions + 2), torch.int32)  # the root too, and one for nothing
        past = None
        if past_tokens:
            size = (past_tokens + 1,)
            past = PastTexts(zeros(size, torch.int32), zeros(size, torch.int64), zeros((1,), torch.int64))
            past.tokens.fill_(NOTHING)
        return cls(tokens, past, zeros((layout.num_rows,), torch.int64), committed)

    @property
    def tables(self) -> Sequence[Tensor]:
        return (self.tokens[:, :-1],)

    def columns(self, setups: Sequence[RowSetup]) -> list[Sequence[int]]:
        """Whose requests are, and their committed text, from the prefix cache."""
        return [[setup.owner for setup in setups], *(setup.prefix_ids for setup in setups)]

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        if self.past is not None:
            for row in rows.split(1):
                held = self.committed[row]
                self.past.keep(self.tokens[row][0], torch.where(held > 0, held + 1, 0), self.owners[row])
        self.owners[rows] = next(columns)
        for setup, ids in zip(setups, columns, strict=False):
            self.tokens[setup.row, : len(ids)] = ids.to(self.tokens.dtype)

    def rooted(self, ops: Ops, of: NewRoots) -> None:
        if of.prompt is not None:
            lines = of.prompt
            remember(self.tokens, lines.rows, lines.positions, lines.tokens, lines.valid)
        live = (of.rows != len(self.tokens) - 1)[:, None]
        remember(self.tokens, of.rows, of.at[:, None], of.tokens[:, None], live)

    def accepted(self, ops: Ops, of: AcceptedRound) -> None:
        remember(self.tokens, of.paths.rows, of.places.path + 1, of.accepted.tokens, of.paths.kept)
