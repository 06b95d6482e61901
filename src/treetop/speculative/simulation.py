"""Simulated acceptance, for measuring: outputs are wrong on purpose, what they cost is not.

`SimulatedLengths` accepts a number of drafts, whatever they are. `SimulatedAcceptance` draws of each node what its head
says and what the target chooses (`speculative.profile`), so that ranking, calibration and policy have something to do.
Both draw by a hash of (the request's seed, where its row stands, which node): a captured round draws anew at each
replay, and ranks that share a model draw the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.protocol import Grower, Nodes, Proposal
from treetop.kernels.sampling.sampling import SampledTokens
from treetop.kernels.tree.calibration import Heat
from treetop.kernels.tree.grow import TreeBuilder
from treetop.kernels.tree.rows import DraftState
from treetop.speculative.profile import AcceptanceProfile, draw_nodes, logprob_of
from treetop.types.layout import SpecShape

DRAWS = 1 << 15
"""Nodes that are drawn of each depth, once; rounds draw among them."""
_STEPS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_MIX = 0x2545F4914F6CDD1D


def hashed(seed: Tensor, committed: Tensor, index: Tensor) -> Tensor:
    """31 bits of each, [rows, n] int64. seed, committed: [rows] int64. index: [n] int64."""
    mixed = (seed * _STEPS[0] + committed * _STEPS[1])[:, None] + (index + 1) * _STEPS[2]
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 29)) * _MIX
    return (mixed >> 33) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class RoundOfRows:
    """What a round's draws depend on: seed, committed [rows] int64, of the batch's rows. live: [rows] bool."""

    seed: Tensor
    committed: Tensor
    live: Tensor


@dataclass(frozen=True, slots=True)
class SimulatedLengths:
    """Rounds with a tree emit `emitted` tokens, in the mean if fractional; fewer where their paths are shorter."""

    emitted: float

    def lengths(self, at: RoundOfRows, shape: SpecShape) -> Tensor:
        """Drafts that each row accepts, [rows] int64."""
        accepted = min(self.emitted, shape.commit_width, shape.num_draft_tokens) - 1
        whole = int(accepted)
        lengths = torch.full_like(at.committed, whole)
        if accepted > whole:
            coin = hashed(at.seed, at.committed, torch.zeros(1, dtype=torch.int64, device=at.seed.device))[:, 0]
            lengths += coin < int((accepted - whole) * 2**31)
        return lengths


@dataclass(frozen=True, slots=True)
class SimulatedAcceptance:
    """Of a profile. logits: [S, DRAWS, RANKS + 1] float32. rank: [S, DRAWS] int64. vocab_size: the target's."""

    profile: AcceptanceProfile
    logits: Tensor
    rank: Tensor
    vocab_size: int

    @classmethod
    def make(
        cls, profile: AcceptanceProfile, depths: int, vocab_size: int, device: torch.device
    ) -> "SimulatedAcceptance":
        """Draws of proposals at depths 1 to `depths`: the same wherever they are made."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            each = [draw_nodes(profile, depth, DRAWS) for depth in range(depths)]
        logits, rank = (torch.stack([getattr(one, name) for one in each]) for name in ("logits", "rank"))
        return cls(profile, logits.to(device), rank.to(device), vocab_size)

    def at_roots(self, draft: DraftState, rows: Tensor, at: RoundOfRows, k: int, heat: Heat) -> None:
        """Before a tree begins: what the head says of the proposals stored with its row."""
        root = torch.zeros(1, dtype=torch.int64, device=rows.device)
        says = self._says(0, hashed(at.seed, at.committed, root), k, heat)[:, 0]
        kept = draft.logprob[rows]
        said = torch.cat([says.to(kept.dtype), kept[:, k:]], dim=1)
        draft.logprob[rows] = torch.where(at.live[:, None], said, kept)

    def of_level(self, at: RoundOfRows, depth: int, k: int, heat: Heat) -> Tensor:
        """The same of the proposals after a level's nodes, [rows, k, k]."""
        groups = torch.arange(1 + (depth - 1) * k, 1 + depth * k, device=at.seed.device)
        return self._says(depth, hashed(at.seed, at.committed, groups), k, heat)

    def _says(self, depth: int, draws: Tensor, k: int, heat: Heat) -> Tensor:
        """[rows, n, k] float32. draws: [rows, n], hashes."""
        logits = self.logits[depth, draws % DRAWS]
        return logprob_of(logits, self.profile.tail, heat.table[heat.classes][:, None, None])[..., :k].contiguous()

    def choices(self, growth: TreeBuilder, at: RoundOfRows) -> SampledTokens:
        """What the target chooses after each node of the trees, [rows, T]: a proposal, or a token that is none.

        A node whose proposals were never asked for has no children, so any token will do.
        """
        k, steps, device = growth.shape.topk, growth.shape.num_steps, at.seed.device
        index = torch.arange(1 + (steps - 1) * k, device=device)
        draws = hashed(at.seed, at.committed, index)  # [rows, groups]
        rank = self.rank[(index + k - 1) // k, draws % DRAWS]
        children = growth.tokens.view(len(draws), -1, k)
        some = (draws[..., None] + torch.arange(k + 1, device=device)) % self.vocab_size  # one of them is no child
        taken = (some[..., None] == children[..., None, :]).any(dim=-1)  # [rows, groups, k + 1]
        other = some.gather(2, taken.to(torch.int32).argmin(dim=2, keepdim=True))
        chosen = children.gather(2, rank.clamp(max=k - 1)[..., None])
        wanted = torch.where(rank[..., None] < k, chosen, other)[..., 0]
        here = growth.chosen[:, :, None] == growth.above[:, None]  # [rows, T, groups]
        token = torch.where(here.any(dim=2), (here * wanted[:, None]).sum(dim=2), wanted[:, :1])
        return SampledTokens(token, torch.ones_like(token, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class SimulatedProposals:
    """A drafter in a tree whose proposals are said to be worth what `simulation` draws. A `Grower`."""

    drafter: Grower
    simulation: SimulatedAcceptance
    at: RoundOfRows

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        return self.drafter.step(nodes, positions, attend, lines)

    def propose(self, nodes: Nodes, k: int, heat: Heat | None = None, lines: Any = None) -> Proposal:
        assert heat is not None
        proposal = self.drafter.propose(nodes, k, heat, lines)
        return Proposal(proposal.tokens, self.simulation.of_level(self.at, nodes.depth, k, heat))


Simulation = SimulatedLengths | SimulatedAcceptance
"""What takes the place of acceptance."""
