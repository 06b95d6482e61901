"""What a row's states are after acceptance, before they are read by others, and where a row moves in."""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.head import fold_updates, values_of
from treetop.kernels.recurrent.states import LinearStates, StateTails, StateUpdates
from treetop.kernels.recurrent.verify import folded
from treetop.kernels.tree.commit import Paths
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, power_of_two, tl


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
    pending = StateUpdates(*(each[:, rows].flatten(0, 1) for each, _ in _pairs(states.pending, states.pending)))
    states.state[:, rows] = folded(states.state[:, rows].flatten(0, 1), pending, count).unflatten(0, (layers, -1))
    states.count.index_fill_(0, rows, 0)


def copy_states(states: LinearStates, rows: Tensor, source: LinearStates, of: Tensor) -> None:
    """Write the whole state and convolution of some rows as others have them; nothing is pending.

    All layers of a group. rows, of: [rows] int64; what `of` names in source has nothing pending. A row of zeros, which
    the dummy's is for ever, is a request's beginning.
    """
    states.conv[:, rows] = source.conv[:, of]
    states.state[:, rows] = source.state[:, of]
    states.count.index_fill_(0, rows, 0)


def _pairs(one: StateUpdates, other: StateUpdates) -> list[tuple[Tensor, Tensor]]:
    return [(one.k, other.k), (one.d, other.d), (one.g, other.g)]


