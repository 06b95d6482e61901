"""What plain rounds leave to a later draft extend: the tokens of a row that the target has run and the draft has not.

Plain tensor operations, no host sync. A row's last `count` committed tokens are in the target's groups and not yet in
the draft's; its slots 0 .. count - 1 hold, oldest first, what the draft needs of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeferredPairs:
    """Of each row, written in place, never rebound.

    count: [num_rows] int64.
    tokens: [num_rows, N] int64, the token after each.
    aux_hidden: [num_rows, N, width], the target's states at each.
    """

    count: Tensor
    tokens: Tensor
    aux_hidden: Tensor

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.count, self.tokens, self.aux_hidden


@dataclass(frozen=True, slots=True)
class ExtendPairs:
    """What a draft extend is given: n columns a row, of which those up to its last one count.

    first: [rows] int64, the tokens that the draft has of a row.
    last: [rows] int64, the column whose state is wanted.
    positions, tokens: [rows, n] int64.
    aux_hidden: [rows, n, width].
    """

    first: Tensor
    last: Tensor
    positions: Tensor
    tokens: Tensor
    aux_hidden: Tensor


def defer(pairs: DeferredPairs, rows: Tensor, dummy_row: int, token: Tensor, aux_hidden: Tensor) -> None:
    """A row's token becomes one more that the draft lacks. token: [rows] int64. aux_hidden: [rows, width].

    The dummy row keeps nothing. A row has a slot free: the host counts, and has it caught up before.
    """
    live, at = rows != dummy_row, pairs.count[rows]
    pairs.tokens[rows, at] = torch.where(live, token, 0)
    pairs.aux_hidden[rows, at] = torch.where(live[:, None], aux_hidden, 0)
    pairs.count[rows] = torch.where(live, at + 1, 0)


def deferred_pairs(pairs: DeferredPairs, rows: Tensor, committed: Tensor, width: int) -> tuple[ExtendPairs, Tensor]:
    """What rows have deferred, and how many: [rows] int64. committed: [rows] int64. width: columns, for all of it.

    Columns past a row's count are padding: position and token 0, states 0, for a former request's may be NaN.
    """
    count = pairs.count[rows]
    column, first = torch.arange(width, device=rows.device), committed - count
    kept = column < count[:, None]
    positions = torch.where(kept, first[:, None] + column, 0)
    tokens = torch.where(kept, pairs.tokens[rows, :width], 0)
    aux_hidden = torch.where(kept[:, :, None], pairs.aux_hidden[rows, :width], 0)
    return ExtendPairs(first, torch.where(count > 0, count - 1, 0), positions, tokens, aux_hidden), count
