"""Drafts looked up in a request's own text: what followed where it last read as it reads now.

There are no weights and no K/V. A state is a handful of earlier places, the longest match first, each with the tokens
that followed; nodes of a tree keep those places that agree with their path. So a tree has several continuations by how
often each came, and the more of the text agrees, the likelier they are. Texts of earlier requests may be looked at too.
Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding; suffix decoding, arXiv:2411.04975; a tree
of them, as SGLang's `NGRAM` has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.params import Param
from treetop.drafts.head_files import no_offset
from treetop.drafts.protocol import DraftProducts, DraftVocab, Extension, Nodes, Proposal, Streamed
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.row_text import continued, continued_in_past, ending, longest_matches
from treetop.kernels.tree.tree import stable_topk
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.target import Target
from treetop.weights.held import Weights

PLACES = 16
"""Earlier places that a state keeps."""
MOST = 24
"""Tokens of a match that are compared: longer ones count as this long."""
_BASE = 2.0
"""Log2 of how much more a match weighs than one that is a token shorter."""
_FILLER = -30.0
"""Log-probability of a token that nothing speaks for; a node has k children, whatever it finds."""


@dataclass(frozen=True, slots=True)
class NgramSpec:
    """A `DrafterSpec`. num_steps: drafts that a path may have."""

    vocab_size: int
    num_steps: int
    folder: Path | None = None
    aux_inputs: tuple[int, ...] = ()
    attention: tuple[AttentionSpec, ...] = ()
    params: tuple[Param, ...] = ()
    derived: int = 0
    state_dtype: torch.dtype | None = torch.int32
    reads_text: bool = True
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = False
    block: None = None

    @property
    def state_size(self) -> int:
        return PLACES * (1 + self.num_steps)

    @property
    def streamed(self) -> Streamed:
        return Streamed(0, 0, 0)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "NgramLookup":
        return NgramLookup(self, place)

    def load(self, target: Target, place: LoadContext) -> "NgramLookup":
        return NgramLookup(self, place)

    def check(self) -> int:
        return 0


class NgramLookup:
    """A `Drafter`. A state is [PLACES, 1 + steps] integers: the length of the match, 0 for none, and what followed."""

    block = None

    def __init__(self, spec: NgramSpec, place: LoadContext) -> None:
        self.spec = spec
        self.vocab, self.products = DraftVocab(no_offset(spec.vocab_size, place.device)), DraftProducts()

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`. Only the text counts."""
        assert at.text is not None
        text, end = at.text[at.rows], positions.gather(1, at.last[:, None])[:, 0] + 1
        suffix, steps = ending(text, end, MOST), self.spec.num_steps
        place, length = longest_matches(text, suffix, end, PLACES)
        following = continued(text, end, place, steps)
        if at.past is not None:
            assert at.owners is not None
            past, owners = at.past.in_order
            mine, whole = owners == at.owners[at.rows][:, None], torch.full_like(end, past.shape[1])
            place, theirs = longest_matches(past, suffix, whole, PLACES, mine)
            following = torch.cat([following, continued_in_past(past, place, steps)], dim=1)
            length, order = torch.cat([length, theirs], dim=1).sort(dim=1, descending=True, stable=True)
            length, order = length[:, :PLACES], order[:, :PLACES, None].expand(-1, -1, steps)
            following = following.gather(1, order)
        return torch.cat([length[:, :, None].to(text.dtype), following], dim=2).flatten(1)

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`: places whose next token is another drop out, the others move on by one."""
        places = nodes.state.unflatten(-1, (PLACES, -1))
        length, following = places[..., 0], places[..., 1:]
        agrees = (length > 0) & (following[..., 0] == nodes.tokens[..., None])
        length = torch.where(agrees, length + 1, 0)
        return torch.cat([length[..., None], F.pad(following[..., 1:], (0, 1))], dim=-1).flatten(-2)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`: a token's share of the places, by their matches, times how far the longest can be trusted: one
        of n tokens n / (n + 1).

        There are no logits to multiply: what is learned of these proposals is in the biases alone.
        """
        state = nodes.state
        places = state.unflatten(-1, (PLACES, -1))
        length, token = places[..., 0], places[..., 1].to(torch.int64)
        found, longest = (length > 0) & (token >= 0), self.longest(state)[..., None]
        weight = torch.where(found, torch.exp2(_BASE * (length - longest).to(torch.float32)), 0.0)
        alike = (token[..., :, None] == token[..., None, :]) & found[..., None, :]
        together = torch.where(alike, weight[..., None, :], 0.0).sum(dim=-1)
        share = together / weight.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        trusted = share * (longest / (longest + 1.0))
        first = found & ~(alike & self._earlier(state.device)).any(dim=-1)  # of places that say the same, the best
        score = torch.where(first, trusted.log(), float("-inf"))

        filler = torch.arange(min(k + PLACES, self.spec.vocab_size), device=state.device)
        said = (filler[:, None] == token[..., None, :]) & found[..., None, :]
        rest = torch.where(said.any(dim=-1), float("-inf"), _FILLER - filler.to(torch.float32))
        best, index = stable_topk(torch.cat([score, rest], dim=-1), k)
        candidates = torch.cat([token, filler.expand(*token.shape[:-1], -1)], dim=-1)
        return Proposal(candidates.gather(-1, index), best)

    def longest(self, state: Tensor) -> Tensor:
        """Tokens of the longest match of each state that something followed, [...]; 0 if there is none."""
        places = state.unflatten(-1, (PLACES, -1))
        return torch.where(places[..., 1] >= 0, places[..., 0], 0).amax(dim=-1)

    def _earlier(self, device: torch.device) -> Tensor:
        """[place, other] bool: the other is the better match."""
        place = torch.arange(PLACES, device=device)
        return place[None, :] < place[:, None]


def ngram_spec(target: ModelConfig, num_steps: int) -> NgramSpec:
    """Lookup for a target's tokens, deep enough for trees of so many levels."""
    return NgramSpec(target.vocab_size, num_steps)