def keep_states(states: LinearStates, tails: StateTails, paths: Paths, windows: Tensor, gpu: GpuTraits) -> None:
    """`keep_states_reference`: a launch for each kind of what updates are made of, one for convolutions."""
    layers, batch = states.state.shape[0], len(paths.rows)
    node = paths.rows if paths.node is None else paths.node
    assert paths.rows.stride(0) == paths.accept_len.stride(0) == states.count.stride(0) == 1
    pairs = _pairs(states.pending, tails.updates)
    if not states.state.shape[2]:  # a convolution alone
        live, counts = paths.rows != paths.dummy_row, states.count[paths.rows]
        states.count[paths.rows] = torch.where(live, paths.accept_len + 1, counts)
        pairs = []
    for kept, new in pairs:
        size = kept[0, 0, 0].numel()
        assert kept.stride(2) == new.stride(2) == size
        block = min(1024, lanes(size))
        _keep_kernel[(batch * paths.width, layers, -(-size // block))](
            kept, new, states.count, paths.rows, paths.accept_len, node, paths.dummy_row, paths.width,
            kept.stride(0), kept.stride(1), new.stride(0), new.stride(1), node.stride(0),
            size=size, block=block, has_nodes=paths.node is not None, counts=kept is states.pending.k,
            overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
        )  # fmt: skip
    channels, before = states.conv.shape[2:]
    if before:
        assert states.conv[0, 0].is_contiguous()
        assert tails.mixed.stride(3) == 1
        assert windows.is_contiguous()
        block = min(512, lanes(channels))
        _keep_window_kernel[(batch, layers, -(-channels // block))](
            states.conv, tails.mixed, windows, paths.rows, paths.accept_len, node, paths.dummy_row,
            windows.shape[1], channels, states.conv.stride(0), states.conv.stride(1), *tails.mixed.stride()[:3],
            node.stride(0), before=before, block=block, has_nodes=paths.node is not None,
            overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
        )  # fmt: skip


@jit
def _keep_kernel(
    kept: Arg, new: Arg, count: Arg, rows: Arg, accept_len: Arg, node: Arg, dummy_row: Arg, width: Arg,
    kept_layer: Arg, kept_row: Arg, new_layer: Arg, new_row: Arg, node_row: Arg,
    size: constexpr, block: constexpr, has_nodes: constexpr, counts: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of one column in one layer. Grid (rows * width, layers, blocks). counts: it counts them."""
    pdl_wait(overlap, early=True)
    item = (tl.program_id(0) // width).to(tl.int64)
    column = (tl.program_id(0) % width).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + item)
    accepted = tl.load(accept_len + item)
    if (column <= accepted) & (row != dummy_row):
        entry = column
        if has_nodes:
            entry = tl.load(node + item * node_row + column)
        lane = tl.program_id(2) * block + tl.arange(0, block)
        there = lane < size
        numbers = tl.load(new + layer * new_layer + item * new_row + entry * size + lane, mask=there, other=0.0)
        tl.store(kept + layer * kept_layer + row * kept_row + column * size + lane, numbers, mask=there)
        if counts:
            tl.store(count + row, accepted + 1)


@jit
def _keep_window_kernel(
    conv: Arg, mixed: Arg, windows: Arg, rows: Arg, accept_len: Arg, node: Arg, dummy_row: Arg, nodes: Arg,
    channels: Arg, conv_layer: Arg, conv_row: Arg, mixed_layer: Arg, mixed_row: Arg, mixed_node: Arg, node_row: Arg,
    before: constexpr, block: constexpr, has_nodes: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some channels of one row and layer. Grid (rows, layers, blocks). No source lies before the column it goes to."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * block + tl.arange(0, block)
    there = channel < channels
    row = tl.load(rows + item)
    last = tl.load(accept_len + item)
    if has_nodes:
        last = tl.load(node + item * node_row + last)
    if row != dummy_row:
        state = conv + layer * conv_layer + row * conv_row + channel * before
        own = mixed + layer * mixed_layer + item * mixed_row + channel
        for column in tl.static_range(before):
            index = last + before
            if column < before - 1:
                index = tl.load(windows + (item * nodes + last) * before + column + 1)
            if index < before:
                kept = tl.load(state + index, mask=there, other=0.0)
            else:
                kept = tl.load(own + (index - before) * mixed_node, mask=there, other=0.0)
            tl.store(state + column, kept, mask=there)


def fold_states(states: LinearStates, rows: Tensor, gpu: GpuTraits) -> None:
    """`fold_states_reference`: a launch for all layers, and one for the counts."""
    pending = states.pending
    layers, _, heads, key_dim, value_dim = states.state.shape
    if not heads:  # a convolution alone
        states.count.index_fill_(0, rows, 0)
        return
    assert rows.stride(0) == states.count.stride(0) == 1
    assert pending.g[0, 0, 0].is_contiguous()
    assert states.state[0, 0].is_contiguous()
    assert pending.k[0, 0, 0].is_contiguous()
    assert pending.d[0, 0, 0].is_contiguous()
    block_v = values_of(value_dim)
    _fold_kernel[(-(-value_dim // block_v), heads, layers * len(rows))](
        states.state, pending.k, pending.d, pending.g, states.count, rows, len(rows), states.state.stride(0),
        states.state.stride(1), *pending.k.stride()[:3], *pending.d.stride()[:3], *pending.g.stride()[:3],
        heads=heads, key_heads=pending.k.shape[3], key_dim=key_dim, value_dim=value_dim,
        per_channel=pending.g.dim() == pending.d.dim(), block_k=max(16, power_of_two(key_dim)), block_v=block_v,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    states.count.index_fill_(0, rows, 0)


@jit
def _fold_kernel(
    state: Arg, pending_k: Arg, pending_d: Arg, pending_g: Arg, count: Arg, rows: Arg, num_rows: Arg,
    state_layer: Arg, state_row: Arg, k_layer: Arg, k_row: Arg, k_token: Arg, d_layer: Arg, d_row: Arg, d_token: Arg,
    g_layer: Arg, g_row: Arg, g_token: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, per_channel: constexpr,
    block_k: constexpr, block_v: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state. Grid (blocks of values, heads, layers * rows)."""
    pdl_wait(overlap, early=True)
    head = tl.program_id(1)
    key_head = head // (heads // key_heads)
    layer = (tl.program_id(2) // num_rows).to(tl.int64)
    row = tl.load(rows + tl.program_id(2) % num_rows)
    pending = tl.load(count + row)
    keys = tl.arange(0, block_k)
    values = tl.program_id(0) * block_v + tl.arange(0, block_v)
    if pending > 0:
        at = state + layer * state_layer + row * state_row + head * key_dim * value_dim
        at = at + keys[:, None] * value_dim + values[None, :]
        inside = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
        m = fold_updates(
            tl.load(at, mask=inside, other=0.0), pending_k + layer * k_layer + row * k_row + key_head * key_dim,
            pending_d + layer * d_layer + row * d_row + head * value_dim,
            pending_g + layer * g_layer + row * g_row + (head * key_dim if per_channel else head), pending,
            k_token, d_token, g_token, keys, values, key_dim, value_dim, per_channel,
        )  # fmt: skip
        tl.store(at, m, mask=inside)
