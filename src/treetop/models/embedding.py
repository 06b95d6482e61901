"""Embeddings of tokens, by one rank or by several that each have a part of the vocabulary."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.fused import joined
from treetop.types.parallel import Parallel

Lookup = Callable[[Tensor], Tensor]
"""Embeddings [..., hidden] of tokens [...] int64."""


def lookup(table: Tensor, parallel: Parallel) -> Lookup:
    """table: [vocab, hidden], or this rank's part of its rows."""
    return partial(_lookup, table) if parallel.size == 1 else partial(_lookup_in_part, table, parallel)


def _lookup(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table)


def _lookup_in_part(table: Tensor, parallel: Parallel, tokens: Tensor) -> Tensor:
    """Each token is in one rank's part: the others add zeros."""
    row = tokens - parallel.rank * table.shape[0]
    mine = (row >= 0) & (row < table.shape[0])
    found = torch.where(mine[..., None], F.embedding(torch.where(mine, row, 0), table), 0)
    return joined(parallel.sum(found[None]))


def whole_table(part: Tensor, parallel: Parallel) -> Tensor:
    """The ranks' parts of a table [vocab, hidden], one below the other; a rank alone has it already."""
    return parallel.gather(part).flatten(0, 1)


def part_of(table: Tensor, parallel: Parallel) -> Tensor:
    """This rank's part of the rows of a whole table; they can be divided, or `params.cut` would have refused."""
    return table.chunk(parallel.size)[parallel.rank]
