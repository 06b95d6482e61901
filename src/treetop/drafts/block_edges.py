"""Edges of a block head: what a path changes of the slot that proposes after it.

A block gives each depth its logits, which know nothing of the tokens that a path chose before. Edges score what follows
a node by the node's own path, which in a tree is not the likeliest one: DSpark's Markov head and Domino's recurrence
add a bias to the logits, DFlash 2's selector scores the best few of them anew.
Source: DSpark in DeepSpec and `speculators` 0.9.0, Domino in SpecForge a6b6b02, DFlash 2 in `speculators` 0.9.0.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.checkpoints.params import Param, matrix, vector
from treetop.drafts.protocol import Proposal
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.tree import stable_topk
from treetop.weights.format import CheckpointTensor, Linear, Product
from treetop.weights.held import Weights

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """A slot of a block, which proposes after nodes of a depth. hidden: [rows, hidden]. logits: [rows, draft vocab]."""

    depth: int
    hidden: Tensor
    logits: Tensor


class Edges(Protocol):
    """products: what they take with weights."""

    @property
    def products(self) -> list[Product]: ...

    def state(self, tokens: Tensor, slot: BlockSlot, parent: Tensor) -> Tensor:
        """Of nodes. tokens: [rows, n] int64, target ids. slot: that proposes after them. parent: [rows, n, state_size],
        0 for a root. Returns [rows, n, state_size]."""

    def propose(
        self, slot: BlockSlot, state: Tensor, k: int, offset: Tensor, inv_temp: InverseTemperature | None
    ) -> Proposal:
        """What may follow nodes with these states, [rows, n, state_size]; see `Drafter.propose`.

        offset: that of `DraftVocab`.
        """


class EdgeSpec(Protocol):
    """Edges before their weights are read. max_topk: most proposals of a node that they score; None for any."""

    @property
    def state_size(self) -> int: ...

    @property
    def max_topk(self) -> int | None: ...

    def params(self) -> list[Param]: ...

    def build(self, weights: Weights, embedding: Tensor, ops: Ops) -> Edges:
        """embedding: [vocab, hidden], of the head."""


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """DSpark's. vocab_size: of the target, whose tokens nodes are. draft_vocab: that of the logits."""

    kind: MarkovKind
    rank: int
    hidden_size: int
    vocab_size: int
    draft_vocab: int
    prefix: str = "markov_head"
    max_topk: None = None

    @property
    def state_size(self) -> int:
        """What the logits need of a node; an rnn also what it hands on."""
        return 2 * self.rank if self.kind == "rnn" else self.rank

    def params(self) -> list[Param]:
        table = CheckpointTensor(f"{self.prefix}.markov_w1.weight", (self.vocab_size, self.rank))
        params = [
            Param("edge_table", table.shape, (table,), "table"),
            matrix("edge_output", CheckpointTensor(f"{self.prefix}.markov_w2.weight", (self.draft_vocab, self.rank))),
        ]
        if self.kind != "vanilla":
            name = "gate_proj" if self.kind == "gated" else "joint_proj"
            out, width = self._gate_shape
            params.append(matrix("edge_gate", CheckpointTensor(f"{self.prefix}.{name}.weight", (out, width))))
            params.append(vector("edge_gate_bias", CheckpointTensor(f"{self.prefix}.{name}.bias", (out,))))
        return params

    @property
    def _gate_shape(self) -> tuple[int, int]:
        if self.kind == "gated":
            return self.rank, self.hidden_size + self.rank
        return 3 * self.rank, 2 * self.rank + self.hidden_size

    def build(self, weights: Weights, embedding: Tensor, ops: Ops) -> "Markov":
        return Markov(self, weights, ops)


class Markov:
    """`Edges`. The state of a node is the vector whose product with the output matrix is its bias; of an rnn, before
    that, what the path hands on."""

    def __init__(self, spec: MarkovSpec, weights: Weights, ops: Ops) -> None:
        self.spec, self.table, self._ops = spec, weights["edge_table"], ops
        self.output = weights.linear("edge_output")
        self.gate: Linear | None = None if spec.kind == "vanilla" else weights.linear("edge_gate")
        self.products: list[Product] = [self.output, *([] if self.gate is None else [self.gate])]

    def state(self, tokens: Tensor, slot: BlockSlot, parent: Tensor) -> Tensor:
        """See `Edges`."""
        own = F.embedding(tokens, self.table)
        if self.gate is None:
            return own
        hidden, sigmoid = slot.hidden[:, None].expand(*own.shape[:-1], -1), self._ops.functions.sigmoid
        if self.spec.kind == "gated":
            return own * sigmoid(self.gate(torch.cat([hidden, own], dim=-1)))
        before = parent[..., : self.spec.rank]
        gate, new, out = self.gate(torch.cat([before, own, hidden], dim=-1)).chunk(3, dim=-1)
        kept = sigmoid(gate)
        return torch.cat([kept * before + (1 - kept) * torch.tanh(new), torch.tanh(out)], dim=-1)

    def propose(
        self, slot: BlockSlot, state: Tensor, k: int, offset: Tensor, inv_temp: InverseTemperature | None
    ) -> Proposal:
        """See `Edges`."""
        logits = slot.logits[:, None] + self.output(state[..., -self.spec.rank :])
        best, tokens = self._ops.top_logprobs(logits, k, offset, inv_temp)
        return Proposal(tokens, best)


