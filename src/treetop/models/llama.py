"""Targets of Llama's shape: Llama, and Qwen3, whose attention has norms of queries and keys."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from treetop.attention.phase import Attend
from treetop.kernels.ops import Ops
from treetop.kernels.rope import RopeTable
from treetop.models.checkpoint import Shapes
from treetop.models.layers import GatedMLP, RMSNorm, SelfAttention, Weights
from treetop.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """hidden: [rows, n, hidden], after the final norm. features: [rows, n, hidden] of each of `aux_inputs`."""

    hidden: Tensor
    features: tuple[Tensor, ...]


class LlamaLayer:
    """Attention and MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int, ops: Ops) -> None:
        prefix = f"model.layers.{layer}"
        self.input_norm = RMSNorm(weights[f"{prefix}.input_layernorm.weight"], spec.norm_eps, ops)
        self.attention = SelfAttention(spec, weights, f"{prefix}.self_attn", layer, ops)
        self.mlp_norm = RMSNorm(weights[f"{prefix}.post_attention_layernorm.weight"], spec.norm_eps, ops)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", ops)

    def __call__(self, x: Tensor, normed: Tensor, angles: Any, attend: Attend) -> tuple[Tensor, Tensor]:
        """x: the residual stream, normed: its input norm. Returns the stream after attention, and the MLP's parts."""
        x, normed = self.mlp_norm.after(x, self.attention(normed, angles, attend))
        return x, self.mlp(normed)


class Llama:
    """A target model: tokens in, hidden states and the draft head's features out."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, rope: RopeTable, aux_inputs: tuple[int, ...], ops: Ops
    ) -> None:
        self.spec, self.rope, self.aux_inputs, self._ops = spec, rope, aux_inputs, ops
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [LlamaLayer(spec, weights, layer, ops) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(weights["model.norm.weight"], spec.norm_eps, ops)
        self.lm_head = ops.linear(self.embedding if spec.tied_embeddings else weights["lm_head.weight"])

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> TargetOutput:
        """tokens, positions: [rows, n] int64. Features are the residual stream entering each layer of `aux_inputs`."""
        x = F.embedding(tokens, self.embedding)
        angles = self._ops.angles(self.rope, positions)
        features, normed = {0: x}, self.layers[0].input_norm(x)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True), 1):
            x, added = layer(x, normed, angles, attend)
            x, normed = next_norm.after(x, added)
            if index in self.aux_inputs:
                features[index] = x
        return TargetOutput(normed, tuple(features[i] for i in self.aux_inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden], after the final norm. Returns [..., vocab]."""
        return self.lm_head(hidden)

    @staticmethod
    def shapes(spec: ModelSpec) -> Shapes:
        """Every tensor of a Llama checkpoint."""
        hidden = spec.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (spec.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            shapes |= SelfAttention.shapes(spec, f"{prefix}.self_attn", hidden)
            shapes |= GatedMLP.shapes(spec, f"{prefix}.mlp")
        if not spec.tied_embeddings:
            shapes["lm_head.weight"] = (spec.vocab_size, hidden)
        return shapes
