"""A drafter, and lookups in the text beside it.

What follows a node is as likely as the drafter says, or as the text does, weighed by how far the text can be trusted:
by a match of a few tokens hardly, by a long one alone. The best of both become the node's children, so a tree has room
for either, and for both where they disagree. A state is the drafter's, behind it the lookup's in digits, which numbers
of every kind hold.
Source: suffix decoding beside a head, arXiv:2411.04975, section 4.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.params import Param
from treetop.drafts.ngram import NgramLookup, NgramSpec, ngram_spec
from treetop.drafts.protocol import (
    BlockOutput,
    BlockSpec,
    DraftBlock,
    Drafter,
    DrafterSpec,
    Extension,
    Nodes,
    Proposal,
    Roots,
    Streamed,
)
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.tree import stable_topk
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.target import Target
from treetop.weights.held import Weights

_DIGITS = 3
_BASE = 256
"""Integers below it are exact in every dtype that is computed in; three such digits name any token."""
_EVEN = 8.0
"""Length of a match that is believed as much as the drafter."""


@dataclass(frozen=True, slots=True)
class WithLookupSpec:
    """A `DrafterSpec`: that of `inner`, whose states have the lookup's beside."""

    inner: DrafterSpec
    lookup: NgramSpec
    reads_text: bool = True
    makes_logits: bool = False

    @property
    def folder(self) -> Path | None:
        return self.inner.folder

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def state_size(self) -> int:
        return self.inner.state_size + _DIGITS * self.lookup.state_size

    @property
    def state_dtype(self) -> torch.dtype | None:
        return self.inner.state_dtype

    @property
    def block(self) -> BlockSpec | None:
        return self.inner.block

    @property
    def aux_inputs(self) -> tuple[int, ...]:
        return self.inner.aux_inputs

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return self.inner.attention

    @property
    def reads_target(self) -> tuple[int, ...]:
        return self.inner.reads_target

    @property
    def params(self) -> list[Param]:
        return list(self.inner.params)

    @property
    def derived(self) -> int:
        return self.inner.derived

    @property
    def streamed(self) -> Streamed:
        return self.inner.streamed

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "WithLookup":
        return WithLookup(self, self.inner.build(weights, target, place, ops), place)

    def load(self, target: Target, place: LoadContext) -> "WithLookup":
        """Raises CheckpointError for a wrong tensor."""
        return WithLookup(self, self.inner.load(target, place), place)

    def check(self) -> int:
        return self.inner.check()


class WithLookup:
    """A `Drafter` around one."""

    def __init__(self, spec: WithLookupSpec, inner: Drafter, place: LoadContext) -> None:
        self.spec, self.inner, self.lookup = spec, inner, NgramLookup(spec.lookup, place)
        self.vocab, self.products = inner.vocab, inner.products
        self._block = None if inner.block is None else _BlockWithLookup(inner.block, spec.inner.state_size)

    @property
    def block(self) -> DraftBlock | None:
        """See `Drafter`."""
        return self._block

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        state = self.inner.extend(tokens, aux_hidden, positions, at, attend)
        return _joined(state, self.lookup.extend(tokens, aux_hidden, positions, at, attend)[: len(state)])

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`."""
        own, places = self._parts(nodes)
        state = self.inner.step(own, positions, attend, lines)
        return _joined(state, self.lookup.step(places, positions, attend))

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        own, places = self._parts(nodes)
        said, read = self.inner.propose(own, k, inv_temp, lines), self.lookup.propose(places, k)
        length = self.lookup.longest(places.state)[..., None].to(torch.float32)
        weight = length**2 / (length**2 + _EVEN**2)
        alike = said.tokens[..., :, None] == read.tokens[..., None, :]
        of_text = weight * read.logprob.exp()
        both = (alike * of_text[..., None, :]).sum(dim=-1) + (1 - weight) * said.logprob.exp()
        rest = torch.where(alike.any(dim=-2), 0.0, of_text)
        tokens = torch.cat([said.tokens, read.tokens], dim=-1)
        best, index = stable_topk(torch.cat([both, rest], dim=-1).log(), k)
        return Proposal(tokens.gather(-1, index), best.clamp(max=0.0))

    def _parts(self, nodes: Nodes) -> tuple[Nodes, Nodes]:
        """Nodes as the drafter knows them, and as the lookup does."""
        size = self.spec.inner.state_size
        places = _integers(nodes.state[..., size:])
        return replace(nodes, state=nodes.state[..., :size]), replace(nodes, state=places)


class _BlockWithLookup:
    """The drafter's `DraftBlock`, for states of both. size: of the drafter's."""

    def __init__(self, inner: DraftBlock, size: int) -> None:
        self._inner, self._size = inner, size

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """See `DraftBlock`."""
        opened = self._inner.open(replace(roots, state=roots.state[:, : self._size]), attend)
        return replace(opened, state=torch.cat([opened.state, roots.state[:, self._size :]], dim=1))


def _joined(state: Tensor, integers: Tensor) -> Tensor:
    """A drafter's state and a lookup's, [..., n] int32 of -1 and more, side by side."""
    shifted = integers + 1
    digits = torch.stack([shifted // _BASE**i % _BASE for i in range(_DIGITS)], dim=-1).flatten(-2)
    return torch.cat([state, digits.to(state.dtype)], dim=-1)


def _integers(digits: Tensor) -> Tensor:
    """The integers that `_joined` wrote, [..., n] int32."""
    places = digits.to(torch.int32).unflatten(-1, (-1, _DIGITS))
    powers = torch.arange(_DIGITS, dtype=torch.int32, device=digits.device)
    named: Tensor = (places * _BASE**powers).sum(dim=-1, dtype=torch.int32)
    return named - 1


def lookup_beside(spec: DrafterSpec, target: ModelConfig, num_steps: int) -> WithLookupSpec:
    """A drafter for a target, and lookups beside it, deep enough for trees of so many levels."""
    return WithLookupSpec(spec, ngram_spec(target, num_steps))