@dataclass(frozen=True, slots=True)
class DominoSpec:
    """Domino's: a GRU over the embeddings of a path, whose state and the slot's hidden make a bias.

    state_size: of the GRU. width: between the two products that make the bias. plain: depths without one.
    """

    state_size: int
    width: int
    plain: int
    hidden_size: int
    draft_vocab: int
    prefix: str = ""
    max_topk: None = None

    def params(self) -> list[Param]:
        gates, at = 3 * self.state_size, self.prefix
        return [
            matrix("edge_input", CheckpointTensor(f"{at}prefix_gru.weight_ih_l0", (gates, self.hidden_size))),
            matrix("edge_recurrence", CheckpointTensor(f"{at}prefix_gru.weight_hh_l0", (gates, self.state_size))),
            matrix(
                "edge_down",
                CheckpointTensor(f"{at}embed_proj.0.weight", (self.width, self.hidden_size + self.state_size)),
            ),
            matrix("edge_output", CheckpointTensor(f"{at}embed_proj.2.weight", (self.draft_vocab, self.width))),
        ]

    def build(self, weights: Weights, embedding: Tensor, ops: Ops) -> "Domino":
        return Domino(self, weights, embedding, ops)


class Domino:
    """`Edges`. The state of a node is that of the GRU after the node's own token."""

    def __init__(self, spec: DominoSpec, weights: Weights, embedding: Tensor, ops: Ops) -> None:
        self.spec, self.embedding, self._ops = spec, embedding, ops
        self.input, self.recurrence, self.down, self.output = (
            weights.linear(f"edge_{each}") for each in ("input", "recurrence", "down", "output")
        )
        self.products: list[Product] = [self.input, self.recurrence, self.down, self.output]

    def state(self, tokens: Tensor, slot: BlockSlot, parent: Tensor) -> Tensor:
        """See `Edges`."""
        sigmoid = self._ops.functions.sigmoid
        new_reset, new_update, new = self.input(F.embedding(tokens, self.embedding)).chunk(3, dim=-1)
        old_reset, old_update, old = self.recurrence(parent).chunk(3, dim=-1)
        update = sigmoid(new_update + old_update)
        return (1 - update) * torch.tanh(new + sigmoid(new_reset + old_reset) * old) + update * parent

    def propose(
        self, slot: BlockSlot, state: Tensor, k: int, offset: Tensor, inv_temp: InverseTemperature | None
    ) -> Proposal:
        """See `Edges`."""
        logits = slot.logits[:, None].expand(-1, state.shape[1], -1)
        if slot.depth >= self.spec.plain:
            inner = self.down(torch.cat([slot.hidden[:, None].expand(*state.shape[:-1], -1), state], dim=-1))
            logits = logits + self.output(inner * self._ops.functions.sigmoid(inner))
        best, tokens = self._ops.top_logprobs(logits, k, offset, inv_temp)
        return Proposal(tokens, best)


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """DFlash 2's: the best `max_topk` of a slot's logits, scored anew by the node's own token."""

    rank: int
    max_topk: int
    hidden_size: int
    vocab_size: int
    prefix: str = ""

    @property
    def state_size(self) -> int:
        return self.rank

    def params(self) -> list[Param]:
        at, size = f"{self.prefix}candidate_selector", (self.vocab_size, self.rank)
        tables = {"edge_table": "predecessor_codebook", "edge_candidates": "successor_codebook"}
        return [
            *(
                Param(name, size, (CheckpointTensor(f"{at}.{stored}", size),), "table")
                for name, stored in tables.items()
            ),
            matrix("edge_hidden", CheckpointTensor(f"{at}.hidden_projection.weight", (self.rank, self.hidden_size))),
        ]

    def build(self, weights: Weights, embedding: Tensor, ops: Ops) -> "Selector":
        return Selector(self, weights)


class Selector:
    """`Edges`. A candidate b after a scores U(b) + sum_r A[a]_r (P h)_r B[b]_r; a node's state is A[a] * P h.

    Scores are no log-probabilities: their softmax counts as much as the candidates' share of the logits' own.
    """

    def __init__(self, spec: SelectorSpec, weights: Weights) -> None:
        self.spec = spec
        self.table, self.candidates = weights["edge_table"], weights["edge_candidates"]
        self.hidden = weights.linear("edge_hidden")
        self.products: list[Product] = [self.hidden]

    def state(self, tokens: Tensor, slot: BlockSlot, parent: Tensor) -> Tensor:
        """See `Edges`."""
        return F.embedding(tokens, self.table) * self.hidden(slot.hidden)[:, None]

    def propose(
        self, slot: BlockSlot, state: Tensor, k: int, offset: Tensor, inv_temp: InverseTemperature | None
    ) -> Proposal:
        """See `Edges`."""
        logits = slot.logits.to(torch.float32)
        unary, ids = stable_topk(logits, self.spec.max_topk)  # [rows, K]
        mass = unary.logsumexp(dim=-1) - logits.logsumexp(dim=-1)
        codes = F.embedding(ids, self.candidates)  # [rows, K, rank]
        scores = unary[:, None] + (state @ codes.transpose(1, 2)).to(torch.float32)
        if inv_temp is not None:
            scores = scores * inv_temp.of_lines(scores.shape[0] * scores.shape[1]).view(*scores.shape[:2], 1)
        logprob = torch.log_softmax(scores, dim=-1) + mass[:, None, None]
        best, index = stable_topk(logprob.clamp(max=0), k)
        tokens = ids[:, None].expand(-1, scores.shape[1], -1).gather(2, index)
        return Proposal(tokens + offset[tokens], best)
