"""What the engine asks of a drafter, before and after its weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import Placement
from treetop.checkpoints.params import Param
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import Heat
from treetop.models.config import AttentionSpec
from treetop.models.target import Target
from treetop.weights.format import Product
from treetop.weights.held import Weights


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The only crossing from draft to target tokens. offset: [draft vocab] int64, `target = draft + offset[draft]`."""

    offset: Tensor

    def to_target(self, draft: Tensor) -> Tensor:
        return draft + self.offset[draft]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The k best next tokens of each state, best first. tokens: [..., k] int64, target ids; logprob float32."""

    tokens: Tensor
    logprob: Tensor


@dataclass(frozen=True, slots=True)
class Streamed:
    """Numbers of weights that a drafter's products read.

    layers: in every forward.
    fuse: in `extend` besides.
    output: in `propose`.
    """

    layers: int
    fuse: int
    output: int


@dataclass(frozen=True, slots=True)
class DraftProducts:
    """The products that `Streamed` counts the weights of."""

    layers: Sequence[Product] = ()
    fuse: Sequence[Product] = ()
    output: Sequence[Product] = ()


@dataclass(frozen=True, slots=True)
class Extension:
    """Whose tokens `Drafter.extend` is given, and what of them is wanted.

    rows: [rows] int64, in the tables.
    last: [rows] int64, the column whose state is wanted.
    text: of all rows, [num_rows, width] int32, known up to the token of that column; None unless the spec reads it.
    """

    rows: Tensor
    last: Tensor
    text: Tensor | None = None


class Drafter(Protocol):
    """Proposes what follows each token of a row, from a state [state_size] that it makes of the tokens before.

    Slot i of its K/V, if it keeps any, holds the pair (target's states at token i, token i + 1) at position i. `extend`
    fills slots from what the target computed; `grow` runs nodes of a tree on the states of their parents.
    """

    vocab: DraftVocab
    products: DraftProducts

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """tokens, positions: [rows, n] int64, the pairs' second tokens and their slots. aux_hidden: [rows, n, width],
        the target's states of `aux_inputs` side by side. Returns the states of columns `at.last`, [rows, state_size].
        """

    def grow(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: [rows, n] int64; state: [rows, n, state_size], of each node's parent. Returns states."""

    def propose(self, state: Tensor, k: int, heat: Heat | None = None) -> Proposal:
        """state: [rows, ..., state_size]. heat: what the rows' logits, if there are any, are multiplied by; None is 1.

        Log-probabilities are float32 in every dtype: ties are the same everywhere.
        """


class DrafterSpec(Protocol):
    """A drafter before its weights are read: what has to be known to size everything.

    folder: of its checkpoint, if it has one.
    vocab_size: how many tokens it can propose.
    state_size: of a row's state.
    state_dtype: None is the engine's.
    aux_inputs: the states of the target that it reads, as `Target` numbers them.
    reads_text: it looks at the rows' text.
    makes_logits: its log-probabilities are a softmax, which a temperature can be learned for.
    attention: of each of its layers that keep K/V, all in one group; () for none.
    params: its parameters.
    derived: numbers that it makes of them and keeps.
    """

    @property
    def folder(self) -> Path | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def state_size(self) -> int: ...

    @property
    def state_dtype(self) -> torch.dtype | None: ...

    @property
    def reads_text(self) -> bool: ...

    @property
    def makes_logits(self) -> bool: ...

    @property
    def aux_inputs(self) -> tuple[int, ...]: ...

    @property
    def attention(self) -> tuple[AttentionSpec, ...]: ...

    @property
    def params(self) -> Sequence[Param]: ...

    @property
    def derived(self) -> int: ...

    @property
    def streamed(self) -> Streamed: ...

    def build(self, weights: Weights, target: Target, place: Placement, ops: Ops) -> Drafter: ...

    def load(self, target: Target, place: Placement) -> Drafter: ...

    def check(self) -> int:
        """Names and shapes of its tensors, without reading them; how many there are. Raises CheckpointError."""
