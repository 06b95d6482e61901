"""A decoder of layers described by data: Llama, Qwen3, and what else differs from them in data only."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.params import Param, of_vocab
from treetop.kernels.fused import joined_in_order
from treetop.kernels.moe.routes import ALL_LIVE, RoutedTokens
from treetop.kernels.rope import RopeSpec, rope_table
from treetop.kernels.table import Ops
from treetop.models.attention import attention, attention_params, mixed
from treetop.models.config import AbsentSpec, LayerSpec, ModelConfig
from treetop.models.embedding import lookup, piece_of, rounded, whole_logits
from treetop.models.experts import live_rows
from treetop.models.feed_forward import feed_forward, feed_forward_params
from treetop.models.layers import (
    GatedMLP,
    NoNorm,
    Norm,
    RMSNorm,
    Rotary,
    SelfAttention,
    rotary_at,
    stream_norm,
    stream_norm_params,
)
from treetop.models.per_layer_embeddings import (
    PerLayerEmbeddings,
    per_layer_embedding_params,
    per_layer_gate,
    per_layer_gate_params,
)
from treetop.models.shortcut import ShortcutMLP
from treetop.models.target import LAST_HIDDEN, LastTokens, TargetOutput
from treetop.types.parallel import Summed, taken
from treetop.weights.format import CheckpointTensor, Linear, Product
from treetop.weights.held import Weights


class DecoderLayer:
    """Attention and feed-forward, each behind its norm, each added to the residual stream, perhaps through a norm."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, ops: Ops) -> None:
        spec, name, eps = config.layers[index], f"layers.{index}", config.norm_eps
        self.rope = None if spec.attends is None else spec.attends.rope
        self._add, stream = ops.add, spec.normed_stream
        self._keep: float | None = None
        self._mlp_keep: float | None = None
        self._scale = self._mlp_scale = config.residual_scale
        if stream is not None:
            (self._keep, self._scale), (self._mlp_keep, self._mlp_scale) = stream.of_mixer, stream.of_feed_forward
        self._joins = ops.profile.sums_in_order and ops.parallel.size > 1
        self._side_by_side = spec.side_by_side
        norm = partial(_norm, weights, config, ops=ops)
        self.input_norm = norm(f"{name}.input_norm") or NoNorm(ops)
        self._mixes, self._feeds = (not isinstance(each, AbsentSpec) for each in (spec.mixer, spec.feed_forward))
        self.products: list[Product] = []
        if self._mixes:
            self.attention = attention(spec.mixer, weights, f"{name}.attention", index, eps, ops)
            self.products += self.attention.products
        own_norm = norm(f"{name}.mlp_norm")
        self.mlp_norm = own_norm or NoNorm(ops)
        self._mlp_reads = own_norm if spec.side_by_side else None
        self._reads_normed = not self._mixes or spec.side_by_side or self._keep is not None  # behind the mixer, too
        if self._feeds:
            self.mlp = feed_forward(spec.feed_forward, weights, f"{name}.mlp", eps, ops)
            self.products += self.mlp.products
        outputs = (f"{name}.attention_output_norm", f"{name}.mlp_output_norm")
        self.attention_output_norm, self.mlp_output_norm = (norm(each, eps=spec.output_norm_eps) for each in outputs)
        if self._mixes and isinstance(self.attention, SelfAttention):
            _read_by(self.input_norm, self.attention.qkv)
        if self._feeds and isinstance(self.mlp, GatedMLP) and not spec.side_by_side:
            _read_by(self.mlp_norm, self.mlp.gate_up)
        self.shortcut = self.mlp if self._feeds and isinstance(self.mlp, ShortcutMLP) else None
        self.per_layer_gate = per_layer_gate(config, weights, index, ops)
        if self.per_layer_gate is not None:
            self.products += self.per_layer_gate.products

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        rotary: Rotary,
        attend: Attend,
        tokens: RoutedTokens = ALL_LIVE,
        late: list[Tensor] | None = None,
        last: LastTokens | None = None,
    ) -> tuple[Tensor, Summed]:
        """x: the residual stream, normed: its input norm. Returns the stream after attention, and what to add to it.

        late: what the layer before has left to be added behind this one, which takes it and may leave such itself.
        last: of these alone, [lines, 1, hidden] each; not where any layer leaves such.
        """
        given = mixed(self.attention, normed, rotary, attend, last) if self._mixes else None
        if last is not None:
            tokens = replace(tokens, live=last.of_mask(tokens.live, x.shape[1]))
            x, normed = last.of(x), last.of(normed) if self._reads_normed else normed
        if given is None:
            return x, self._added(self.mlp(normed, tokens, x), self.mlp_output_norm, x.dtype, self._mlp_scale)
        added = self._added(given, self.attention_output_norm, x.dtype, self._scale)
        x = _kept(x, normed, self._keep)
        if not self._feeds:
            return x, added
        if self._side_by_side:
            normed = normed if self._mlp_reads is None else self._mlp_reads(x)
            x = self._add(x, added)
        else:
            x, normed = self.mlp_norm.after(x, added)
        if late:
            x = self._add(x, late.pop())
        if self.shortcut is not None:
            assert late is not None
            late.append(self.shortcut.late(normed, tokens))
        added = self._added(self.mlp(normed, tokens, x), self.mlp_output_norm, x.dtype, self._mlp_scale)
        return _kept(x, normed, self._mlp_keep), added

    def leave(
        self, x: Tensor, added: Summed, norm: Norm | NoNorm, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of what `__call__` returns: the stream behind the layer, and what comes next of it, through `norm`.

        inputs: of `PerLayerEmbeddings`.
        """
        if self.per_layer_gate is None:
            return norm.after(x, added)
        x = self.per_layer_gate(self._add(x, added), inputs)
        return x, norm(x)

    def _added(self, parts: Summed, norm: Norm | None, dtype: torch.dtype, scale: float) -> Summed:
        """What is added to the residual stream of what a half of the layer gives."""
        if norm is not None:
            parts = norm.of_parts(parts, dtype)
        if scale == 1:
            return parts
        parts = taken(parts)
        return (joined_in_order(parts)[None] if self._joins else parts) * scale


def _kept(x: Tensor, normed: Tensor, keep: float | None) -> Tensor:
    """The residual stream that what a half gives is added to: x, or so much of what the half has read."""
    return x if keep is None else normed if keep == 1 else normed * keep


def _read_by(norm: Norm | NoNorm, product: Product) -> None:
    """Let a norm write what the product would make of its result."""
    if isinstance(norm, RMSNorm):
        norm.read_by(product)


def _norm(weights: Weights, config: ModelConfig, name: str, ops: Ops, eps: float | None = None) -> Norm | None:
    """None if the layer has none of this name. eps: None for the model's."""
    eps = config.norm_eps if eps is None else eps
    return stream_norm(weights, name, config.norm, eps, ops) if name in weights else None


class Decoder:
    """A `Target`. aux_inputs: the residual streams that its features are."""

    def __init__(
        self, config: ModelConfig, weights: Weights, aux_inputs: tuple[int, ...], place: LoadContext, ops: Ops
    ) -> None:
        self.config, self.aux_inputs, self._ops = config, aux_inputs, ops
        self.embedding = weights["embedding"]
        self._embed = lookup(self.embedding, ops.parallel)
        self._embedding_scale = rounded(config.embedding_scale, place.dtype)
        ones = torch.ones(config.hidden_size, dtype=place.dtype, device=place.device)
        self._embedding_norm = RMSNorm(ones, config.norm_eps, ops) if config.embedding_norm else None
        self.layers = [DecoderLayer(config, weights, index, ops) for index in range(len(config.layers))]
        # Not where more is read of the last layer, nor of several ranks, which exchange what all tokens give.
        self._may_leave_early = (
            not {LAST_HIDDEN, len(self.layers)} & {*aux_inputs}
            and ops.alone
            and config.per_layer_embeddings is None
            and all(layer.shortcut is None for layer in self.layers)
        )
        ropes = dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None)
        self._ropes = {rope: rope_table(rope, place.rope_rows, place.dtype, place.device) for rope in ropes}
        self.norm = stream_norm(weights, "norm", config.norm, config.norm_eps, ops)
        self.per_layer_embeddings = (
            PerLayerEmbeddings(config, weights, place.dtype, ops) if config.per_layer_embeddings else None
        )
        self.lm_head = weights.linear_with(self.embedding) if config.tied_embeddings else weights.linear("lm_head")
        self._logits = capped(self.lm_head, config.logits_cap)
        self._piece = piece_of(self._logits, self.embedding.shape[0], config.vocab_size, ops.parallel)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        tells_experts: bool = False,
        last: LastTokens | None = None,
    ) -> TargetOutput:
        """See `Target`."""
        early = last if self._may_leave_early else None
        x = self._embed(tokens)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        if self._embedding_norm is not None:
            x = self._embedding_norm(x)
        rotaries: dict[RopeSpec | None, Rotary] = {None: Rotary(None, None)}  # of layers that know no positions
        rotaries |= {rope: rotary_at(table, positions, self._ops) for rope, table in self._ropes.items()}
        inputs = None if self.per_layer_embeddings is None else self.per_layer_embeddings(tokens, x)
        live = live_rows(attend.live(), self._ops.expert_ranks) if self.config.has_experts else None
        routed = RoutedTokens(live, [] if tells_experts else None)
        aux_hidden, normed = {0: x}, self.layers[0].input_norm(x)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        late: list[Tensor] = []
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True), 1):
            only = early if index == len(self.layers) else None
            x, added = layer(x, normed, rotaries[layer.rope], attend, routed, late, only)
            x, normed = layer.leave(x, added, next_norm, inputs)
            if index in self.aux_inputs:
                aux_hidden[index] = x
        aux_hidden[LAST_HIDDEN] = normed
        hidden = normed if last is None or early is not None else last.of(normed)
        experts = None if routed.chosen is None else torch.stack(routed.chosen, dim=1).view(*tokens.shape, -1)
        return TargetOutput(hidden, tuple(aux_hidden[i] for i in self.aux_inputs), experts)

    @property
    def products(self) -> list[Product]:
        """See `Target`."""
        of_inputs = [] if self.per_layer_embeddings is None else self.per_layer_embeddings.products
        return [*of_inputs, *(product for layer in self.layers for product in layer.products), self.lm_head]

    def piece(self, hidden: Tensor) -> Tensor:
        """See `Target`."""
        return self._piece(self._read(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Target`."""
        return whole_logits(self._logits(self._read(hidden)), self.config.vocab_size, self._ops.parallel)

    def _read(self, hidden: Tensor) -> Tensor:
        """What the output matrix reads: scaled before the product, which is narrower than its result."""
        return hidden if self.config.logits_scale == 1 else hidden * self.config.logits_scale


def capped(lm_head: Linear, cap: float | None) -> Callable[[Tensor], Tensor]:
    """The product that gives logits, between -cap and cap if there is one."""
    return lm_head if cap is None else partial(_capped, lm_head, cap)


def _capped(lm_head: Linear, cap: float, hidden: Tensor) -> Tensor:
    return (lm_head(hidden) / cap).tanh_().mul_(cap)


def decoder_params(config: ModelConfig) -> list[Param]:
    """By the names that Llama gave its tensors, and most others after it."""
    hidden, vocab = config.hidden_size, config.vocab_size
    params = [
        of_vocab("embedding", "model.embed_tokens.weight", vocab, hidden, "table"),
        *stream_norm_params("norm", "model.norm", config),
    ]
    for index in range(len(config.layers)):
        params += layer_params(config, index, f"model.layers.{index}")
    if config.per_layer_embeddings is not None:
        params += per_layer_embedding_params(config, config.per_layer_embeddings)
    if not config.tied_embeddings:
        params.append(of_vocab("lm_head", "lm_head.weight", vocab, hidden))
    if config.logits_bias:
        params.append(
            Param("lm_head_bias", (vocab,), (CheckpointTensor("lm_head.bias", (vocab,)),), "vector", 0, padded=True)
        )
    return params


def layer_params(config: ModelConfig, index: int, stored: str) -> list[Param]:
    """Of one layer. stored: the prefix of its tensors."""
    layer, name, hidden, offset = config.layers[index], f"layers.{index}", config.hidden_size, config.unit_offset
    norms = {
        "input_norm": layer.norms.attention,
        "mlp_norm": layer.norms.feed_forward,
        "attention_output_norm": layer.norms.attention_output,
        "mlp_output_norm": layer.norms.feed_forward_output,
    }
    return [
        *(p for n, s in norms.items() if s for p in stream_norm_params(f"{name}.{n}", f"{stored}.{s}", config)),
        *attention_params(layer.mixer, f"{name}.attention", f"{stored}.{_block(layer)}", hidden, hidden, offset),
        *feed_forward_params(layer.feed_forward, f"{name}.mlp", f"{stored}.mlp", hidden),
        *per_layer_gate_params(config, name, stored, layer.scaled),
    ]


def _block(layer: LayerSpec) -> str:
    """What a checkpoint calls a layer's mixer."""
    return "self_attn" if layer.recurrent is None or layer.attends is not None else layer.recurrent.block


def unused_tensors(config: ModelConfig) -> set[str]:
    """What a file may hold without a use; older writers stored the frequencies of the rotation."""
    frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(len(config.layers))}
    return frequencies | ({"lm_head.weight"} if config.tied_embeddings else set())
