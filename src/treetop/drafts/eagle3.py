"""The EAGLE-3 draft head.

Its slot i holds the pair (feature of token i, token i + 1) at position i and proposes token i + 2. The feature is the
target's where the target has run (`extend`), and the head's own hidden state while a tree grows (`step`): which of the
two it is goes by the phase, never by a width (sgl-21272).
Source: EAGLE-3, arXiv:2503.01840. `eagle3_config` reads the layouts of its checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, matrix, vector
from treetop.drafts.head_files import (
    EMBEDDING,
    OutputOf,
    check_vocab,
    head_output,
    log,
    no_offset,
    vocab_params,
)
from treetop.drafts.protocol import DraftProducts, DraftVocab, Extension, Nodes, Proposal, Streamed
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.attention import attention, attention_params, mixed
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.decoder import DecoderLayer
from treetop.models.embedding import whole_logits, whole_table
from treetop.models.feed_forward import feed_forward_params
from treetop.models.layers import GatedMLP, RMSNorm, norm_param, rotary_at
from treetop.models.target import LastTokens, Target
from treetop.types.config import Recurrence
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights


@dataclass(frozen=True, slots=True)
class Eagle3Norms:
    """What heads norm beside what all norm.

    before_residual: the residual stream begins with the normed state.
    output: the state that goes on is the normed one.
    doubtful: a config says so in a layout in which it meant something else for a time.
    joined: one norm of all features side by side, before they are fused.
    each: one of each feature; the prefixes of its tensors, () for none.
    deeper: the tensor of the input norm of each layer after the first.
    """

    before_residual: bool = False
    output: bool = False
    doubtful: bool = False
    joined: bool = False
    each: tuple[str, ...] = ()
    deeper: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """A `DrafterSpec`.

    decoder: sizes and layers.
    vocab_size: of the draft.
    fuses: features are many and `fc` joins them.
    prefixes: of each layer's tensors.
    output: whose matrix gives logits: own, embedding or target.
    stored: which of the embedding, d2t and t2d the file has.
    """

    folder: Path = field(compare=False)
    decoder: ModelConfig
    vocab_size: int
    target_hidden_size: int
    aux_inputs: tuple[int, ...]
    fuses: bool
    norms: Eagle3Norms
    prefixes: tuple[str, ...]
    fuse_bias: bool
    output: OutputOf
    stored: frozenset[str]
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True
    block: None = None

    def with_recurrence(self, recurrence: Recurrence) -> "Eagle3Spec":
        """The same, which state goes on said by the user. recurrence: not auto."""
        return replace(self, norms=replace(self.norms, output=recurrence == "after-norm", doubtful=False))

    def with_window(self, window: int) -> "Eagle3Spec":
        """The same, whose layers see no more than so many tokens."""
        return replace(self, decoder=self.decoder.with_window(window))

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.decoder.layers)

    @property
    def state_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def params(self) -> list[Param]:
        hidden = self.decoder.hidden_size
        params = [*self._fuse_params(), *self._first_layer(), norm_param("norm", "norm.weight", hidden)]
        for index, norm in enumerate(self.norms.deeper, 1):
            name, stored, layer = f"layers.{index}", self.prefixes[index], self.decoder.layers[index]
            params += [
                norm_param(f"{name}.input_norm", norm, hidden),
                norm_param(f"{name}.mlp_norm", f"{stored}.post_attention_layernorm.weight", hidden),
                *attention_params(layer.attention, f"{name}.attention", f"{stored}.self_attn", hidden, hidden),
                *feed_forward_params(layer.feed_forward, f"{name}.mlp", f"{stored}.mlp", hidden),
            ]
        return in_formats(
            params + vocab_params(self.decoder, self.vocab_size, self.output, self.stored), self.decoder.formats
        )

    def _fuse_params(self) -> list[Param]:
        if not self.fuses:
            return []
        hidden, each = self.decoder.hidden_size, self.target_hidden_size
        width = len(self.aux_inputs) * each
        params = [matrix("fuse", CheckpointTensor("fc.weight", (hidden, width)), shard=0)]
        if self.fuse_bias:
            params.append(vector("fuse_bias", CheckpointTensor("fc.bias", (hidden,)), shard=0))
        if self.norms.joined:
            params.append(norm_param("joined_norm", "input_norm.weight", width))
        return params + [norm_param(f"each_norm.{i}", f"{p}.weight", each) for i, p in enumerate(self.norms.each)]

    def _first_layer(self) -> list[Param]:
        hidden, stored, layer = self.decoder.hidden_size, self.prefixes[0], self.decoder.layers[0]
        norms = {"hidden_norm": "hidden_norm", "input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        return [
            *(norm_param(name, f"{stored}.{tensor}.weight", hidden) for name, tensor in norms.items()),
            *attention_params(layer.attention, "attention", f"{stored}.self_attn", 2 * hidden, hidden),
            *feed_forward_params(layer.feed_forward, "mlp", f"{stored}.mlp", hidden),
        ]

    @property
    def derived(self) -> int:
        return self.decoder.vocab_size * self.decoder.hidden_size  # the normed embedding

    @property
    def streamed(self) -> Streamed:
        numbers = {param.name: param.numbers for param in self.params if param.kind in STREAMED}
        fuse, output = numbers.pop("fuse", 0), self.vocab_size * self.decoder.hidden_size
        numbers.pop("lm_head", None)
        return Streamed(sum(numbers.values()), fuse, output)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "Eagle3Head":
        return Eagle3Head(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "Eagle3Head":
        """Raises CheckpointError for a wrong tensor."""
        return self.build(self.read(self.params, place), target, place, place.ops)

    def read(self, params: Sequence[Param], place: LoadContext) -> Weights:
        """The weights of these parameters. Raises CheckpointError for a wrong tensor; the draft vocabulary maps one to
        one into the target's.
        """
        if self.norms.doubtful:
            log.warning(
                "%s: norm_output is true: the normed state goes on. Heads that SpecForge trained from 2026-05-27 to"
                " 2026-09-15 may mean otherwise; where few drafts are accepted try --speculative-eagle-recurrence"
                " before-norm",
                self.folder,
            )
        weights = load_weights(self.folder, params, place)
        offset = weights["d2t"] if "d2t" in weights else no_offset(self.vocab_size, place.device)
        check_vocab(self.folder, offset, weights.pop("t2d"), self.decoder.vocab_size)
        return weights

    def check(self) -> int:
        return check_weights(self.folder, self.params)


class Eagle3Head:
    """A decoder layer over [embedding, feature], perhaps plain ones after it, and its own vocabulary. A `Drafter`."""

    block = None

    def __init__(self, spec: Eagle3Spec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding and output matrix the head uses where it has none of its own."""
        eps, first = spec.decoder.norm_eps, spec.decoder.layers[0]
        self.spec, self._ops = spec, ops
        self._rope = rope_table(first.attention.rope, place.rope_rows, place.dtype, place.device)
        self.fuse = weights.linear("fuse") if spec.fuses else None
        self.joined_norm = RMSNorm(weights["joined_norm"], eps, ops) if spec.norms.joined else None
        self.each_norm = [RMSNorm(weights[f"each_norm.{i}"], eps, ops) for i in range(len(spec.norms.each))]
        self.hidden_norm = RMSNorm(weights["hidden_norm"], eps, ops)
        # A token's normed embedding never changes, so the whole table is normed once.
        embedding = weights.pop(EMBEDDING)
        embedding = (
            whole_table(target.embedding, spec.decoder.vocab_size, ops.parallel) if embedding is None else embedding
        )
        self.normed_embedding = RMSNorm(weights["input_norm"], eps, ops)(embedding)
        self.attention = attention(first.attention, weights, "attention", 0, eps, ops)
        self.mlp_norm = RMSNorm(weights["mlp_norm"], eps, ops)
        self.mlp = GatedMLP(weights, "mlp", ops)
        self.deeper = [DecoderLayer(spec.decoder, weights, i, ops) for i in range(1, len(spec.decoder.layers))]
        self.norm = RMSNorm(weights["norm"], eps, ops)
        self.lm_head = head_output(spec.output, weights, embedding, target, ops.parallel)
        self._logits: Callable[[Tensor], Tensor] = target.logits if spec.output == "target" else self._own_logits
        layers = [*self.attention.products, *self.mlp.products, *(p for layer in self.deeper for p in layer.products)]
        self.products = DraftProducts(layers, [] if self.fuse is None else [self.fuse], [self.lm_head])
        self.vocab = DraftVocab(weights["d2t"] if "d2t" in weights else no_offset(spec.vocab_size, place.device))

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return at.states(self._ops, partial(self.forward, tokens, self.fused(aux_hidden), positions, attend))

    def fused(self, aux_hidden: Tensor) -> Tensor:
        """The features of pairs. aux_hidden: [rows, n, features * target hidden]. Returns [rows, n, hidden]."""
        if self.fuse is None:
            return aux_hidden
        if self.joined_norm is not None:
            aux_hidden = self.joined_norm(aux_hidden)
        if self.each_norm:
            parts = aux_hidden.chunk(len(self.each_norm), dim=-1)
            aux_hidden = torch.cat([norm(part) for norm, part in zip(self.each_norm, parts, strict=True)], dim=-1)
        return self._ops.parallel.join(self.fuse(aux_hidden))

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`. The state is the residual stream before `norm`, or the normed one where the head says so."""
        return self.forward(nodes.tokens, nodes.state, positions, attend)

    def forward(
        self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend, last: LastTokens | None = None
    ) -> Tensor:
        """The states of pairs, or of the last alone, [lines, 1, hidden].

        tokens, positions: [rows, n] int64. state: [rows, n, hidden], a feature or a state.
        """
        norm, width = self.hidden_norm, state.shape[-1]
        x = self._ops.embed_and_norm(self.normed_embedding, tokens, state, norm.weight, norm.eps)
        residual = x[..., -width:] if self.spec.norms.before_residual else state
        rotary = rotary_at(self._rope, positions, self._ops)
        of_first = None if self.deeper else last
        added = mixed(self.attention, x, rotary, attend, of_first)
        x, normed = self.mlp_norm.after(residual if of_first is None else of_first.of(residual), added)
        added = self.mlp(normed)
        for layer in self.deeper:
            x, normed = layer.input_norm.after(x, added)
            x, added = layer(x, normed, rotary, attend, last=last if layer is self.deeper[-1] else None)
        return self.norm.after(x, added)[1] if self.spec.norms.output else self._ops.add(x, added)

    def _own_logits(self, state: Tensor) -> Tensor:
        return whole_logits(self.lm_head(state), self.spec.vocab_size, self._ops.parallel)

    def logits(self, state: Tensor) -> Tensor:
        """state: [..., hidden], as `forward` gives it. Returns [..., draft vocab]."""
        return self._logits(state if self.spec.norms.output else self.norm(state))

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        best, tokens = self._ops.top_logprobs(self.logits(nodes.state), k, self.vocab.offset, inv_temp)
        return Proposal(tokens, best)
