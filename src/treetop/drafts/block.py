"""Block heads: one forward a round proposes every depth of a tree. DFlash, DFlash 2, JetSpec, DSpark and Domino.

A token that the target has run leaves a vector c = hidden_norm(fc(its states)), and each layer keeps K and V of it, all
of them one product, at the token's own position: no draft forward, and no token after it. A round runs a block of the
root and masks behind it, whose queries see that context and, all or up to themselves, each other; what they leave is
dropped. Slot `first + d` gives the logits of depth d + 1, with edges (`drafts.block_edges`) those of each parent.

A block alone gives marginals: every node of a depth has the same proposals. `drafts.block_config` reads the layouts.
Source: DFlash (z-lab/dflash), JetSpec, arXiv:2606.18394, DSpark (DeepSpec), Domino (SpecForge).
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
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, matrix, vector
from treetop.drafts.block_edges import BlockSlot, Edges, EdgeSpec
from treetop.drafts.block_layers import ConvolutionSpec, ConvolvedLayer
from treetop.drafts.head_files import EMBEDDING, OutputOf, check_vocab, head_output, no_offset, vocab_params
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
from treetop.kernels.fused import HeadNorms
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.config import AttentionSpec, ModelConfig
from treetop.models.decoder import DecoderLayer, capped, layer_params
from treetop.models.embedding import part_of, rounded, whole_logits, whole_table
from treetop.models.layers import RMSNorm, Rotary, head_norms, norm_param, rotary_at
from treetop.models.target import Target
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights


@dataclass(frozen=True, slots=True)
class BlockHeadSpec:
    """A `DrafterSpec`.

    decoder: sizes and layers, without embedding and output.
    vocab_size: of the draft.
    block: its pass.
    first: the slot that proposes after the root: 0 where slots predict the token after their own, 1 where their own.
    mask_token: what the block's tokens after the root are.
    edges: None for marginals.
    convolution: around what each layer computes of the block; None without.
    output: whose matrix gives logits.
    root: what tensors' names begin with.
    stored: which of the embedding, d2t, t2d and tensors without a use the file has.
    """

    folder: Path = field(compare=False)
    decoder: ModelConfig
    vocab_size: int
    aux_inputs: tuple[int, ...]
    target_hidden_size: int
    block: BlockSpec
    first: int
    mask_token: int
    edges: EdgeSpec | None
    output: OutputOf
    root: str
    stored: frozenset[str]
    convolution: ConvolutionSpec | None = None
    unused: tuple[str, ...] = ()
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True

    def with_window(self, window: int) -> "BlockHeadSpec":
        """The same, whose layers see no more than so many tokens."""
        return replace(self, decoder=self.decoder.with_window(window))

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.decoder.layers)

    @property
    def state_size(self) -> int:
        return 0 if self.edges is None else self.edges.state_size

    @property
    def params(self) -> list[Param]:
        hidden, root = self.decoder.hidden_size, self.root
        params = [
            matrix(
                "fuse",
                CheckpointTensor(f"{root}fc.weight", (hidden, len(self.aux_inputs) * self.target_hidden_size)),
                shard=0,
            ),
            norm_param("hidden_norm", f"{root}hidden_norm.weight", hidden),
            norm_param("norm", f"{root}norm.weight", hidden),
        ]
        rows, biases = list[CheckpointTensor](), list[CheckpointTensor]()
        for index, layer in enumerate(self.decoder.layers):
            name, stored = f"layers.{index}", f"{root}layers.{index}"
            own = {param.name: param for param in layer_params(self.decoder, index, stored)}
            params += own.values()
            if self.convolution is not None:
                params += self.convolution.params(name, stored)
            rows += own[f"{name}.attention.qkv"].sources[1:]  # of q, k and v
            if layer.attention.bias:
                biases += own[f"{name}.attention.qkv_bias"].sources[1:]
        params.append(matrix("context", *rows, shard=0))
        if biases:
            params.append(vector("context_bias", *biases, shard=0))
        if self.edges is not None:
            params += self.edges.params()
        return in_formats(
            params + vocab_params(self.decoder, self.vocab_size, self.output, self.stored), self.decoder.formats
        )

    @property
    def derived(self) -> int:
        return 0

    @property
    def streamed(self) -> Streamed:
        numbers = {param.name: param.numbers for param in self.params if param.kind in STREAMED}
        fuse, edges = numbers.pop("fuse") + numbers.pop("context"), numbers.pop("edge_output", 0)
        numbers.pop("lm_head", None)
        output = self.vocab_size * self.decoder.hidden_size + edges
        return Streamed(sum(numbers.values()), fuse, output, in_levels=False, in_extend=False)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "BlockHead":
        return BlockHead(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "BlockHead":
        """A copy of the target's embedding is not kept twice. Raises CheckpointError for a wrong tensor."""
        weights = load_weights(self.folder, self.params, place, self.unused)
        parallel = place.parallel
        shared = EMBEDDING in self.stored and torch.equal(part_of(weights[EMBEDDING], parallel), target.embedding)
        if parallel.minimum(int(shared)):  # one answer for all ranks
            weights.pop(EMBEDDING)
        offset = weights["d2t"] if "d2t" in weights else no_offset(self.vocab_size, place.device)
        check_vocab(self.folder, offset, weights.pop("t2d"), self.decoder.vocab_size)
        return self.build(weights, target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params, self.unused)


@dataclass(frozen=True, slots=True)
class _Lines:
    """Of a block's slots, by the depth of the node that they propose after.

    hidden: [rows, depths, hidden].
    logits: [rows, depths, draft vocab], without what edges add.
    """

    hidden: Tensor
    logits: Tensor

    def slot(self, depth: int) -> BlockSlot:
        return BlockSlot(depth, self.hidden[:, depth], self.logits[:, depth])


