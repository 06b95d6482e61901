"""Gemma 4's assistant models: a few layers of queries alone, which read what the target's last layers keep.

A node is the target's embedding of its token beside its parent's hidden state, narrowed; the layers' output widened
again is the hidden state that goes on. All nodes stand where the root does and see the committed tokens alone, so there
are no K/V, and siblings differ in their inputs. The first hidden state is the target's, after its final norm. Logits
are of all tokens, or of those in the likeliest clusters alone.

Source: `transformers`' gemma4_assistant. There a layer with a window of w tokens sees the last w + 1; here the last w.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.config_fields import Config, flag, size, table
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, matrix
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
from treetop.kernels.rope import RopeSpec, rope_table
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.config import AttentionSpec, ModelConfig, read_config
from treetop.models.decoder import DecoderLayer, decoder_params, unused_tensors
from treetop.models.embedding import rounded, whole_table
from treetop.models.families import gemma4
from treetop.models.layers import RMSNorm, Rotary, rotary_at
from treetop.models.target import LAST_HIDDEN, Target
from treetop.types.errors import CheckpointError, ConfigError, shown
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights
from treetop.weights.plain import Plain

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Their `model_type`."""
_DEEPEST = 2**10
"""More levels than any tree has."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """Of the embedding's tokens, equally large. count: how many there are; kept: whose tokens have logits."""

    count: int
    kept: int


