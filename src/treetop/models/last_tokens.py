"""What a forward is read of where few of its states are: once all K/V are written, its last layer goes on with these.

tokens of a prompt --- layers ---> K/V of all --- last layer's output and feed-forward ---> states of the last alone
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.table import Ops


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Of the first lines of a batch the token whose state is wanted; of the others none is.

    columns: [lines] int64.
    """

    columns: Tensor
    ops: Ops

    def of(self, x: Tensor) -> Tensor:
        """x: [rows, n, width]. Returns [lines, 1, width]."""
        return self.ops.pick(x[: len(self.columns)], self.columns)[:, None]

    def of_parts(self, parts: Tensor) -> Tensor:
        """Of the parts of a sum. parts: [parts, rows, n, width]. Returns [parts, lines, 1, width]."""
        return torch.stack([self.of(part) for part in parts])
