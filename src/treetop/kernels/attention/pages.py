"""A batch's page table for libraries that want it as [rows, columns]: gathered by the row list, in one launch."""

import torch
from torch import Tensor

from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl


def gather_table_reference(
    table: Tensor, rows: Tensor, kv_len: Tensor, columns: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """The first `columns` columns of each row's table, with the null page where the row has no keys, and its length.

    table: [num_rows, >= columns] int32. rows, kv_len: [rows] int64. Returns [rows, columns] int32, contiguous, and
    [rows] int32.
    """
    first = torch.arange(columns, device=table.device) * page_size
    pages = table[rows, :columns]
    return torch.where(first < kv_len[:, None], pages, 0).contiguous(), kv_len.to(torch.int32)


@jit
def _gather_kernel(
    out: Arg, lengths: Arg, table: Arg, rows: Arg, kv_len: Arg, columns: Arg, table_row: Arg,
    page_size: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """One block of columns of one row. Grid (blocks, rows)."""
    index = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * block + tl.arange(0, block)
    length = tl.load(kv_len + index).to(tl.int32)
    row = tl.load(rows + index)
    used = (column < columns) & (column * page_size < length)
    page = tl.load(table + row * table_row + column, mask=used, other=0)
    tl.store(out + index * columns + column, page, mask=column < columns)
    tl.store(lengths + index, length, mask=tl.program_id(0) == 0)


def gather_table(
    table: Tensor, rows: Tensor, kv_len: Tensor, columns: int, page_size: int, gpu: GpuTraits
) -> tuple[Tensor, Tensor]:
    """`gather_table_reference`; columns past the extent are not read, so nothing in them can reach a library."""
    count, block = rows.shape[0], 256
    out = torch.empty((count, columns), dtype=torch.int32, device=table.device)
    lengths = torch.empty((count,), dtype=torch.int32, device=table.device)
    assert (table.stride(1), rows.stride(0), kv_len.stride(0)) == (1, 1, 1)
    _gather_kernel[(-(-columns // block), count)](
        out, lengths, table, rows, kv_len, columns, table.stride(0), page_size=page_size, block=block
    )
    return out, lengths
