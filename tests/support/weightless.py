"""A drafter without weights and K/V: what follows a token is a fixed function of it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from treetop.drafts.protocol import DraftProducts, DraftVocab, Proposal, Streamed
from treetop.drafts.registry import DRAFTERS


def followers(token: int, vocab: int, k: int) -> list[int]:
    """The k most likely next tokens, best first."""
    return [(5 * token + 3 + i) % vocab for i in range(k)]


@dataclass(frozen=True)
class FixedSpec:
    """A `DrafterSpec`. It reads no state of the target."""

    folder: Path
    vocab_size: int
    state_size: int = 1
    aux_inputs: tuple = ()
    attention: tuple = ()
    params: tuple = ()
    derived: int = 0
    state_dtype: None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True
    block: None = None

    @property
    def streamed(self):
        return Streamed(layers=0, fuse=0, output=0)

    def build(self, weights, target, place, ops):
        return Fixed(self.vocab_size, place)

    def load(self, target, place):
        return self.build({}, target, place, place.ops)

    def check(self):
        return 0


class Fixed:
    """A `Drafter`. Its state is the token itself."""

    block = None

    def __init__(self, vocab_size, place):
        self.vocab = DraftVocab(torch.zeros(vocab_size, dtype=torch.int64, device=place.device))
        self.dtype, self.products = place.dtype, DraftProducts()

    def extend(self, tokens, aux_hidden, positions, at, attend):
        assert aux_hidden.shape == (*tokens.shape, 0)
        return tokens.gather(1, at.last[:, None]).to(self.dtype)

    def step(self, nodes, positions, attend, lines=None):
        return nodes.tokens[..., None].to(self.dtype)

    def propose(self, nodes, k, inv_temp=None, lines=None):
        rank = torch.arange(k, device=nodes.state.device)
        tokens = (5 * nodes.state.long() + 3 + rank) % len(self.vocab.offset)
        return Proposal(tokens, -(rank + 1.0).expand(tokens.shape).to(torch.float32))


def install(monkeypatch) -> None:
    """Every folder of a head holds this drafter."""
    monkeypatch.setitem(DRAFTERS, "EAGLE3", lambda folder, target, dummy: FixedSpec(folder, target.vocab_size))
