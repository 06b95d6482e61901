"""P-EAGLE: an EAGLE-3 head of several layers that proposes every depth of a tree in one forward a round.

Slot i holds the pair (feature of token i, token i + 1) at position i, as in EAGLE-3; the last one's state proposes what
follows the root. Behind it stand placeholders, all alike: a pair of a learned feature and the mask token, causal, one
for each further depth. Their K/V are dropped: `extend` writes those of pairs alone.

All nodes of a depth have the same proposals. Source: P-EAGLE, arXiv:2602.01469; `speculators` 0.9.0 `models/peagle`,
vllm's `parallel_drafting`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.checkpoint import open_file, tensor_files
from treetop.checkpoints.config_fields import Config
from treetop.checkpoints.loader import LoadContext, check_weights
from treetop.checkpoints.params import Param
from treetop.drafts.eagle3 import Eagle3Head, Eagle3Spec
from treetop.drafts.eagle3_config import eagle3_spec
from treetop.drafts.head_files import MASK_TOKENS, head_config
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
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.target import Target
from treetop.types.config import Recurrence
from treetop.types.errors import CheckpointError, shown
from treetop.weights.adapted import AdaptedLinear
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights

MASK_HIDDEN = "mask_hidden"


@dataclass(frozen=True, slots=True)
class PEagleSpec:
    """A `DrafterSpec`.

    head: all but the placeholders.
    mask_token: what the placeholders' tokens are.
    mask_shape: that their feature is stored in, ahead of `fc`.
    num_steps: the deepest tree. Nothing in a checkpoint says how many placeholders there may be.
    """

    head: Eagle3Spec
    mask_token: int
    mask_shape: tuple[int, ...]
    num_steps: int = 8
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True

    def with_recurrence(self, recurrence: Recurrence) -> "PEagleSpec":
        """See `Eagle3Spec`."""
        return replace(self, head=self.head.with_recurrence(recurrence))

    def with_steps(self, num_steps: int) -> "PEagleSpec":
        """The same, for trees so deep."""
        return replace(self, num_steps=num_steps)

    def with_window(self, window: int) -> "PEagleSpec":
        """See `Eagle3Spec`."""
        return replace(self, head=self.head.with_window(window))

    @property
    def folder(self) -> Path:
        return self.head.folder

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def state_size(self) -> int:
        return self.head.state_size

    @property
    def block(self) -> BlockSpec:
        """The placeholders; one that is not used where trees have one level."""
        width = max(self.num_steps - 1, 1)
        return BlockSpec(width, width + 1, (True,) * len(self.head.attention))

    @property
    def aux_inputs(self) -> tuple[int, ...]:
        return self.head.aux_inputs

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return self.head.attention

    @property
    def params(self) -> list[Param]:
        source = CheckpointTensor(MASK_HIDDEN, self.mask_shape)
        return [*self.head.params, Param(MASK_HIDDEN, self.mask_shape, (source,), "vector")]

    @property
    def derived(self) -> int:
        return self.head.derived + self.head.decoder.hidden_size  # the placeholders' feature, fused

    @property
    def streamed(self) -> Streamed:
        return replace(self.head.streamed, in_levels=False)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "PEagleHead":
        return PEagleHead(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "PEagleHead":
        """Raises CheckpointError for a wrong tensor."""
        return self.build(self.head.read(self.params, place), target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params)


class PEagleHead:
    """A `Drafter` and its `DraftBlock`; see the module. The lines are logits by depth, [rows, depths, draft vocab]."""

    def __init__(self, spec: PEagleSpec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding and output matrix the head uses where it has none of its own."""
        self.spec, self._ops = spec, ops
        self.head = Eagle3Head(spec.head, weights, target, place, ops)
        self._mask = weights[MASK_HIDDEN].reshape(1, 1, -1)
        by_row = isinstance(self.head.fuse, AdaptedLinear)
        self._feature = None if by_row else self.head.fused(self._mask)
        self.products: DraftProducts = self.head.products
        self.vocab: DraftVocab = self.head.vocab

    @property
    def block(self) -> "PEagleHead":
        """See `Drafter`."""
        return self

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return self.head.extend(tokens, aux_hidden, positions, at, attend)

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """See `DraftBlock`: the root is in the last pair, and placeholders stand at positions from its own on."""
        rows, width = len(roots.tokens), self.spec.block.width
        positions = roots.positions[:, None] + torch.arange(width, device=roots.positions.device)
        tokens = torch.full_like(positions, self.spec.mask_token)
        feature = self._feature
        states = self.head.forward(
            tokens,
            self.head.fused(self._mask.repeat(rows, width, 1)) if feature is None else feature.repeat(rows, width, 1),
            positions,
            attend,
        )
        return BlockOutput(roots.state, self.head.logits(torch.cat([roots.state[:, None], states], dim=1)))

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`: no layer runs, and no state counts but the root's."""
        return nodes.state

    def propose(
        self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Tensor | Any = None
    ) -> Proposal:
        """See `Drafter`: all nodes of a depth have the same."""
        best, tokens = self._ops.top_logprobs(lines[:, nodes.depth].contiguous(), k, self.vocab.offset, inv_temp)
        if nodes.tokens.dim() == 1:
            return Proposal(tokens, best)
        n = nodes.tokens.shape[1]
        return Proposal(tokens[:, None].expand(-1, n, -1), best[:, None].expand(-1, n, -1))


def peagle_sign(config: Config, names: Collection[str]) -> str | None:
    """What says that a folder holds a P-EAGLE head; None if nothing does. names: of its tensors, if it has any.

    A mask token alone is also a language model's that was trained to draft in parallel (PARD).
    """
    if config.get("speculators_model_type") == "peagle":
        return "speculators_model_type is peagle"
    if MASK_HIDDEN in names:
        return f"it holds {MASK_HIDDEN}"
    named, key = config.get("architectures"), next((key for key in MASK_TOKENS if config.get(key) is not None), None)
    eagle = isinstance(named, list) and any(isinstance(each, str) and "eagle" in each.lower() for each in named)
    return f"config.json has {key}" if eagle and key is not None else None


def peagle_spec(folder: Path, target: ModelConfig, dummy: bool) -> PEagleSpec:
    """The head in a folder, for `target`. dummy: there are no tensors to look at.

    Raises CheckpointError as `eagle3_spec` does, and for a head without placeholders.
    """
    head, (config, _), where = eagle3_spec(folder, target, dummy), head_config(folder), folder / "config.json"
    width = len(head.aux_inputs) * head.target_hidden_size
    shape, files = (1, 1, width), {} if dummy else tensor_files(folder)
    if not dummy and MASK_HIDDEN not in files:
        raise CheckpointError(f"{folder}: missing tensor {MASK_HIDDEN}, which a P-EAGLE head has")
    if MASK_HIDDEN in files:
        stored = tuple(open_file(files[MASK_HIDDEN]).get_slice(MASK_HIDDEN).get_shape())
        if stored[-1:] != (width,) or prod(stored) != width:
            raise CheckpointError(f"{files[MASK_HIDDEN]}: tensor {MASK_HIDDEN} has shape {stored}, expected {shape}")
        shape = stored
    return PEagleSpec(head, _mask_token(config, head.decoder.vocab_size, where), shape)


def _mask_token(config: Config, vocab_size: int, where: Path) -> int:
    key = next((key for key in MASK_TOKENS if config.get(key) is not None), None)
    if key is None:
        raise CheckpointError(f"{where}: {' or '.join(MASK_TOKENS)} must say what token placeholders have")
    token = config[key]
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{where}: {key} must be a token below {vocab_size}, got {shown(token)}")
    return token
