"""What a layer adds behind its feed-forward: something of the token itself, and a number that scales what it leaves.

    inputs = (norm(x @ P / sqrt(hidden)) + table[token] * sqrt(width)) / sqrt(2)    once, of all layers, x the embedding
    x = x + norm(activation(x @ gate) * inputs[layer] @ back)                       behind each layer
    x = x * scalar

Source: Gemma 4 and 3n, `transformers`' gemma4. The table is as large as the model, and looked up alone.
"""

import torch
from torch import Tensor

from treetop.checkpoints.params import Param, matrix, of_vocab, vector
from treetop.kernels.gate import activated_reference
from treetop.kernels.table import Ops
from treetop.models.config import ModelConfig, PerLayerSpec
from treetop.models.embedding import lookup
from treetop.models.layers import RMSNorm, norm_param
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights


class PerLayerEmbeddings:
    """What all layers add of a token, before their gates."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, ops: Ops) -> None:
        assert config.per_layer_embeddings is not None
        self._width, self._hidden = config.per_layer_embeddings.width, config.hidden_size
        self._lookup = lookup(weights["per_layer_embeddings.table"], ops.parallel)
        self._projection = weights.linear("per_layer_embeddings.projection")
        self._norm = RMSNorm(weights["per_layer_embeddings.norm"], config.norm_eps, ops)
        self._scale = float(torch.tensor(self._width**0.5, dtype=dtype))
        self.products: list[Product] = [self._projection]

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """tokens: [rows, n]. x: [rows, n, hidden], their embeddings. Returns [rows, n, layers, width]."""
        of_text = (self._projection(x) * self._hidden**-0.5).unflatten(-1, (-1, self._width))
        of_token = (self._lookup(tokens) * self._scale).unflatten(-1, (-1, self._width))
        inputs: Tensor = (self._norm(of_text) + of_token) * 2.0**-0.5
        return inputs


class PerLayerGate:
    """What comes behind a layer, see the module."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, ops: Ops) -> None:
        name, self._index, self._inputs = f"layers.{index}.per_layer_gate", index, config.per_layer_embeddings
        self._scalar, self._functions = weights.pop(f"{name}.scalar"), ops.functions
        self.products: list[Product] = []
        if self._inputs is not None:
            self._gate, self._back = weights.linear(f"{name}.gate"), weights.linear(f"{name}.back")
            self._norm = RMSNorm(weights[f"{name}.norm"], config.norm_eps, ops)
            self.products += [self._gate, self._back]

    def __call__(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """x: [rows, n, hidden], what the layer leaves. inputs: of `PerLayerEmbeddings`."""
        if self._inputs is not None:
            assert inputs is not None
            gate = activated_reference(self._gate(x), self._inputs.gate, self._functions)
            x = x + self._norm(self._back(gate * inputs[:, :, self._index]))
        return x if self._scalar is None else x * self._scalar


def per_layer_gate(config: ModelConfig, weights: Weights, index: int, ops: Ops) -> PerLayerGate | None:
    """None if nothing comes behind the layer."""
    if config.per_layer_embeddings is None and not config.layers[index].scaled:
        return None
    return PerLayerGate(config, weights, index, ops)


def per_layer_embedding_params(config: ModelConfig, inputs: PerLayerSpec) -> list[Param]:
    wide, hidden = len(config.layers) * inputs.width, config.hidden_size
    return [
        of_vocab("per_layer_embeddings.table", "model.embed_tokens_per_layer.weight", inputs.vocab_size, wide, "table"),
        matrix(
            "per_layer_embeddings.projection",
            CheckpointTensor("model.per_layer_model_projection.weight", (wide, hidden)),
        ),
        norm_param("per_layer_embeddings.norm", "model.per_layer_projection_norm.weight", inputs.width),
    ]


def per_layer_gate_params(config: ModelConfig, name: str, stored: str, scaled: bool) -> list[Param]:
    """Of a layer. stored: the prefix of its tensors."""
    params, inputs, hidden = [], config.per_layer_embeddings, config.hidden_size
    if inputs is not None:
        gate = CheckpointTensor(f"{stored}.per_layer_input_gate.weight", (inputs.width, hidden))
        back = CheckpointTensor(f"{stored}.per_layer_projection.weight", (hidden, inputs.width))
        params += [
            matrix(f"{name}.per_layer_gate.gate", gate),
            matrix(f"{name}.per_layer_gate.back", back),
            norm_param(f"{name}.per_layer_gate.norm", f"{stored}.post_per_layer_input_norm.weight", hidden),
        ]
    if scaled:
        params.append(vector(f"{name}.per_layer_gate.scalar", CheckpointTensor(f"{stored}.layer_scalar", (1,))))
    return params
