"""Edges of a block head: what the token before it changes of a slot's logits. DSpark's Markov head, in its three forms.

A block gives each depth its logits, which know nothing of the token that a path chose before. A Markov head adds a bias
of that token; along a path of a tree it is the node's own parent that counts, not the likeliest one.
Source: DSpark, in DeepSpec and `speculators` 0.9.0.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.table import Ops
from treetop.weights.format import Linear, Product, Source
from treetop.weights.held import Weights

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


class Edges(Protocol):
    """products: what `bias` takes with weights. state_size: numbers of a node's state."""

    @property
    def products(self) -> list[Product]: ...

    def begin(self, rows: int, like: Tensor) -> Tensor:
        """What stands for the state of a root's parent, [rows, state_size], where and of what dtype `like` is."""

    def state(self, tokens: Tensor, hidden: Tensor, parent: Tensor) -> Tensor:
        """Of nodes. tokens: [rows, n] int64. hidden: [rows, 1, hidden], the slot's that proposes after them.

        parent: [rows, n, state_size]. Returns [rows, n, state_size].
        """

    def bias(self, state: Tensor) -> Tensor:
        """What a state adds to its slot's logits. state: [..., state_size]. Returns [..., draft vocab]."""


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """vocab_size: of the target, whose tokens nodes are. draft_vocab: that of the logits."""

    kind: MarkovKind
    rank: int
    hidden_size: int
    vocab_size: int
    draft_vocab: int
    prefix: str = "markov_head"

    @property
    def state_size(self) -> int:
        """What the logits need of a node; an rnn also what it hands on."""
        return 2 * self.rank if self.kind == "rnn" else self.rank

    def params(self) -> list[Param]:
        table = Source(f"{self.prefix}.markov_w1.weight", (self.vocab_size, self.rank))
        params = [
            Param("markov_table", table.shape, (table,), "table"),
            matrix("markov_output", Source(f"{self.prefix}.markov_w2.weight", (self.draft_vocab, self.rank))),
        ]
        if self.kind != "vanilla":
            name = "gate_proj" if self.kind == "gated" else "joint_proj"
            out, width = self._gate_shape
            params.append(matrix("markov_gate", Source(f"{self.prefix}.{name}.weight", (out, width))))
            params.append(vector("markov_gate_bias", Source(f"{self.prefix}.{name}.bias", (out,))))
        return params

    @property
    def _gate_shape(self) -> tuple[int, int]:
        if self.kind == "gated":
            return self.rank, self.hidden_size + self.rank
        return 3 * self.rank, 2 * self.rank + self.hidden_size

    def build(self, weights: Weights, ops: Ops) -> "Markov":
        return Markov(self, weights, ops)


class Markov:
    """`Edges`. The state of a node is the vector m whose product with the output matrix is its bias; of an rnn before
    it what the path hands on."""

    def __init__(self, spec: MarkovSpec, weights: Weights, ops: Ops) -> None:
        self.spec, self.table = spec, weights["markov_table"]
        self.output = weights.linear("markov_output")
        self.gate: Linear | None = None if spec.kind == "vanilla" else weights.linear("markov_gate")
        self.products: list[Product] = [self.output, *([] if self.gate is None else [self.gate])]
        self._functions = ops.functions

    def begin(self, rows: int, like: Tensor) -> Tensor:
        """See `Edges`."""
        return like.new_zeros((rows, self.spec.state_size))

    def state(self, tokens: Tensor, hidden: Tensor, parent: Tensor) -> Tensor:
        """See `Edges`."""
        own = F.embedding(tokens, self.table)
        if self.gate is None:
            return own
        hidden = hidden.expand(*own.shape[:-1], -1)
        sigmoid = self._functions.sigmoid
        if self.spec.kind == "gated":
            return own * sigmoid(self.gate(torch.cat([hidden, own], dim=-1)))
        before = parent[..., : self.spec.rank]
        gate, new, out = self.gate(torch.cat([before, own, hidden], dim=-1)).chunk(3, dim=-1)
        kept = sigmoid(gate)
        return torch.cat([kept * before + (1 - kept) * torch.tanh(new), torch.tanh(out)], dim=-1)

    def bias(self, state: Tensor) -> Tensor:
        """See `Edges`."""
        return self.output(state[..., -self.spec.rank :])
