"""Recurrent layers in a step: what verification and prefill are given of `RowStates`, and what a round leaves there."""

from torch import Tensor

from treetop.attention.recurrent import ChunkRecurrence, NodeRecurrence
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.tree.commit import Paths
from treetop.types.phase import Phase


def node_recurrence(runner: ModelRunner, rows: Tensor, parents: Tensor) -> NodeRecurrence | None:
    """Of a verification; None for a model without recurrent layers. rows: [rows] int64. parents: [rows, T] int64."""
    groups, states = runner.layout.state_groups, runner.state.states.groups
    if not groups:
        return None
    for group in groups:
        width, count = runner.layout.commit_width, states[group.name].count
        runner.probes.index(count[rows], 0, width + 1, "pending_updates", Phase.VERIFY, rows)
    by_taps = {taps: tree_windows(parents, taps) for taps in {group.taps for group in groups}}
    windows = {group.name: by_taps[group.taps] for group in groups}
    layers, tails = runner.recurrent_layers, runner.state.states.tails
    return NodeRecurrence(runner.ops, layers, tails, windows, parents, rows, runner.layout.dummy_row)


def keep_states(runner: ModelRunner, of: NodeRecurrence | None, paths: Paths) -> None:
    """What the paths' nodes have added is pending in their rows, and their convolutions end with their last nodes."""
    if of is not None:
        for name, states in runner.state.states.groups.items():
            runner.ops.keep_states(states, of.tails[name], paths, of.windows[name])


def chunk_recurrence(runner: ModelRunner, rows: Tensor, valid: Tensor) -> ChunkRecurrence | None:
    """Of a prefill, whose rows' pending updates are folded; None for a model without recurrent layers.

    rows: [rows] int64. valid: [rows, n] bool.
    """
    if not runner.layout.state_groups:
        return None
    runner.state.states.fold(runner.ops, rows)
    return ChunkRecurrence(runner.ops, runner.recurrent_layers, rows, valid)
