"""Trees of rows whose next tokens are known: these come first, alone, and the drafter goes on behind them.

A grammar that can only go on with the key of an object leaves nothing to guess, but a drafter does not know that: where
it proposes another text, nothing that it grows behind that is worth a node. The chain is the tree's top-1 chain, which
is in every frontier, so the drafter's own proposals begin where the chain ends. The target verifies all of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.protocol import Grower, Nodes, Proposal
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.rows import DraftState, store_draft

_NEVER = -100.0
"""Log-probability of whatever stands beside a forced token: no sum of others is as small."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A `Grower` around one.

    chain: [rows, S or more] int32, what must follow each root, -1 where that is not known; known from its first on.
    """

    inner: Grower
    chain: Tensor

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Grower`."""
        return self.inner.step(nodes, positions, attend, lines)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Grower`. nodes: of a frontier, whose first is the greedy chain's."""
        said, forced = self.inner.propose(nodes, k, inv_temp, lines), self.chain[:, nodes.depth]
        if is_free(forced):
            return said
        first = with_forced(Proposal(said.tokens[:, 0], said.logprob[:, 0]), forced)
        tokens = torch.cat([first.tokens[:, None], said.tokens[:, 1:]], dim=1)
        return Proposal(tokens, torch.cat([first.logprob[:, None], said.logprob[:, 1:]], dim=1))


def is_free(forced: Tensor) -> bool:
    """Whether nothing is forced, -1 throughout, where looking is free; elsewhere it is not known."""
    return forced.device.type == "cpu" and not bool((forced >= 0).any())


def with_forced(said: Proposal, forced: Tensor) -> Proposal:
    """Proposals [rows, k] of one node a row, the first of which is forced: [rows] int32, -1 where nothing is.

    Siblings stay distinct: one that is the forced token is given the first one's.
    """
    token, first = forced.to(torch.int64)[:, None], said.tokens[:, :1]
    known, others = token >= 0, torch.where(said.tokens == token, first, said.tokens)[:, 1:]
    tokens = torch.cat([torch.where(known, token, first), others], dim=1)
    alone = torch.full_like(said.logprob[:1], _NEVER)
    alone[:, :1].fill_(0.0)
    return Proposal(tokens, torch.where(known, alone, said.logprob))


def force_roots(table: DraftState, rows: Tensor, live: Tensor, k: int, forced: Tensor) -> None:
    """Rows [rows] that are `live` grow from what is forced behind their roots; `with_forced`, k branches."""
    said = with_forced(Proposal(table.tokens[rows, :k], table.logprob[rows, :k]), forced)
    store_draft(table, rows, live, DraftState(said.tokens, said.logprob, table.hidden[rows]))
