"""The Llama target."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from treetop.attention.phase import Attend
from treetop.kernels.linear import packed_linear
from treetop.kernels.rope import RopeTable, Rotation
from treetop.models.checkpoint import Shapes
from treetop.models.layers import GatedMLP, RMSNorm, SelfAttention, Weights
from treetop.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """hidden: [rows, n, hidden], before the final norm. features: [rows, n, hidden] of each of `aux_inputs`."""

    hidden: Tensor
    features: tuple[Tensor, ...]


class LlamaLayer:
    """Attention and MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.input_norm = RMSNorm(weights[f"{prefix}.input_layernorm.weight"], spec.norm_eps)
        self.attention = SelfAttention(spec, weights, f"{prefix}.self_attn", layer)
        self.mlp_norm = RMSNorm(weights[f"{prefix}.post_attention_layernorm.weight"], spec.norm_eps)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp")

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotation, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama:
    """A target model: tokens in, hidden states and the draft head's features out."""

    def __init__(self, spec: ModelSpec, weights: Weights, rope: RopeTable, aux_inputs: tuple[int, ...] = ()) -> None:
        self.spec, self.rope, self.aux_inputs = spec, rope, aux_inputs
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [LlamaLayer(spec, weights, layer) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(weights["model.norm.weight"], spec.norm_eps)
        self.lm_head = packed_linear(self.embedding if spec.tied_embeddings else weights["lm_head.weight"])

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> TargetOutput:
        """tokens, positions: [rows, n] int64. Features are the residual stream entering each layer of `aux_inputs`."""
        x = F.embedding(tokens, self.embedding)
        rotation = self.rope.at(positions)
        stream = [x]
        for layer in self.layers:
            stream.append(layer(stream[-1], rotation, attend))
        return TargetOutput(stream[-1], tuple(stream[i] for i in self.aux_inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden] before the final norm. Returns [..., vocab]."""
        return self.lm_head(self.norm(hidden))

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
