"""The values that pass between growing, verifying and committing. The tensors' shapes are written here only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A batch of verify trees in breadth-first order; node 0 is the root, siblings stand in rank order.

    tokens: [rows, T] int64, target ids.
    parent: [rows, T] int64, smaller than the node's own index; the root's is 0.
    depth: [rows, T] int64.
    mask: [rows, T, T] bool, `mask[b, i, j]` iff j is i or an ancestor of i.
    logprob: [rows, T] float32, the draft's log-probability of the path to the node; 0 at the root.
    """

    tokens: "Tensor"
    parent: "Tensor"
    depth: "Tensor"
    mask: "Tensor"
    logprob: "Tensor"

    @property
    def is_padding(self) -> "Tensor":
        """Nodes that a budget has cut, see `FlatNodes`: [rows, T] bool."""
        padding = self.depth == 0
        padding[:, 0] = False
        return padding


@dataclass(frozen=True, slots=True)
class FlatNodes:
    """Where the nodes of a batch of trees that a budget has cut stand one after the other, all of a row together.

    Of a tree so cut the first `count` nodes of a row hold; what follows is padding: token 0 at the root's depth, where
    no path comes but to the root, under it, seen by itself alone, with a log-probability of -inf.

    count: [rows] int64, at least 1; their sum is N.
    row_start: [rows] int64, the first of each row's: the sum of `count` of the rows before.
    at: [N] int64, `row * T + node` of each.
    spread: [rows, T] int64, `row_start + node`; of padding the row's root.
    """

    count: "Tensor"
    row_start: "Tensor"
    at: "Tensor"
    spread: "Tensor"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The path of each row's tree that equals the target's own tokens.

    path: [rows, S + 1] int64, node indices from the root; 0 past the path.
    accept_len: [rows] int64, the number a of accepted drafts.
    tokens: [rows, S + 1] int64, the a accepted tokens, then the bonus token; valid ids past it too.
    bonus: [rows] int64.
    finite: [rows] bool, the target's logits at every node of the path.
    choice: [rows, T] int64, the target's token after each node of the tree.
    """

    path: "Tensor"
    accept_len: "Tensor"
    tokens: "Tensor"
    bonus: "Tensor"
    finite: "Tensor"
    choice: "Tensor"


@dataclass(frozen=True, slots=True)
class PathPositions:
    """Where the rows of a round stand: found once, by its first phase, for all of them.

    committed: [rows] int64, the extent of every phase's prefix.
    nodes: [rows, T] int64, positions of the tree's nodes in the target, `committed + depth`.
    path: [rows, S + 1] int64, of a path's columns, `committed + column`.
    """

    committed: "Tensor"
    nodes: "Tensor"
    path: "Tensor"


@dataclass(frozen=True, slots=True)
class PathLogprobs:
    """Log-probabilities at a path's columns; those past the path say nothing.

    values: [rows, w, 2 + n] float32. Of the target's raw logits the chosen token's, of the sampling distribution the
        chosen token's (of a prompt's token, which nothing drew, the first again), and of the raw logits the n best.
    ids: [rows, w, n] int64.
    """

    values: "Tensor"
    ids: "Tensor"


def copy_into(target: DraftTree | Accepted | PathLogprobs, source: DraftTree | Accepted | PathLogprobs) -> None:
    """Write every tensor of a value into the buffers of another."""
    for name in source.__dataclass_fields__:
        getattr(target, name).copy_(getattr(source, name))
