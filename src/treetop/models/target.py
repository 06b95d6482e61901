"""What the engine asks of a target model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treetop.attention.layer import Attend
from treetop.kernels.table import Ops
from treetop.models.config import ModelConfig
from treetop.weights.format import Linear, Product

LAST_HIDDEN = -1
"""The feature that is the last hidden state after the final norm: what logits are made of."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """hidden: [rows, n, hidden], after the final norm; [lines, 1, hidden] where the last tokens alone were asked for.
    aux_hidden: [rows, n, hidden] of each state asked for.
    experts: [rows, n, layers with experts * top_k] int16, what their routers have chosen, if that is asked.
    """

    hidden: Tensor
    aux_hidden: tuple[Tensor, ...]
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Of the first lines of a batch the token whose state is wanted; of the others none is. Once all K/V are written a
    forward's last layer goes on with these alone.

    columns: [lines] int64.
    """

    columns: Tensor
    ops: Ops

    def of(self, x: Tensor) -> Tensor:
        """x: [rows, n, width]. Returns [lines, 1, width]."""
        return self.ops.pick(x[: len(self.columns)], self.columns)[:, None]

    def of_parts(self, parts: Tensor) -> Tensor:
        """Of the parts of a sum. parts: [parts, rows, n, width]. Returns [parts, lines, 1, width]."""
        count, lines = len(parts), len(self.columns)
        return self.ops.pick(parts[:, :lines].flatten(0, 1), self.columns.repeat(count)).view(count, lines, 1, -1)

    def of_mask(self, live: Tensor | None, n: int) -> Tensor | None:
        """Which lines have a token that is no padding, [lines] bool, or None. live: [rows * n] bool of all, or None."""
        return None if live is None else live.view(-1, n)[: len(self.columns)].any(dim=1)


class Target(Protocol):
    """Tokens in, hidden states and what a drafter reads out.

    embedding: [vocab, hidden], which a drafter may share.
    lm_head: hidden -> logits. With several ranks both hold this rank's part of the vocabulary.
    products: all that a forward and its logits take with weights.

    Its features are residual streams, chosen at construction: index i is the one that enters layer i, the number of
    layers what the last one leaves, before the final norm; `LAST_HIDDEN` is that after the norm.
    """

    config: ModelConfig
    embedding: Tensor
    lm_head: Linear

    @property
    def products(self) -> Sequence[Product]: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        tells_experts: bool = False,
        last: LastTokens | None = None,
    ) -> TargetOutput:
        """tokens, positions: [rows, n] int64. The layers' K/V go where `attend` puts them. last: whose last hidden
        states are read, if not all; not with `tells_experts`.
        """

    def piece(self, hidden: Tensor) -> Tensor:
        """As `logits`, of this rank's part of the vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden], after the final norm. Returns [..., vocab]."""
