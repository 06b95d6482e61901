"""States of recurrent layers by row: what moving in, folding and the prefix cache do to them.

    moving in    the whole state becomes zeros, or a checkpoint's, and nothing is pending
    PREFILL      pending updates are folded, then the chunk goes on from the state
    VERIFY       each layer folds what is pending as it loads the state; nodes leave their updates in the tails;
                 once a path is accepted its updates are what is pending (`engine.recurrence`)

So a rejected node never was in a state, and state with pending covers exactly the tokens whose K/V the pages hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.engine.features.feature import RowFeature
from treetop.kernels.recurrent.keep import copy_states
from treetop.kernels.recurrent.states import LinearStates, StateTails, StateUpdates
from treetop.kernels.table import Ops
from treetop.types.ids import GroupName
from treetop.types.layout import Layout
from treetop.types.messages import Chunk, RowSetup
from treetop.types.phase import Phase
from treetop.types.state import StateGroup


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states and updates in an engine of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def make_updates(group: StateGroup, leading: tuple[int, int], dtype: torch.dtype, zeros: Zeros) -> StateUpdates:
    """Zeroed updates [layers, *leading, ...] of a group. dtype: the engine's."""
    shapes = (group.key_heads, group.key_dim), (group.heads, group.value_dim), group.decay_shape
    k, d, g = (zeros((group.num_layers, *leading, *shape), state_dtype(dtype)) for shape in shapes)
    return StateUpdates(k, d, g)


@dataclass(frozen=True, slots=True)
class RowStates(RowFeature):
    """In the list where a model has recurrent layers.

    groups: by group.
    checkpoints: what is kept of them for other requests: a row is a slot, and nothing is pending.
    tails: what VERIFY keeps of its nodes; its scratch.
    conv_parts: channels of each convolution's parts, of which ranks have shares.
    """

    groups: Mapping[GroupName, LinearStates]
    checkpoints: Mapping[GroupName, LinearStates]
    tails: Mapping[GroupName, StateTails]
    conv_parts: Mapping[GroupName, tuple[int, ...]]

    @classmethod
    def make(cls, layout: Layout, dtype: torch.dtype, zeros: Zeros) -> "RowStates":
        """dtype: the engine's."""

        def of(n: int, width: int) -> dict[GroupName, LinearStates]:
            """Of `n` rows, of which `width` updates may be pending."""
            return {
                group.name: LinearStates(
                    conv=zeros((group.num_layers, n, *group.conv_shape), dtype),
                    state=zeros((group.num_layers, n, *group.state_shape), state_dtype(dtype)),
                    pending=make_updates(group, (n, width), dtype, zeros),
                    count=zeros((n,), torch.int64),
                )
                for group in layout.state_groups
            }

        tails, (b, t) = {}, (layout.max_requests, layout.verify_tail)
        for group in layout.state_groups:
            mixed = zeros((group.num_layers, b, t, group.channels), dtype)
            tails[group.name] = StateTails(mixed, make_updates(group, (b, t), dtype, zeros))
        parts = {group.name: group.conv_parts for group in layout.state_groups}
        return cls(of(layout.num_rows, layout.commit_width), of(layout.checkpoints, 0), tails, parts)

    @property
    def tables(self) -> Sequence[Tensor]:
        found = list[Tensor]()
        for states in self.groups.values():
            found += [states.count, *(table.movedim(1, 0) for table in _by_layer(states))]
        return found

    def scratch(self, phase: Phase) -> Sequence[Tensor]:
        each = self.tails.values()
        return [table for one in each for table in (one.mixed, one.updates.k, one.updates.d, one.updates.g)]

    @property
    def record(self) -> dict[str, Tensor]:
        """The convolution and the state, of which nothing may be pending."""
        found = dict[str, Tensor]()
        for name, states in self.groups.items():
            found |= {f"conv.{name}": states.conv.movedim(1, 0), f"state.{name}": states.state.movedim(1, 0)}
        return {name: table for name, table in found.items() if table.numel()}

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Heads; and of convolutions the channels of each part."""
        found = dict[str, tuple[int, ...]]()
        for name, states in self.groups.items():
            found |= {f"conv.{name}": self.conv_parts[name], f"state.{name}": (states.state.shape[2],)}
        return {name: widths for name, widths in found.items() if name in self.record}

    def forget(self, rows: Tensor) -> None:
        for states in self.groups.values():
            for table in (states.pending.k, states.pending.d, states.pending.g):
                table.index_fill_(1, rows, float("nan"))

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        """Their states are a checkpoint's, or the dummy row's, which are those of nothing."""
        for name, states in self.groups.items():
            copy_states(states, rows, states, torch.full_like(rows, len(states.count) - 1))
            for setup in setups:
                if setup.checkpoint is not None:
                    _copy_row(states, setup.row, self.checkpoints[name], setup.checkpoint)

    def fold(self, ops: Ops, rows: Tensor) -> None:
        """States as they are without anything pending. rows: [rows] int64."""
        for states in self.groups.values():
            ops.fold_states(states, rows)

    def keep(self, chunks: Sequence[Chunk]) -> None:
        """Rows' states after a prefill, of which nothing is pending, go to the slots that chunks name."""
        for chunk in chunks:
            if chunk.keep is not None:
                for name, states in self.groups.items():
                    _copy_row(self.checkpoints[name], chunk.keep, states, chunk.row)


def _by_layer(states: LinearStates) -> tuple[Tensor, ...]:
    """All that rows keep, [layers, num_rows, ...] each, but for how many updates are pending."""
    pending = states.pending
    return states.conv, states.state, pending.k, pending.d, pending.g


def _copy_row(to: LinearStates, row: int, source: LinearStates, of: int) -> None:
    to.conv[:, row].copy_(source.conv[:, of])
    to.state[:, row].copy_(source.state[:, of])
