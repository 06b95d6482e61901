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


def rounded(scale: float, dtype: torch.dtype) -> float:
    """What embeddings are multiplied by, as their dtype rounds it."""
    return float(torch.tensor(scale, dtype=torch.float32).to(dtype))


def _lookup(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table)


def _lookup_in_part(table: Tensor, parallel: Parallel, tokens: Tensor) -> Tensor:
    """Each token is in one rank's part: the others add zeros."""
    row = tokens - parallel.rank * table.shape[0]
    mine = (row >= 0) & (row < table.shape[0])
    found = torch.where(mine[..., None], F.embedding(torch.where(mine, row, 0), table), 0)
    return joined(parallel.sum(found[None])).to(table.dtype)


def whole_table(part: Tensor, rows: int, parallel: Parallel) -> Tensor:
    """The ranks' parts of a table [rows, hidden], one below the other; a rank alone has it already."""
    return parallel.gather(part).flatten(0, 1)[:rows]


def part_of(table: Tensor, parallel: Parallel) -> Tensor:
    """This rank's part of the rows of a whole table, as `params.cut` makes it: zeros stand for missing rows."""
    each = -(-table.shape[0] // parallel.size)
    part = table[parallel.rank * each : (parallel.rank + 1) * each]
    return part if part.shape[0] == each else F.pad(part, (0, 0, 0, each - part.shape[0]))


def whole_logits(piece: Tensor, vocab: int, parallel: Parallel) -> Tensor:
    """Logits [..., vocab] of the ranks' pieces [..., width], contiguous: the padding comes last."""
    return parallel.join(piece)[..., :vocab].contiguous()


def piece_of(
    lm_head: Callable[[Tensor], Tensor], width: int, vocab: int, parallel: Parallel
) -> Callable[[Tensor], Tensor]:
    """The product that gives this rank's `width` logits; those of padding are -inf, so that nobody chooses them."""
    real = min(max(vocab - parallel.rank * width, 0), width)
    return lm_head if real == width else partial(_without_padding, lm_head, real)


def _without_padding(lm_head: Callable[[Tensor], Tensor], real: int, hidden: Tensor) -> Tensor:
    logits = lm_head(hidden)
    logits[..., real:] = -torch.inf
    return logits