class BlockHead:
    """A `Drafter` and its `DraftBlock`; see the module."""

    def __init__(self, spec: BlockHeadSpec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding and output matrix the head uses where it has none of its own."""
        config, layers = spec.decoder, range(len(spec.decoder.layers))
        self.spec, self._ops = spec, ops
        embedding = weights.pop(EMBEDDING)
        self.embedding = (
            whole_table(target.embedding, config.vocab_size, ops.parallel) if embedding is None else embedding
        )
        self._rope = rope_table(config.layers[0].attention.rope, place.rope_rows, place.dtype, place.device)
        self.fuse, self.context = weights.linear("fuse"), weights.linear("context")
        self.hidden_norm, self.norm = (RMSNorm(weights[name], config.norm_eps, ops) for name in ("hidden_norm", "norm"))
        self._embedding_scale = rounded(config.embedding_scale, place.dtype)
        plain = [DecoderLayer(config, weights, i, ops) for i in layers]
        self._norms = [
            head_norms(layer.attention, weights, f"layers.{i}.attention", config.norm_eps, ops)
            for i, layer in enumerate(config.layers)
        ]
        around = spec.convolution
        self.layers: list[DecoderLayer | ConvolvedLayer] = (
            [*plain] if around is None else [ConvolvedLayer(each, around, weights, i) for i, each in enumerate(plain)]
        )
        self.edges: Edges | None = None if spec.edges is None else spec.edges.build(weights, self.embedding, ops)
        self.lm_head = head_output(spec.output, weights, self.embedding, target, ops.parallel)
        self._product = capped(self.lm_head, config.logits_cap)
        self._logits: Callable[[Tensor], Tensor] = target.logits if spec.output == "target" else self._own_logits
        self.products = DraftProducts(
            [product for layer in self.layers for product in layer.products],
            [self.fuse, self.context],
            [self.lm_head, *([] if self.edges is None else self.edges.products)],
        )
        self.vocab = DraftVocab(weights["d2t"] if "d2t" in weights else no_offset(spec.vocab_size, place.device))

    @property
    def block(self) -> "BlockHead":
        """See `Drafter`."""
        return self

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`. Of the target's states alone: there is no state, and no token after one counts."""
        context = self.hidden_norm(self._ops.parallel.join(self.fuse(aux_hidden)))
        rotary = rotary_at(self._rope, positions, self._ops)
        kv = self.context.parts(context)
        kv = kv.unflatten(-1, (len(self.layers), -1, self.spec.attention[0].head_dim))
        for index, norms in enumerate(self._norms):
            attend.write(index, partial(self._write, kv[..., index, :, :].contiguous(), rotary, norms))
        return aux_hidden.new_zeros((len(at.rows), self.spec.state_size))

    def _write(
        self,
        kv: Tensor,
        rotary: Rotary,
        norms: HeadNorms | None,
        target: Tensor,
        slots: Tensor | None,
        scales: Tensor | None,
    ) -> Tensor:
        """A `WriteKV` without queries. kv: [parts, rows, n, 2 * kv_heads, dim]."""
        return self._ops.rotate_and_write(kv, rotary.angles, target, slots, norms=norms, scales=scales)

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """See `DraftBlock`."""
        spec, width = self.spec, self.spec.block.width
        tokens = torch.full_like(roots.tokens, spec.mask_token)[:, None].repeat(1, width)
        tokens[:, 0] = roots.tokens
        positions = roots.positions[:, None] + torch.arange(width, device=tokens.device)
        rotary = rotary_at(self._rope, positions, self._ops)
        x = F.embedding(tokens, self.embedding)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        normed = self.layers[0].input_norm(x)
        for layer, next_norm in zip(
            self.layers, [*(each.input_norm for each in self.layers[1:]), self.norm], strict=True
        ):
            x, added = layer(x, normed, rotary, attend)
            x, normed = layer.leave(x, added, next_norm)
        hidden = normed[:, spec.first : spec.first + roots.depths].contiguous()
        lines = _Lines(hidden, self._logits(hidden))
        if self.edges is None:
            return BlockOutput(x.new_zeros((len(tokens), 0)), lines)
        before = x.new_zeros((len(tokens), 1, spec.state_size))
        return BlockOutput(self.edges.state(roots.tokens[:, None], lines.slot(0), before)[:, 0], lines)

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`: no layer runs."""
        if self.edges is None:
            return nodes.state
        return self.edges.state(nodes.tokens, lines.slot(nodes.depth), nodes.state)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`: without edges all nodes of a depth have the same."""
        slot, offset = lines.slot(nodes.depth), self.vocab.offset
        if self.edges is None:
            best, tokens = self._ops.top_logprobs(slot.logits, k, offset, inv_temp)
            of_nodes = (*nodes.tokens.shape, k)
            best, tokens = (x.view(len(x), *[1] * (len(of_nodes) - 2), k).expand(of_nodes) for x in (best, tokens))
            return Proposal(tokens, best)
        if nodes.tokens.dim() > 1:
            return self.edges.propose(slot, nodes.state, k, offset, inv_temp)
        found = self.edges.propose(slot, nodes.state[:, None], k, offset, inv_temp)
        return Proposal(found.tokens[:, 0], found.logprob[:, 0])

    def _own_logits(self, hidden: Tensor) -> Tensor:
        return whole_logits(self._product(hidden), self.spec.vocab_size, self._ops.parallel)
