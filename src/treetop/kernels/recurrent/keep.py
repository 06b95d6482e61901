"""What a row's states are after acceptance, before they are read by others, and where a row moves in."""

import torch
from torch import Tensor

from treetop.kernels.recurrent.states import LinearStates, StateTails, Updates
from treetop.kernels.recurrent.verify import folded
from treetop.kernels.tree.commit import Paths


def keep_states_reference(states: LinearStates, tails: StateTails, paths: Paths, windows: Tensor) -> None:
    """What was verified of a path becomes pending, and the convolution stands behind the path's last node.

    All layers of a group. windows: [rows, T, taps - 1], of the nodes (`tree_windows`). The dummy row keeps nothing.
    """
    live = paths.rows != paths.dummy_row
    item = torch.arange(len(paths.rows), device=paths.rows.device)
    for kept, new in _pairs(states.pending, tails.updates):
        old = kept[:, paths.rows, : paths.width]
        on_path = paths.kept.view(1, *paths.kept.shape, *[1] * (new.dim() - 3))
        kept[:, paths.rows, : paths.width] = torch.where(on_path, new[:, item[:, None], paths.source], old)
    states.count[paths.rows] = torch.where(live, paths.accept_len + 1, states.count[paths.rows])
    before = states.conv.shape[3]
    if before:
        last = paths.source.gather(1, paths.accept_len[:, None])
        window = windows[item, last[:, 0]]
        column = torch.cat([window[:, 1:], last + before], dim=1)  # [rows, taps - 1], indices of the row's inputs
        old = states.conv[:, paths.rows]
        inputs = torch.cat([old, tails.mixed[:, : len(item), : windows.shape[1]].transpose(2, 3)], dim=3)
        new = inputs.gather(3, column[None, :, None].expand(*old.shape))
        states.conv[:, paths.rows] = torch.where(live[None, :, None, None], new, old)


def fold_states_reference(states: LinearStates, rows: Tensor) -> None:
    """Fold what is pending into the states of some rows, all layers of a group, so that none is.

    rows: [rows] int64. Before a state is read by others: a checkpoint, a hand-over, a prefill.
    """
    layers, count = states.state.shape[0], states.count[rows].repeat(states.state.shape[0])
    pending = Updates(*(each[:, rows].flatten(0, 1) for each, _ in _pairs(states.pending, states.pending)))
    states.state[:, rows] = folded(states.state[:, rows].flatten(0, 1), pending, count).unflatten(0, (layers, -1))
    states.count[rows] = 0


def copy_states_reference(states: LinearStates, rows: Tensor, source: LinearStates, of: Tensor) -> None:
    """Write the whole state and convolution of some rows as others have them; nothing is pending.

    All layers of a group. rows, of: [rows] int64; what `of` names in source has nothing pending. A row of zeros, which
    the dummy's is for ever, is a request's beginning.
    """
    states.conv[:, rows] = source.conv[:, of]
    states.state[:, rows] = source.state[:, of]
    states.count[rows] = 0


def _pairs(one: Updates, other: Updates) -> list[tuple[Tensor, Tensor]]:
    return [(one.k, other.k), (one.d, other.d), (one.g, other.g)]
