"""What recurrent layers keep: a state and a window of the convolution by row, pending updates, and a round's nodes.

A head's state M is [key_dim, value_dim]. A token scales it by e^g, takes from its value what M says of its key (the
delta rule) and adds k^T d:  M <- e^g M;  d = beta (v - k M), or v;  M <- M + k^T d;  o = q M.

    committed tokens of a row    | ........ state ........ | pending: (k, d, g) of the last round's |
    nodes of a round             |  tails: (k, d, g) and the convolution's input of each node       |

d of a node depends on its ancestors alone: acceptance copies the path's (k, d, g) to `pending`, and the next round
folds them into M as it loads it. State with pending covers exactly the row's committed tokens, at every phase's edge.
"""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateInputs:
    """What the recurrence reads of a batch, in float32, in float64 where the engine computes in it.

    q, k: [rows, n, key_heads, key_dim]; value head i reads key head i // (heads / key_heads).
    v: [rows, n, heads, value_dim].
    g: log of the decay, at most 0: [rows, n, heads], or [rows, n, heads, key_dim] for one a channel of the key.
    beta: [rows, n, heads]; None without the delta rule.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def with_beta(self, factor: float) -> "StateInputs":
        """The same, whose beta is multiplied by it."""
        return self if self.beta is None else replace(self, beta=self.beta * factor)


@dataclass(frozen=True, slots=True)
class StateUpdates:
    """What tokens add to a state. Leading dimensions are said where it is used.

    k: [..., key_heads, key_dim]. d: [..., heads, value_dim]. g: as in `StateInputs`.
    """

    k: Tensor
    d: Tensor
    g: Tensor

    def layer(self, index: int) -> "StateUpdates":
        """Of one layer, where layers come first."""
        return StateUpdates(self.k[index], self.d[index], self.g[index])


@dataclass(frozen=True, slots=True)
class LayerStates:
    """`LinearStates` of one layer: views of it."""

    conv: Tensor
    state: Tensor
    pending: StateUpdates
    count: Tensor


@dataclass(frozen=True, slots=True)
class LinearStates:
    """Of the layers of a group, written in place and never bound anew. The last row is the dummy's: zero for ever.

    conv: [layers, num_rows, channels, taps - 1], the newest input last, in the engine's dtype.
    state: [layers, num_rows, heads, key_dim, value_dim] float32 (float64).
    pending: [layers, num_rows, commit_width, ...] in the state's dtype, oldest first.
    count: [num_rows] int64, pending updates of each row.
    """

    conv: Tensor
    state: Tensor
    pending: StateUpdates
    count: Tensor

    def layer(self, index: int) -> LayerStates:
        return LayerStates(self.conv[index], self.state[index], self.pending.layer(index), self.count)


@dataclass(frozen=True, slots=True)
class StateTails:
    """What a verification keeps of its nodes, until one path of them is accepted.

    mixed: inputs of the convolution, [layers, max rows, verify_tail, channels], in the engine's dtype.
    updates: [layers, max rows, verify_tail, ...] in the state's dtype.
    """

    mixed: Tensor
    updates: StateUpdates
