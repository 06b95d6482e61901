"""What the engine asks of a drafter, before and after its weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.params import Param
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.row_text import PastTexts
from treetop.models.config import AttentionSpec
from treetop.models.target import LastTokens, Target
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
    output: where logits are made: in `propose`, or in `DraftBlock.open` by who makes all of them there.
    in_levels: `step` is a forward, after which `propose` makes logits.
    in_extend: `extend` is a forward, too.
    """

    layers: int
    fuse: int
    output: int
    in_levels: bool = True
    in_extend: bool = True


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
    alone: the first of them, which are read, if layers may leave the others out; else all are made.
    text: of all rows, [num_rows, width] int32, known up to the token of that column; None unless the spec reads it.
    past: texts that rows held before, of which a row sees those of its own owner; None where none are kept.
    owners: of all rows, [num_rows] int64, beside `past`.
    """

    rows: Tensor
    last: Tensor
    text: Tensor | None = None
    past: PastTexts | None = None
    owners: Tensor | None = None
    alone: LastTokens | None = None

    def states(self, ops: Ops, forward: Callable[[LastTokens | None], Tensor]) -> Tensor:
        """[lines, state_size]. forward: gives the states of all tokens [rows, n, ..], or [lines, 1, ..] of these."""
        return ops.pick(forward(None), self.last) if self.alone is None else forward(self.alone)[:, 0]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one depth, each with a state: of `Drafter.step` their parents', of `Drafter.propose` their own.

    tokens: [rows, ...] int64, target ids.
    state: [rows, ..., state_size].
    depth: 0 of roots.
    """

    tokens: Tensor
    state: Tensor
    depth: int


@dataclass(frozen=True, slots=True)
class Roots:
    """Where trees begin. tokens, positions: [rows] int64: the token after the committed ones, and their number.

    state: [rows, state_size], what `extend` made last.
    depths: levels that the trees will have.
    """

    tokens: Tensor
    positions: Tensor
    state: Tensor
    depths: int


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What a block's pass gives. state: [rows, state_size], of the roots. lines: what `step` and `propose` read."""

    state: Tensor
    lines: Any


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A pass that a drafter makes once a round, from the root, before its tree grows: one forward, whatever the depth.

    width: its queries, at positions from the root's on. Their K/V are not kept.
    max_steps: the deepest tree that it can propose.
    causal: of each layer, whether a query sees the block up to itself, or all of it.
    anchored: windows are counted from the root for all queries, not from each query's own position.
    max_topk: most proposals of a node; None for any.
    seen: the tree's nodes see all of its K/V, and stand behind it; otherwise these are seen by its own queries alone.
    """

    width: int
    max_steps: int
    causal: tuple[bool, ...]
    anchored: bool = False
    max_topk: int | None = None
    seen: bool = False


class DraftBlock(Protocol):
    """The pass of a `BlockSpec`."""

    def open(self, roots: Roots, attend: Attend) -> BlockOutput:
        """attend: of `width` queries a row."""


class Grower(Protocol):
    """What a tree grows by: see `Drafter`."""

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """nodes: [rows, n], with their parents' states. positions: [rows, n] int64. Returns their own states."""

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """What may follow each node. inv_temp: what the rows' logits, if there are any, are multiplied by; None is 1.

        Log-probabilities are float32 in every dtype: ties are the same everywhere.
        """


class Drafter(Grower, Protocol):
    """Proposes what follows each token of a row, from a state [state_size] that it makes of the tokens before.

    Slot i of its K/V, if it keeps any, holds the pair (target's states at token i, token i + 1) at position i, or what
    it makes of the tokens up to i alone, where the nodes of a tree see a block that begins with the root. `extend`
    fills slots from what the target computed; `step` runs nodes of a tree on the states of their parents.

    block: what it runs once a round; None where the proposals after a root follow from `extend`. With a block these are
    made in DRAFT, of the state that `open` gives.
    """

    vocab: DraftVocab
    products: DraftProducts

    @property
    def block(self) -> DraftBlock | None: ...

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """tokens, positions: [rows, n] int64, the pairs' second tokens and their slots. aux_hidden: [rows, n, width],
        the target's states of `aux_inputs` side by side. Returns the states of columns `at.last`, [rows, state_size],
        or of the first rows, those that `at.alone` has.
        """


class DrafterSpec(Protocol):
    """A drafter before its weights are read: what has to be known to size everything.

    folder: of its checkpoint, if it has one. Specs that differ in it alone are equal: one's weights may take the place
        of the other's.
    vocab_size: how many tokens it can propose.
    state_size: of a row's state.
    state_dtype: None is the engine's.
    block: of a drafter with one.
    aux_inputs: the states of the target that it reads, as `Target` numbers them.
    reads_text: it looks at the rows' text.
    makes_logits: its log-probabilities are a softmax, which a temperature can be learned for.
    attention: of each of its layers that keep K/V; () for none. Those alike in window and block share a group.
    reads_target: the target's layer whose K/V of committed tokens each of its layers reads, where these keep none.
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
    def block(self) -> BlockSpec | None: ...

    @property
    def aux_inputs(self) -> tuple[int, ...]: ...

    @property
    def attention(self) -> tuple[AttentionSpec, ...]: ...

    @property
    def reads_target(self) -> tuple[int, ...]: ...

    @property
    def params(self) -> Sequence[Param]: ...

    @property
    def derived(self) -> int: ...

    @property
    def streamed(self) -> Streamed: ...

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> Drafter: ...

    def load(self, target: Target, place: LoadContext) -> Drafter: ...

    def check(self) -> int:
        """Names and shapes of its tensors, without reading them; how many there are. Raises CheckpointError."""
