"""MTP: the layer that a target was trained with to predict one token more, drafting by being used again and again.

Its slot i holds the pair (last hidden state of token i after the target's final norm, token i + 1) at position i: both
normed, side by side, through one product, then a decoder layer like the target's last one, and a norm of its own before
the target's output matrix. While a tree grows its own state stands for the target's.

Weights lie in the target's folder. Which state goes on is the family's: GLM and DeepSeek chain modules before the norm
(DeepSeek-V3, arXiv:2412.19437, section 2.2; vllm `glm4_moe_mtp.py`), MiMo after it (vllm and sglang `mimo_mtp.py`). All
of vLLM's zero the embedding at position 0, and so do these.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.head_files import no_offset
from treetop.drafts.protocol import DraftProducts, DraftVocab, Extension, Proposal, Streamed
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.models.checkpoint import tensor_files
from treetop.models.config import AttentionSpec, ModelConfig, read_config
from treetop.models.decoder import DecoderLayer, decoder_params
from treetop.models.embedding import whole_table
from treetop.models.experts import live_rows
from treetop.models.layers import RMSNorm, norm_param
from treetop.models.loader import Placement, check_weights, load_weights
from treetop.models.params import Param, in_formats, matrix
from treetop.models.target import LAST_HIDDEN, Target
from treetop.types.config import MtpRecurrence
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import Source
from treetop.weights.held import Weights
from treetop.weights.registry import read_formats


@dataclass(frozen=True, slots=True)
class MtpNames:
    """How a family calls an MTP layer's own tensors, and what differs.

    copies: tensors of the target that the layer has again, which are not read. hidden_first: the order of the
    projection's input. normed_state: the state that goes on is the normed one.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...]
    hidden_first: bool
    normed_state: bool


GLM = MtpNames("enorm", "hnorm", "eh_proj", "shared_head.norm", ("embed_tokens", "shared_head.head"), False, False)
MIMO = MtpNames("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", (), True, True)
_STORED = {
    "GLM and DeepSeek": (r"(model\.layers\.\d{1,9})\.eh_proj\.weight", GLM),
    "MiMo": (r"(model\.mtp_layers\.\d{1,9})\.input_proj\.weight", MIMO),
}
"""Layout -> the tensor that shows its layers, and its names."""


@dataclass(frozen=True, slots=True)
class FoundMtp:
    """MTP layers of a folder. layout: a family's. prefixes: of the layers' tensors, first to last."""

    layout: str
    names: MtpNames
    prefixes: tuple[str, ...]


def find_mtp(tensors: Collection[str]) -> FoundMtp | None:
    """The MTP layers among a folder's tensors, or None."""
    for layout, (pattern, names) in _STORED.items():
        found = {match[1] for tensor in tensors if (match := re.fullmatch(pattern, tensor))}
        if found:
            return FoundMtp(layout, names, tuple(sorted(found, key=lambda prefix: int(prefix.rsplit(".", 1)[1]))))
    return None


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """A `DrafterSpec`. block: the target's sizes, with the one layer. prefix: of its tensors. normed_state: as asked,
    or as the family does it.
    """

    folder: Path
    block: ModelConfig
    names: MtpNames
    prefix: str
    normed_state: bool
    aux_inputs: tuple[int, ...] = (LAST_HIDDEN,)
    state_dtype: torch.dtype | None = None
    reads_text: bool = False

    @property
    def vocab_size(self) -> int:
        return self.block.vocab_size

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return (self.block.layers[0].attention,)

    @property
    def state_size(self) -> int:
        return self.block.hidden_size

    @property
    def params(self) -> list[Param]:
        hidden, names, stored = self.block.hidden_size, self.names, self.prefix
        swap = _swapped_halves if names.hidden_first else None
        own = {"embedding_norm": names.embedding_norm, "hidden_norm": names.hidden_norm, "norm": names.final_norm}
        params = [
            *(
                norm_param(name, f"{stored}.{tensor}.weight", hidden, self.block.unit_offset)
                for name, tensor in own.items()
            ),
            matrix("projection", Source(f"{stored}.{names.projection}.weight", (hidden, 2 * hidden), swap)),
            *(_moved(param, stored) for param in decoder_params(self.block) if param.name.startswith("layers.0.")),
        ]
        return in_formats(params, self.block.formats)

    @property
    def derived(self) -> int:
        return (self.vocab_size + 1) * self.block.hidden_size  # the normed embedding, and a row of zeros

    @property
    def streamed(self) -> Streamed:
        layers = sum(param.numbers for param in self.params if param.kind in ("matrix", "router"))
        return Streamed(layers, 0, self.vocab_size * self.block.hidden_size)

    def build(self, weights: Weights, target: Target, place: Placement, ops: Ops) -> "MtpLayer":
        return MtpLayer(self, weights, target, place, ops)

    def load(self, target: Target, place: Placement) -> "MtpLayer":
        """Raises CheckpointError for a wrong tensor of the layer; the folder's others are the target's."""
        ignored = set() if place.dummy else self._ignored()
        return self.build(load_weights(self.folder, self.params, place, ignored), target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params, self._ignored())

    def _ignored(self) -> set[str]:
        copies = {f"{self.prefix}.{name}.weight" for name in self.names.copies}
        return {name for name in tensor_files(self.folder) if not name.startswith(self.prefix + ".")} | copies


