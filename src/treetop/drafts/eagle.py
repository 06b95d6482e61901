"""The draft head of EAGLE-1 and EAGLE-2, which differ in the trees they grow and not in their weights.

Its slot i holds the pair (last hidden state of token i, token i + 1) at position i: a decoder layer without an input
norm over `fc` of both, whose output is the state that goes on, and of which the target's own output matrix makes
logits. There is no final norm.
Source: EAGLE, arXiv:2401.15077; SafeAILab/EAGLE `eagle/model/cnets1.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, matrix, of_vocab, vector
from treetop.drafts.head_files import (
    EMBEDDING,
    OUTPUT,
    OutputOf,
    check_made_for,
    head_layers,
    head_output,
    layer_prefixes,
    no_offset,
    output_of,
    stated,
)
from treetop.drafts.protocol import DraftProducts, DraftVocab, Extension, Nodes, Proposal, Streamed
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.attention import attention, attention_params, mixed
from treetop.models.config import AttentionSpec, ModelConfig, model_config, read_config
from treetop.models.decoder import DecoderLayer
from treetop.models.embedding import part_of, whole_logits, whole_table
from treetop.models.feed_forward import feed_forward_params
from treetop.models.layers import GatedMLP, RMSNorm, norm_param, rotary_at
from treetop.models.target import LAST_HIDDEN, LastTokens, Target
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """A `DrafterSpec`.

    output: whose matrix gives logits.
    embedding: whether the file has one.
    """

    folder: Path = field(compare=False)
    decoder: ModelConfig
    fuse_bias: bool
    output: OutputOf
    embedding: bool
    aux_inputs: tuple[int, ...] = (LAST_HIDDEN,)
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True
    block: None = None

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    def with_window(self, window: int) -> "EagleSpec":
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
        hidden, table = self.decoder.hidden_size, (self.decoder.vocab_size, self.decoder.hidden_size)
        params = [matrix("fuse", CheckpointTensor("fc.weight", (hidden, 2 * hidden)), shard=0)]
        if self.fuse_bias:
            params.append(vector("fuse_bias", CheckpointTensor("fc.bias", (hidden,)), shard=0))
        for index, layer in enumerate(self.decoder.layers):
            name = f"layers.{index}"
            if index > 0:
                params.append(norm_param(f"{name}.input_norm", f"{name}.input_layernorm.weight", hidden))
            params += [
                norm_param(f"{name}.mlp_norm", f"{name}.post_attention_layernorm.weight", hidden),
                *attention_params(layer.attention, f"{name}.attention", f"{name}.self_attn", hidden, hidden),
                *feed_forward_params(layer.feed_forward, f"{name}.mlp", f"{name}.mlp", hidden),
            ]
        if self.output == "own":
            params.append(of_vocab("lm_head", OUTPUT, *table))
        if self.embedding:
            params.append(Param(EMBEDDING, table, (CheckpointTensor(EMBEDDING, table),), "table"))
        return in_formats(params, self.decoder.formats)

    @property
    def derived(self) -> int:
        return 0

    @property
    def streamed(self) -> Streamed:
        numbers = {param.name: param.numbers for param in self.params if param.kind in STREAMED}
        numbers.pop("lm_head", None)
        return Streamed(sum(numbers.values()), 0, self.vocab_size * self.decoder.hidden_size)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "EagleHead":
        return EagleHead(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "EagleHead":
        """Most files have a copy of the target's embedding, which is not kept twice."""
        weights = load_weights(self.folder, self.params, place)
        parallel = place.parallel
        may_share = self.embedding and self.output != "embedding"
        shared = may_share and torch.equal(part_of(weights[EMBEDDING], parallel), target.embedding)
        if parallel.minimum(int(shared)):  # one answer for all ranks
            weights.pop(EMBEDDING)
        return self.build(weights, target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params)


class EagleHead:
    """A `Drafter`; see the module."""

    block = None

    def __init__(self, spec: EagleSpec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding and output matrix the head uses where it has none of its own."""
        eps, first = spec.decoder.norm_eps, spec.decoder.layers[0]
        self.spec, self._ops = spec, ops
        self._rope = rope_table(first.attention.rope, place.rope_rows, place.dtype, place.device)
        embedding = weights.pop(EMBEDDING)
        self.embedding = (
            whole_table(target.embedding, spec.decoder.vocab_size, ops.parallel) if embedding is None else embedding
        )
        self.fuse = weights.linear("fuse")
        self.attention = attention(first.attention, weights, "layers.0.attention", 0, eps, ops)
        self.mlp_norm = RMSNorm(weights["layers.0.mlp_norm"], eps, ops)
        self.mlp = GatedMLP(weights, "layers.0.mlp", ops)
        self.deeper = [DecoderLayer(spec.decoder, weights, i, ops) for i in range(1, len(spec.decoder.layers))]
        self.lm_head = head_output(spec.output, weights, self.embedding, target, ops.parallel)
        self._logits: Callable[[Tensor], Tensor] = target.logits if spec.output == "target" else self._own_logits
        layers = [*self.attention.products, *self.mlp.products, *(p for layer in self.deeper for p in layer.products)]
        self.products = DraftProducts([self.fuse, *layers], [], [self.lm_head])
        self.vocab = DraftVocab(no_offset(spec.vocab_size, place.device))

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return at.states(self._ops, partial(self._forward, tokens, aux_hidden, positions, attend))

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`. The state is the head's output, where the target's last hidden state would be."""
        return self._forward(nodes.tokens, nodes.state, positions, attend)

    def _forward(
        self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend, last: LastTokens | None = None
    ) -> Tensor:
        rotary = rotary_at(self._rope, positions, self._ops)
        x = self._ops.parallel.join(self.fuse(torch.cat([F.embedding(tokens, self.embedding), state], dim=-1)))
        of_first = None if self.deeper else last
        added = mixed(self.attention, x, rotary, attend, of_first)
        x, normed = self.mlp_norm.after(x if of_first is None else of_first.of(x), added)
        added = self.mlp(normed)
        for layer in self.deeper:
            x, normed = layer.input_norm.after(x, added)
            x, added = layer(x, normed, rotary, attend, last=last if layer is self.deeper[-1] else None)
        return self._ops.add(x, added)

    def _own_logits(self, state: Tensor) -> Tensor:
        return whole_logits(self.lm_head(state), self.spec.vocab_size, self._ops.parallel)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        best, tokens = self._ops.top_logprobs(self._logits(nodes.state), k, self.vocab.offset, inv_temp)
        return Proposal(tokens, best)


def eagle_spec(folder: Path, target: ModelConfig, dummy: bool) -> EagleSpec:
    """The head in a folder, for `target`. dummy: there are no tensors to look at.

    `fc.bias` is there or not, whatever the config says by default: published files differ. Raises CheckpointError if
    the head was made for another target.
    """
    config, where = read_config(folder), folder / "config.json"
    names = frozenset({"layers.0.mlp"} if dummy else tensor_files(folder))
    prefixes = layer_prefixes(folder, names)
    decoder = model_config(config, where, head_layers(config, where, names, prefixes))
    check_made_for(where, decoder, decoder.hidden_size, target)
    return EagleSpec(
        folder=folder,
        decoder=decoder,
        fuse_bias=stated(config, ("bias", "eagle_fc_bias"), "fc.bias", names, where),
        output=output_of(decoder, decoder.vocab_size, target, names, folder),
        embedding=EMBEDDING in names,
    )
