"""What plain rounds leave to a later draft extend: see `kernels.tree.deferred`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.engine.features.feature import RowFeature
from treetop.kernels.tree.deferred import DeferredPairs
from treetop.types.layout import Layout
from treetop.types.messages import RowSetup


@dataclass(frozen=True, slots=True)
class RowDeferral(RowFeature):
    """In the list where plain rounds may put draft extend off."""

    pairs: DeferredPairs

    @classmethod
    def make(cls, layout: Layout, width: int, dtype: torch.dtype, zeros: Zeros) -> "RowDeferral":
        """width: of the target's states that the drafter reads."""
        n, most, long = layout.num_rows, layout.max_deferred, torch.int64
        return cls(DeferredPairs(zeros((n,), long), zeros((n, most), long), zeros((n, most, width), dtype)))

    @property
    def tables(self) -> Sequence[Tensor]:
        return self.pairs.tables

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        self.pairs.count.index_fill_(0, rows, 0)  # `[rows] = 0` copies a number of the host's, and waits for the device