class MtpLayer:
    """A `Drafter`; see the module."""

    def __init__(self, spec: MtpSpec, weights: Weights, target: Target, place: Placement, ops: Ops) -> None:
        """target: whose embedding and output matrix the layer uses."""
        eps = spec.block.norm_eps
        self.spec, self._ops, self._target = spec, ops, target
        self._rope = rope_table(spec.attention[0].rope, place.rope_rows, place.dtype, place.device)
        # A token's normed embedding never changes; the last row is that of no token, for position 0.
        nothing = target.embedding.new_zeros((1, spec.block.hidden_size))
        embedding = torch.cat([whole_table(target.embedding, spec.vocab_size, ops.parallel), nothing])
        self.normed_embedding = RMSNorm(weights["embedding_norm"], eps, ops)(embedding)
        self.hidden_norm = RMSNorm(weights["hidden_norm"], eps, ops)
        self.projection = weights.linear("projection")
        self.layer = DecoderLayer(spec.block, weights, 0, ops)
        self.norm = RMSNorm(weights["norm"], eps, ops)
        self.products = DraftProducts([self.projection, *self.layer.products], [], [target.lm_head])
        self.vocab = DraftVocab(no_offset(spec.vocab_size, place.device))

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return self._ops.pick(self.grow(tokens, aux_hidden, positions, attend), at.last)

    def grow(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Drafter`. The state is the layer's output, normed or not."""
        norm = self.hidden_norm
        tokens = torch.where(positions == 0, self.spec.vocab_size, tokens)
        x = self.projection(self._ops.embed_and_norm(self.normed_embedding, tokens, state, norm.weight, norm.eps))
        angles = self._ops.angles(self._rope, positions)
        live = live_rows(attend.live(), self._ops.expert_ranks)
        x, added = self.layer(x, self.layer.input_norm(x), angles, attend, live)
        return self.norm.after(x, added)[1] if self.spec.normed_state else self._ops.add(x, added)

    def propose(self, state: Tensor, k: int) -> Proposal:
        """See `Drafter`."""
        normed = state if self.spec.normed_state else self.norm(state)
        best, tokens = self._ops.top_logprobs(self._target.logits(normed), k, self.vocab.offset)
        return Proposal(tokens, best)


def mtp_spec(folder: Path, target: ModelConfig, dummy: bool, recurrence: MtpRecurrence = "auto") -> MtpSpec:
    """The MTP layer in a target's folder; of several the first, which is used again. dummy: there are no tensors.

    Raises CheckpointError if there is none, or it does not follow this target's layers.
    """
    found = FoundMtp("GLM", GLM, (f"model.layers.{len(target.layers)}",)) if dummy else find_mtp(tensor_files(folder))
    if found is None:
        said, where = read_config(folder).get("num_nextn_predict_layers"), folder / "config.json"
        but = f", though {where} has num_nextn_predict_layers = {shown(said)}" if said else ""
        raise CheckpointError(
            f"{folder}: no MTP layer for --speculative-algorithm MTP: neither model.layers.N.eh_proj.weight nor"
            f" model.mtp_layers.0.input_proj.weight is in it{but}"
        )
    prefix = found.prefixes[0]
    wanted = f"model.layers.{len(target.layers)}" if found.names is GLM else "model.mtp_layers.0"
    if prefix != wanted:
        raise CheckpointError(
            f"{folder}: the MTP layer {prefix} does not follow the target's {len(target.layers)} layers: it would be"
            f" {wanted}"
        )
    block = replace(
        target, layers=target.layers[-1:], formats=read_formats(read_config(folder), folder / "config.json")
    )
    if block.layers[0].attention.window is not None:
        raise CheckpointError(f"{folder}: an MTP layer beside a last layer with a sliding window is not supported")
    normed = found.names.normed_state if recurrence == "auto" else recurrence == "after-norm"
    return MtpSpec(folder, block, found.names, prefix, normed)


def _swapped_halves(weight: Tensor) -> Tensor:
    """Columns for [embedding, hidden] of a weight [out, 2 * hidden] that was made for [hidden, embedding]."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _moved(param: Param, prefix: str) -> Param:
    """A parameter of a model's first layer, stored under another prefix."""
    sources = (replace(each, name=prefix + each.name.removeprefix("model.layers.0")) for each in param.sources)
    return replace(param, sources=tuple(sources))
