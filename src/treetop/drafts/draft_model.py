"""A small language model as a draft: any family that loads.

It reads nothing of the target. Slot i of its K/V holds token i, as its own decoding has it, so `extend` runs the tokens
themselves, which the rows' text tells. The root has no slot yet: a round runs it first, and the nodes of its tree, at
the positions of their tokens, see it before their ancestors.

Vocabularies whose ids mean the same may be padded to different sizes: a token that the draft does not have is never
proposed, and is read as its token 0. Others are translated token by token (`drafts.shared_words`). Source: speculative
decoding, arXiv:2211.17192; vLLM's `draft_model`, SGLang's `STANDALONE`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.params import Param
from treetop.drafts.head_files import no_offset
from treetop.drafts.protocol import (
    BlockOutput,
    BlockSpec,
    DraftProducts,
    DraftVocab,
    Extension,
    Nodes,
    Proposal,
    Roots,
    Streamed,
)
from treetop.drafts.shared_words import SharedWords
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.registry import TargetSpec, target_spec
from treetop.models.target import LastTokens, Target
from treetop.types.errors import CheckpointError
from treetop.weights.held import Weights

_DEEPEST = 2**10
"""More levels than any tree has."""


@dataclass(frozen=True, slots=True)
class DraftModelSpec:
    """A `DrafterSpec`.

    config: of the model, whose weights `model` reads.
    vocab_size: tokens that it shares with the target.
    words: which those are; None where they are the first ones of both.
    """

    folder: Path = field(compare=False)
    model: TargetSpec = field(compare=False)
    config: ModelConfig
    vocab_size: int
    words: SharedWords | None = field(default=None, compare=False)
    aux_inputs: tuple[int, ...] = ()
    state_dtype: torch.dtype | None = None
    reads_text: bool = True
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True

    def with_window(self, window: int) -> "DraftModelSpec":
        """The same, whose layers see no more than so many tokens."""
        config = self.config.with_window(window)
        return replace(self, model=replace(self.model, config=config), config=config)

    def with_words(self, words: SharedWords) -> "DraftModelSpec":
        """The same, with a vocabulary of its own."""
        return replace(self, words=words, vocab_size=len(words.meant))

    @property
    def block(self) -> BlockSpec:
        """The root alone, which nodes see."""
        return BlockSpec(1, _DEEPEST, (True,) * len(self.attention), seen=True)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.config.layers)

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    @property
    def params(self) -> list[Param]:
        return self.model.params

    @property
    def derived(self) -> int:
        return 0

    @property
    def streamed(self) -> Streamed:
        output = self.config.vocab_size * self.config.hidden_size
        return Streamed(self.model.streamed - output, 0, output)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "DraftModel":
        return DraftModel(self, self.model.build(weights, (), place, ops), place, ops)

    def load(self, target: Target, place: LoadContext) -> "DraftModel":
        """Raises CheckpointError for a wrong tensor."""
        return DraftModel(self, self.model.load((), place), place, place.ops)

    def check(self) -> int:
        return self.model.check()


class DraftModel:
    """A `Drafter` and its `DraftBlock`; see the module. A node's state is the model's last, after its final norm."""

    def __init__(self, spec: DraftModelSpec, model: Target, place: LoadContext, ops: Ops) -> None:
        self.spec, self.model, self._ops = spec, model, ops
        layers = [product for product in model.products if product is not model.lm_head]
        self.products = DraftProducts(layers, (), [model.lm_head])
        words = spec.words
        self._reads = None if words is None else words.reads.to(place.device)
        self._proposed = None if words is None else words.proposed.to(place.device)
        self.vocab = DraftVocab(
            no_offset(spec.vocab_size, place.device)
            if words is None
            else (words.meant - torch.arange(spec.vocab_size)).to(place.device)
        )

    @property
    def block(self) -> "DraftModel":
        """See `Drafter`."""
        return self

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`: of the tokens at the slots themselves, each behind `tokens`."""
        assert at.text is not None
        own = at.text[at.rows[:, None], positions].to(tokens.dtype)
        return at.states(self._ops, partial(self._states, own, positions, attend))

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """See `DraftBlock`."""
        return BlockOutput(self._states(roots.tokens[:, None], roots.positions[:, None], attend)[:, 0], None)

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`. Their parents' states do not count: the layers see these nodes' K/V."""
        return self._states(nodes.tokens, positions, attend)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        logits = self.model.logits(nodes.state)
        if self._proposed is not None:
            logits = logits.index_select(-1, self._proposed)
        elif logits.shape[-1] != self.spec.vocab_size:
            logits = logits[..., : self.spec.vocab_size].contiguous()
        best, tokens = self._ops.top_logprobs(logits, k, self.vocab.offset, inv_temp)
        return Proposal(tokens, best)

    def _states(self, tokens: Tensor, positions: Tensor, attend: Attend, last: LastTokens | None = None) -> Tensor:
        """tokens, positions: [rows, n] int64. Returns [rows, n, hidden], or [lines, 1, hidden] of the last alone."""
        own = (
            torch.where(tokens < self.spec.config.vocab_size, tokens, 0) if self._reads is None else self._reads[tokens]
        )
        return self.model.forward(own, positions, attend, last=last).hidden


def draft_model_spec(folder: Path, target: ModelConfig, dummy: bool) -> DraftModelSpec:
    """The language model in a folder, as a draft for `target`. dummy: its weights will be random.

    Raises CheckpointError for a folder that holds none, and for what drafts cannot have.
    """
    model, where = target_spec(folder), folder / "config.json"
    for layer in model.config.layers:
        attention = layer.attends
        no = (
            ("experts" if layer.experts is not None else None)
            or ("linear attention" if layer.recurrent is not None else None)
            or ("sparse attention" if attention is not None and attention.index is not None else None)
            or ("layers that read another layer's K/V" if layer.attention.kv_sharing_layer is not None else None)
        )
        if no is not None:
            raise CheckpointError(
                f"{where}: a language model with {no} is not supported as a draft; give another one to"
                " --speculative-draft-model-path"
            )
    shared = min(model.config.vocab_size, target.vocab_size)
    return DraftModelSpec(folder, model, model.config, shared)
