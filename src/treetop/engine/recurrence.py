"""States of recurrent layers by row: made from the layout, and what steps do to them beside the layers' forwards.

    moving in    the whole state becomes zeros, or a checkpoint's, and nothing is pending
    PREFILL      pending updates are folded, then the chunk goes on from the state
    VERIFY       each layer folds what is pending as it loads the state; nodes leave their updates in the tails;
                 once a path is accepted its updates are what is pending

So a rejected node never was in a state, and state with pending covers exactly the tokens whose K/V the pages hold.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treetop.attention.recurrent import ChunkRecurrence, NodeRecurrence
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.recurrent.keep import copy_states
from treetop.kernels.recurrent.states import LinearStates
from treetop.kernels.tree.commit import Paths
from treetop.types.messages import Chunk, RowSetup
from treetop.types.phase import Phase


def node_recurrence(runner: ModelRunner, rows: Tensor, parents: Tensor) -> NodeRecurrence | None:
    """Of a verification; None for a model without recurrent layers. rows: [rows] int64. parents: [rows, T] int64."""
    groups, states = runner.layout.state_groups, runner.state.states
    if not groups:
        return None
    for group in groups:
        width, count = runner.layout.commit_width, states[group.name].count
        runner.probes.index(count[rows], 0, width + 1, "pending_updates", Phase.VERIFY, rows)
    by_taps = {taps: tree_windows(parents, taps) for taps in {group.taps for group in groups}}
    windows = {group.name: by_taps[group.taps] for group in groups}
    layers, tails = runner.recurrent_layers, runner.buffers.state_tails
    return NodeRecurrence(runner.ops, layers, tails, windows, parents, rows, runner.layout.dummy_row)


def keep_states(runner: ModelRunner, of: NodeRecurrence | None, paths: Paths) -> None:
    """What the paths' nodes have added is pending in their rows, and their convolutions end with their last nodes."""
    if of is not None:
        for name, states in runner.state.states.items():
            runner.ops.keep_states(states, of.tails[name], paths, of.windows[name])


def chunk_recurrence(runner: ModelRunner, rows: Tensor, valid: Tensor) -> ChunkRecurrence | None:
    """Of a prefill, whose rows' pending updates are folded; None for a model without recurrent layers.

    rows: [rows] int64. valid: [rows, n] bool.
    """
    if not runner.layout.state_groups:
        return None
    fold_states(runner, rows)
    return ChunkRecurrence(runner.ops, runner.recurrent_layers, rows, valid)


def fold_states(runner: ModelRunner, rows: Tensor) -> None:
    """States as they are without anything pending. rows: [rows] int64."""
    for states in runner.state.states.values():
        runner.ops.fold_states(states, rows)


def keep_checkpoints(runner: ModelRunner, chunks: Sequence[Chunk]) -> None:
    """Rows' states after a prefill, of which nothing is pending, go to the slots that chunks name."""
    for chunk in chunks:
        if chunk.keep is not None:
            for name, states in runner.state.states.items():
                _copy_row(runner.state.checkpoints[name], chunk.keep, states, chunk.row)


def _copy_row(to: LinearStates, row: int, source: LinearStates, of: int) -> None:
    to.conv[:, row].copy_(source.conv[:, of])
    to.state[:, row].copy_(source.state[:, of])


def begin_states(runner: ModelRunner, rows: Tensor, setups: Sequence[RowSetup]) -> None:
    """Requests move in: their states are a checkpoint's, or the dummy row's, which are those of nothing.

    rows: [rows] int64, of the setups.
    """
    for states in runner.state.states.values():
        copy_states(states, rows, states, torch.full_like(rows, runner.layout.dummy_row))
        if runner.check_level >= 3:
            for table in (states.pending.k, states.pending.d, states.pending.g):
                table.index_fill_(1, rows, float("nan"))
    for setup in setups:
        if setup.checkpoint is not None:
            for name, states in runner.state.states.items():
                _copy_row(states, setup.row, runner.state.checkpoints[name], setup.checkpoint)
