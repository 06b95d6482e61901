"""What a round leaves behind: the path's K/V in the pages, and its features for the draft head.

On a GPU each is one launch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.kv import commit_tail, moved, slots_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import FlatNodes

_BLOCK = 1024
"""Elements of a feature that a program moves."""
_STREAMS = 3
"""Features that one launch gathers."""


@dataclass(frozen=True, slots=True)
class Paths:
    """What each row commits: its columns 0 .. accept_len, to the positions from `committed` on.

    rows, committed, accept_len: [rows] int64.
    width: columns a row, S + 1.
    node: [rows, width] int64, the tail entry of each column, counted from its row's first; None where column j is entry
        j.
    dummy_row: commits nothing.
    """

    rows: Tensor
    committed: Tensor
    accept_len: Tensor
    width: int
    node: Tensor | None
    dummy_row: int

    def of_flat(self, flat: FlatNodes, capacity: int) -> "Paths":
        """The same of a tail whose entries stand as `flat` says, in the memory of `capacity` entries a row."""
        assert self.node is not None
        return replace(self, node=flat_entries(flat, self.node, capacity))

    @property
    def source(self) -> Tensor:
        """The tail entry of each column, [rows, width] int64."""
        if self.node is not None:
            return self.node
        return self._columns.expand(len(self.rows), -1)

    @property
    def positions(self) -> Tensor:
        """Where each column goes, [rows, width] int64."""
        return self.committed[:, None] + self._columns

    @property
    def kept(self) -> Tensor:
        """Columns that are on a live row's path, [rows, width] bool."""
        return (self._columns <= self.accept_len[:, None]) & (self.rows != self.dummy_row)[:, None]

    @property
    def _columns(self) -> Tensor:
        return torch.arange(self.width, device=self.rows.device)


def flat_entries(flat: FlatNodes, path: Tensor, capacity: int) -> Tensor:
    """Where the nodes of paths stand, counted from where their rows would begin with `capacity` entries each.

    path: [rows, width] int64, nodes of each row's tree. Returns [rows, width] int64, below 0 for most.
    """
    row = torch.arange(path.shape[0], device=path.device)
    return path + (flat.row_start - row * capacity)[:, None]


def commit_reference(pool: Tensor, tail: Tensor, page_table: Tensor, page_size: int, paths: Paths) -> None:
    """Copy the K/V of each path from the tail to the pages, all layers of a group.

    pool: [layers, slots, planes, kv_heads, head_dim]. tail: [layers, max rows, t, planes, kv_heads, head_dim].
    page_table: [num_rows, columns] int32.
    """
    commit_tail(pool, tail, paths.source, slots_of(page_table, paths.rows, paths.positions, paths.kept, page_size))