@dataclass(frozen=True, slots=True)
class AssistantSpec:
    """A `DrafterSpec`.

    decoder: its layers, each with the target's layer that it reads.
    target_hidden_size: of the states that enter and leave.
    clusters: None for logits of all tokens.
    """

    folder: Path = field(compare=False)
    decoder: ModelConfig
    target_hidden_size: int
    clusters: Clusters | None
    aux_inputs: tuple[int, ...] = (LAST_HIDDEN,)
    attention: tuple[AttentionSpec, ...] = ()
    derived: int = 0
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    makes_logits: bool = True

    def with_window(self, window: int) -> "AssistantSpec":
        """Raises ConfigError: what its layers see is the target's."""
        raise ConfigError(
            f"--speculative-draft-window-size {window}: {self.folder} reads the target's K/V, with its windows; drop it"
        )

    @property
    def block(self) -> BlockSpec:
        """The root alone."""
        return BlockSpec(1, _DEEPEST, ())

    @property
    def reads_target(self) -> tuple[int, ...]:
        return tuple(layer.attention.source(-1) for layer in self.decoder.layers)

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def state_size(self) -> int:
        """What logits are made of, and the hidden state that goes on."""
        return self.decoder.hidden_size + self.target_hidden_size

    @property
    def params(self) -> list[Param]:
        hidden, wide, vocab = self.decoder.hidden_size, self.target_hidden_size, self.vocab_size
        params = [
            matrix("narrow", CheckpointTensor("pre_projection.weight", (hidden, 2 * wide))),
            matrix("widen", CheckpointTensor("post_projection.weight", (wide, hidden))),
            *decoder_params(self.decoder),
        ]
        if self.clusters is not None:
            order = CheckpointTensor("masked_embedding.token_ordering", (vocab,))
            params += [
                matrix(
                    "centroids", CheckpointTensor("masked_embedding.centroids.weight", (self.clusters.count, hidden))
                ),
                Param("order", (vocab,), (order,), "index", stored=Plain(("I64",))),
            ]
        return in_formats(params, self.decoder.formats)

    @property
    def streamed(self) -> Streamed:
        numbers = {param.name: param.numbers for param in self.params if param.kind in STREAMED}
        output, hidden = numbers.pop("centroids", 0), self.decoder.hidden_size
        share = 1.0 if self.clusters is None else self.clusters.kept / self.clusters.count
        output += int(self.vocab_size * hidden * share)
        return Streamed(sum(numbers.values()), 0, output, in_extend=False)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "Assistant":
        return Assistant(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "Assistant":
        """Raises CheckpointError for a wrong tensor, ConfigError for ranks, which share the K/V that it reads."""
        if place.parallel.size > 1:
            raise ConfigError(f"--tp-size {place.parallel.size}: {self.folder} reads K/V of one rank; use --tp-size 1")
        weights = load_weights(self.folder, self.params, place, unused_tensors(self.decoder))
        order = None if place.dummy or self.clusters is None else weights["order"]
        if order is not None and not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise CheckpointError(
                f"{self.folder}: tensor masked_embedding.token_ordering does not name each token once"
            )
        return self.build(weights, target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params, unused_tensors(self.decoder))


class Assistant:
    """A `Drafter` and its `DraftBlock`; see the module."""

    def __init__(self, spec: AssistantSpec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding nodes have."""
        config = spec.decoder
        self.spec, self._ops = spec, ops
        self._of_target = whole_table(target.embedding, spec.vocab_size, ops.parallel)
        self._scale = rounded(target.config.embedding_scale, place.dtype)
        self.narrow, self.widen = weights.linear("narrow"), weights.linear("widen")
        self.layers = [DecoderLayer(config, weights, index, ops) for index in range(len(config.layers))]
        ropes = dict.fromkeys(layer.attention.rope for layer in config.layers)
        self._ropes = {rope: rope_table(rope, place.rope_rows, place.dtype, place.device) for rope in ropes}
        self.norm = RMSNorm(weights["norm"], config.norm_eps, ops)
        self.embedding = weights["embedding"][: spec.vocab_size]
        self.lm_head = weights.linear_with(self.embedding)
        self.vocab = DraftVocab(no_offset(spec.vocab_size, place.device))
        self.centroids = None if spec.clusters is None else weights.linear("centroids")
        if spec.clusters is not None:
            self._order = weights["order"].view(spec.clusters.count, -1)
            self._ranks = DraftVocab(no_offset(spec.clusters.kept * self._order.shape[1], place.device))
        layers = [self.narrow, self.widen, *(product for layer in self.layers for product in layer.products)]
        self.products = DraftProducts(layers, [], [self.lm_head] if self.centroids is None else [self.centroids])

    @property
    def block(self) -> "Assistant":
        """See `Drafter`."""
        return self

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`: the target's last state, for the root."""
        hidden = self._ops.pick(aux_hidden, at.last)
        return F.pad(hidden, (self.spec.decoder.hidden_size, 0))

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """See `DraftBlock`."""
        state = self._states(roots.tokens[:, None], roots.state[:, None], roots.positions[:, None], attend)
        return BlockOutput(state[:, 0], None)

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`. A level's positions are counted from the root's, where all of them stand."""
        return self._states(nodes.tokens, nodes.state, positions - (nodes.depth - 1), attend)

    def _states(self, tokens: Tensor, parents: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: [rows, n] int64. parents: [rows, n, state_size]. Returns their own states."""
        hidden = parents[..., self.spec.decoder.hidden_size :]
        x = self.narrow(torch.cat([F.embedding(tokens, self._of_target) * self._scale, hidden], dim=-1))
        rotaries: dict[RopeSpec | None, Rotary] = {
            rope: rotary_at(table, positions, self._ops) for rope, table in self._ropes.items()
        }
        normed = self.layers[0].input_norm(x)
        for layer, next_norm in zip(
            self.layers, [*(each.input_norm for each in self.layers[1:]), self.norm], strict=True
        ):
            x, added = layer(x, normed, rotaries[layer.rope], attend)
            x, normed = layer.leave(x, added, next_norm)
        return torch.cat([normed, self.widen(normed)], dim=-1)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        x = nodes.state[..., : self.spec.decoder.hidden_size].contiguous()
        if self.centroids is None or self.spec.clusters is None:
            best, tokens = self._ops.top_logprobs(self.lm_head(x), k, self.vocab.offset, inv_temp)
            return Proposal(tokens, best)
        likeliest = self.centroids(x).topk(self.spec.clusters.kept, dim=-1).indices
        some = self._order[likeliest].flatten(-2)  # [..., tokens]
        logits = torch.matmul(F.embedding(some, self.embedding), x[..., None])[..., 0]
        best, places = self._ops.top_logprobs(logits, k, self._ranks.offset, inv_temp)
        return Proposal(some.gather(-1, places), best)


def assistant_sign(config: Config) -> str | None:
    """What of a folder's config says that it holds an assistant, if anything does."""
    kind = config.get("model_type")
    return f"model_type has {kind!r}" if kind in KINDS else None


def assistant_spec(folder: Path, target: ModelConfig, dummy: bool) -> AssistantSpec:
    """The assistant in a folder, for a target. dummy: its weights will be random.

    Raises CheckpointError if it was made for another target, or its layers do not fit what the target keeps.
    """
    config, where = read_config(folder), folder / "config.json"
    if assistant_sign(config) is None:
        raise CheckpointError(f"{where}: no assistant of Gemma 4: model_type is {shown(config.get('model_type'))}")
    body, wide = table(config, "text_config", where), size(config, "backbone_hidden_size", where)
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": body.get("hidden_size_per_layer_input") or 0}
    decoder = gemma4.read({**body, **own}, where)
    if decoder.per_layer_embeddings is not None or decoder.has_experts:
        raise CheckpointError(f"{where}: an assistant with embeddings by layer or experts is not supported")
    if not decoder.tied_embeddings:
        raise CheckpointError(f"{where}: tie_word_embeddings must be true, for there is no output matrix")
    for what, mine, theirs in (
        ("backbone_hidden_size", wide, target.hidden_size),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise CheckpointError(
                f"{where}: this draft is for another target: its {what} is {mine}, the target has {theirs}"
            )
    layers = tuple(
        replace(layer, mixer=_reading(layer.attention, index, target, where))
        for index, layer in enumerate(decoder.layers)
    )
    formats = replace(decoder, layers=layers, logits_cap=None, embedding_scale=1.0)
    return AssistantSpec(folder, formats, wide, _clusters(config, decoder.vocab_size, where))


def _clusters(config: Config, vocab_size: int, where: Path) -> Clusters | None:
    if not flag(config, "use_ordered_embeddings", where):
        return None
    count, kept = (size(config, key, where) for key in ("num_centroids", "centroid_intermediate_top_k"))
    if kept > count or vocab_size % count:
        raise CheckpointError(
            f"{where}: num_centroids {count} must divide the vocabulary of {vocab_size}, and not be less than"
            f" centroid_intermediate_top_k {kept}"
        )
    return Clusters(count, kept)


def _reading(own: AttentionSpec, index: int, target: ModelConfig, where: Path) -> AttentionSpec:
    """A layer's attention, which reads the last of the target's layers that keep K/V and are of its kind."""
    kept = [(i, layer.attention) for i, layer in enumerate(target.layers) if layer.attention.kv_sharing_layer is None]
    alike = [(i, spec) for i, spec in kept if (spec.window is None) == (own.window is None) and spec.latent is None]
    if not alike:
        raise CheckpointError(f"{where}: layer {index} reads K/V of a kind of layer that the target does not have")
    layer, read = alike[-1]
    if own.head_dim != read.head_dim or own.num_heads % read.kv.heads:
        raise CheckpointError(
            f"{where}: layer {index} has {own.num_heads} heads of {own.head_dim}, layer {layer} of the target keeps"
            f" {read.kv.heads} of {read.head_dim}"
        )
    return replace(own, kv=read.kv, window=read.window, kv_sharing_layer=layer)
