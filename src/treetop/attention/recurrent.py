"""How the recurrent layers of one phase go on from their rows' states; what `Attend.convolve` and `recur` are made of.

    VERIFY   nodes, each from the row's state along its own path: nothing of the row changes but for what is folded
    PREFILL  a chunk: the row's state and convolution become those after it
    dense    one sequence from nothing, token by token: what everything else must agree with

State with pending updates covers exactly the row's committed tokens when a phase begins and when it ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from treetop.kernels.recurrent.states import LinearStates, StateInputs, StateTails, StateUpdates
from treetop.kernels.recurrent.step import DeltaNet, steps_whole
from treetop.kernels.table import Ops
from treetop.types.ids import GroupName


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Where one layer's states live: its group, its index in the group, and the group's states."""

    group: GroupName
    index: int
    states: LinearStates


class Recurrence(Protocol):
    """See `Attend`."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def recur(self, layer: int, inputs: StateInputs) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NodeRecurrence:
    """A verification. The row's pending updates are folded into its state; what nodes would add goes to the tails.

    layers: of the forward's recurrent layers, by index.
    tails: group -> its tails, of which a batch uses the first rows.
    windows: group -> [rows, T, taps - 1], which inputs stand before a node's own; see `tree_windows`.
    parents: [rows, T] int64, of nodes.
    rows: [rows] int64, of the batch.
    """

    ops: Ops
    layers: Mapping[int, RecurrentLayer]
    tails: Mapping[GroupName, StateTails]
    windows: Mapping[GroupName, Tensor]
    parents: Tensor
    rows: Tensor
    dummy_row: int

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        place = self.layers[layer]
        kept = self.tails[place.group].mixed[place.index, : x.shape[0], : x.shape[1]]
        conv = place.states.conv[place.index]
        return self.ops.path_conv(conv, self.rows, x, self.windows[place.group], weight, bias, kept)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        place, (rows, nodes) = self.layers[layer], inputs.v.shape[:2]
        kept = self.tails[place.group].updates.layer(place.index)
        stash = StateUpdates(kept.k[:rows, :nodes], kept.d[:rows, :nodes], kept.g[:rows, :nodes])
        states = place.states.layer(place.index)
        return self.ops.verify_states(states, self.rows, inputs, self.parents, stash, dummy_row=self.dummy_row)

    def step(self, layer: int, mixed: Tensor, z: Tensor, gates: Tensor, net: DeltaNet) -> Tensor | None:
        """A gated delta net's node of each row in one launch; None where it takes several. See `Ops.step_delta`."""
        ops, nodes = self.ops, mixed.shape[1]
        serves = nodes == 1 and ops.gpu_for(Ops.step_delta) is not None and not ops.profile.batch_invariant
        if not (serves and steps_whole(net.value_dim)):
            return None
        place, rows = self.layers[layer], len(mixed)
        tails = self.tails[place.group]
        updates = tails.updates.layer(place.index)
        stash = StateUpdates(updates.k[:rows, :1], updates.d[:rows, :1], updates.g[:rows, :1])
        kept, states = tails.mixed[place.index, :rows, :1], place.states.layer(place.index)
        return ops.step_delta(states, self.rows, mixed, z, gates, net, kept, stash, dummy_row=self.dummy_row)


@dataclass(frozen=True, slots=True)
class ChunkRecurrence:
    """A prefill, of rows whose pending updates have been folded. Padding changes nothing.

    valid: [rows, n] bool, what is not padding.
    """

    ops: Ops
    layers: Mapping[int, RecurrentLayer]
    rows: Tensor
    valid: Tensor

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        place = self.layers[layer]
        conv = place.states.conv[place.index]
        return self.ops.prefill_conv(conv, self.rows, x, self.valid, weight, bias)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        place = self.layers[layer]
        return self.ops.prefill_states(place.states.layer(place.index), self.rows, inputs, self.valid)


@dataclass(frozen=True, slots=True)
class DenseRecurrence:
    """One sequence from nothing, a token at a time, by the definition.

    conv: layer -> [channels, taps - 1], the last inputs, zeros before the first.
    state: layer -> [heads, key_dim, value_dim], after the last token.
    updates: layer -> what each token has added, [n, ...].
    """

    conv: dict[int, Tensor] = field(default_factory=dict)
    state: dict[int, Tensor] = field(default_factory=dict)
    updates: dict[int, StateUpdates] = field(default_factory=dict)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        taps = weight.shape[1]
        padded = torch.cat([x.new_zeros(x.shape[2], taps - 1), x[0].T], dim=1)
        self.conv[layer] = padded[:, padded.shape[1] - (taps - 1) :].clone()
        out = torch.stack([(padded[:, t : t + taps] * weight).sum(1) for t in range(x.shape[1])])
        return (out if bias is None else out + bias)[None]

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        shared = inputs.v.shape[2] // inputs.k.shape[2]
        q, k = (each[0].repeat_interleave(shared, dim=1) for each in (inputs.q, inputs.k))
        v, decay = inputs.v[0], inputs.g[0].exp()
        state, out, added = v.new_zeros((*k.shape[1:], v.shape[2])), [], []
        for t in range(len(v)):
            state = state * (decay[t] if decay.dim() == 3 else decay[t, :, None])[..., None]
            d = v[t]
            if inputs.beta is not None:
                d = inputs.beta[0, t, :, None] * (d - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * d[:, None, :]
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
            added.append(d)
        self.state[layer] = state
        self.updates[layer] = StateUpdates(inputs.k[0], torch.stack(added), inputs.g[0])
        return torch.stack(out)[None]