def commit(pool: Tensor, tail: Tensor, page_table: Tensor, page_size: int, paths: Paths, gpu: GpuTraits) -> None:
    """`commit_reference`, all layers in one launch; the null page is not touched."""
    pool, tail, size = moved(pool), moved(tail), pool[0, 0].numel()
    assert pool.stride()[1:] == tail.stride()[2:] == (size, size // pool.shape[2], pool.shape[4], 1)
    assert page_table.stride(1) == paths.accept_len.stride(0) == paths.rows.stride(0) == paths.committed.stride(0) == 1
    node = paths.rows if paths.node is None else paths.node
    block = min(4096, lanes(size))
    _commit_kernel[(len(paths.rows) * paths.width, pool.shape[0], -(-size // block))](
        pool, tail, page_table, paths.rows, paths.committed, paths.accept_len, node,
        paths.dummy_row, paths.width, pool.stride(0), tail.stride(0), tail.stride(1), page_table.stride(0),
        node.stride(0), page_size=page_size, size=size, block=block, has_nodes=paths.node is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip


@jit
def _commit_kernel(
    pool: Arg, tail: Arg, page_table: Arg, rows: Arg, committed: Arg, accept_len: Arg, node: Arg,
    dummy_row: Arg, width: Arg, pool_layer: Arg, tail_layer: Arg, tail_row: Arg, table_row: Arg, node_row: Arg,
    page_size: constexpr, size: constexpr, block: constexpr, has_nodes: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of the planes of one column in one layer a program. Grid (rows * width, layers, blocks).

    The page table is read only for columns that are committed: past them it may hold anything.
    """
    pdl_wait(overlap, early=True)
    item = (tl.program_id(0) // width).to(tl.int64)
    column = (tl.program_id(0) % width).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + item)
    if (column <= tl.load(accept_len + item)) & (row != dummy_row):
        position = tl.load(committed + item) + column
        page = tl.load(page_table + row * table_row + position // page_size).to(tl.int64)
        entry = column
        if has_nodes:
            entry = tl.load(node + item * node_row + column)
        if page > 0:
            lane = tl.program_id(2) * block + tl.arange(0, block)
            there = lane < size
            kv = tl.load(tail + layer * tail_layer + item * tail_row + entry * size + lane, mask=there, other=0.0)
            slot = page * page_size + position % page_size
            tl.store(pool + layer * pool_layer + slot * size + lane, kv, mask=there)


def feature_nodes(path: Tensor, num_nodes: int) -> Tensor:
    """Rows of the flattened [rows * T, hidden] features that a path's nodes have. The stride is T (sgl-27545).

    path: [rows, S + 1] int64. Returns [rows * (S + 1)] int64.
    """
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    return (row * num_nodes + path).reshape(-1)


def path_aux_hidden_reference(out: Tensor, streams: tuple[Tensor, ...], path: Tensor) -> None:
    """The features of each path's nodes, side by side.

    out: [rows, width, len(streams) * hidden]. streams: [rows, T, hidden] each. path: [rows, width] int64, nodes.
    """
    if path.shape[1] == 1 and path.shape == streams[0].shape[:2]:  # of a plain round: each path is its root
        out.copy_(torch.cat(streams, dim=2))
        return
    nodes = feature_nodes(path, streams[0].shape[1])
    chosen = [stream.reshape(-1, stream.shape[2]).index_select(0, nodes) for stream in streams]
    out.copy_(torch.cat(chosen, dim=1).view(out.shape))


def path_aux_hidden(out: Tensor, streams: tuple[Tensor, ...], path: Tensor, gpu: GpuTraits) -> None:
    """`path_aux_hidden_reference`, one launch for every three streams."""
    rows, width = path.shape
    hidden = streams[0].shape[2]
    assert out.stride(2) == path.stride(1) == 1
    block = min(_BLOCK, lanes(hidden))
    for first in range(0, len(streams), _STREAMS):
        some = streams[first : first + _STREAMS]
        assert all(stream.is_contiguous() and stream.shape == streams[0].shape for stream in some)
        pointers = (*some, *[some[0]] * (_STREAMS - len(some)))
        _path_features_kernel[(rows * width, -(-hidden // block))](
            out[:, :, first * hidden :], *pointers, path, width, streams[0].shape[1], hidden,
            out.stride(0), out.stride(1), path.stride(0),
            count=len(some), block=block, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
        )  # fmt: skip


@jit
def _path_features_kernel(
    out: Arg, first: Arg, second: Arg, third: Arg, path: Arg, width: Arg, num_nodes: Arg, hidden: Arg,
    out_row: Arg, out_column: Arg, path_row: Arg,
    count: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of one column, of every stream, a program. Grid (rows * width, blocks)."""
    pdl_wait(overlap, early=True)
    row = (tl.program_id(0) // width).to(tl.int64)
    column = (tl.program_id(0) % width).to(tl.int64)
    lane = tl.program_id(1) * block + tl.arange(0, block)
    there = lane < hidden
    source = (row * num_nodes + tl.load(path + row * path_row + column)) * hidden + lane
    target = out + row * out_row + column * out_column + lane
    tl.store(target, tl.load(first + source, mask=there, other=0.0), mask=there)
    if count > 1:
        tl.store(target + hidden, tl.load(second + source, mask=there, other=0.0), mask=there)
    if count > 2:
        tl.store(target + 2 * hidden, tl.load(third + source, mask=there, other=0.0), mask=there)
