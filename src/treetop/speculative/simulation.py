"""Simulated acceptance, for measuring: outputs are wrong on purpose, what they cost is not.

`SimulatedLengths` accepts a number of drafts, whatever they are. `SimulatedAcceptance` draws of each node what its head
says and what the target chooses (`speculative.profile`), so that ranking, calibration and policy have something to do.
`kernels.tree.drawn` does the drawing.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.protocol import Grower, Nodes, Proposal
from treetop.kernels.sampling.sampling import PartialArgmax, SampledTokens
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.drawn import DRAWS, DrawnNodes, RoundOfRows
from treetop.kernels.tree.grow import TreeBuilder
from treetop.speculative.profile import AcceptanceProfile, draw_nodes
from treetop.types.layout import SpecShape

Chosen = SampledTokens | PartialArgmax


class Simulation(Protocol):
    """What takes the place of acceptance in rounds with a tree. at: of the batch's rows."""

    def grower(self, drafter: Grower, logprob: Tensor, k: int, ops: Ops, at: RoundOfRows) -> Grower:
        """What trees of `k` branches grow by. logprob: [num_rows, max_topk], of roots' proposals; written."""

    def choose(self, chosen: Chosen, growth: TreeBuilder, ops: Ops, at: RoundOfRows) -> tuple[Chosen, Tensor | None]:
        """What is taken for the target's choices, and how many drafts are accepted whatever they are, [rows] int64."""


@dataclass(frozen=True, slots=True)
class SimulatedLengths:
    """Rounds with a tree emit `emitted` tokens, in the mean if fractional; fewer where their paths are shorter."""

    emitted: float

    def grower(self, drafter: Grower, logprob: Tensor, k: int, ops: Ops, at: RoundOfRows) -> Grower:
        return drafter

    def choose(self, chosen: Chosen, growth: TreeBuilder, ops: Ops, at: RoundOfRows) -> tuple[Chosen, Tensor | None]:
        return chosen, self.lengths(at, growth.shape)

    def lengths(self, at: RoundOfRows, shape: SpecShape) -> Tensor:
        """Drafts that each row accepts, [rows] int64."""
        accepted = min(self.emitted, shape.commit_width, shape.num_draft_tokens) - 1
        whole = int(accepted)
        lengths = torch.full_like(at.rows, whole)
        if accepted > whole:
            uniform = at.draws(torch.zeros(1, dtype=torch.int64, device=at.rows.device))[:, 0]
            lengths += uniform < int((accepted - whole) * 2**31)
        return lengths


@dataclass(frozen=True, slots=True)
class SimulatedAcceptance:
    """Of a profile. drawn: its nodes."""

    profile: AcceptanceProfile
    drawn: DrawnNodes

    @classmethod
    def make(
        cls, profile: AcceptanceProfile, depths: int, vocab_size: int, device: torch.device
    ) -> "SimulatedAcceptance":
        """Draws of proposals at depths 1 to `depths`: the same wherever they are made."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            kinds = profile.kinds
            each = [[draw_nodes(kind, depth, DRAWS // len(kinds)) for kind in kinds] for depth in range(depths)]
        logits = torch.stack([torch.cat([one.logits for one in at_depth]) for at_depth in each]).to(device)
        rank = torch.stack([torch.cat([one.rank for one in at_depth]) for at_depth in each]).to(device)
        return cls(profile, DrawnNodes(logits, rank, profile.tail, vocab_size, len(kinds)))

    def grower(self, drafter: Grower, logprob: Tensor, k: int, ops: Ops, at: RoundOfRows) -> Grower:
        ops.say_roots(self.drawn, at, k, logprob)
        return SimulatedProposals(drafter, self.drawn, ops, at)

    def choose(self, chosen: Chosen, growth: TreeBuilder, ops: Ops, at: RoundOfRows) -> tuple[Chosen, Tensor | None]:
        return ops.choose_drawn(self.drawn, at, growth), None


@dataclass(frozen=True, slots=True)
class SimulatedProposals:
    """A drafter in a tree whose proposals are said to be worth what was drawn. A `Grower`."""

    drafter: Grower
    drawn: DrawnNodes
    ops: Ops
    at: RoundOfRows

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        return self.drafter.step(nodes, positions, attend, lines)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        proposal = self.drafter.propose(nodes, k, inv_temp, lines)
        return Proposal(proposal.tokens, self.ops.say_level(self.drawn, self.at, nodes.depth, k))
