"""Products with a matrix of each head's own, of any number of rows, in one launch: what absorbs a compressed key.

A program takes a block of rows and of outputs of one head, and k is never cut, so a row has the same bits among any
others (as in `skinny_gemm`).
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit_for_any, power_of_two, tl

_ROWS, _OUTPUTS, _K = 64, 64, 64
"""Of a program's block, and of a step of its sum, at most."""


def heads_rows_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, heads, in] times weight [heads, in, out], head by head. Returns [rows, heads, out]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def heads_rows(x: Tensor, weight: Tensor, gpu: GpuTraits) -> Tensor:
    """`heads_rows_reference`, summed in float32 and rounded once. Returns it contiguous; x and weight may be views."""
    rows, heads, k = x.shape
    n = weight.shape[2]
    out = torch.empty((rows, heads, n), dtype=x.dtype, device=x.device)
    block_m = min(max(16, power_of_two(rows)), _ROWS)
    _heads_rows_kernel[(-(-n // _OUTPUTS), -(-rows // block_m), heads)](
        out, x, weight, rows, n, k, heads, *x.stride(), *weight.stride(),
        block_m=block_m, block_n=_OUTPUTS, block_k=_K, overlap=gpu.can_overlap, num_warps=4, num_stages=3,
        **launch_options(gpu),
    )  # fmt: skip
    return out


@jit_for_any("rows", "heads")
def _heads_rows_kernel(
    out: Arg, x: Arg, weight: Arg, rows: Arg, n: Arg, k: Arg, heads: Arg, x_row: Arg, x_head: Arg, x_column: Arg,
    weight_head: Arg, weight_k: Arg, weight_n: Arg, block_m: constexpr, block_n: constexpr, block_k: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """One block of rows and outputs of one head. Strides are in elements. Grid (n / block_n, rows / block_m, heads)."""
    pdl_wait(overlap, early=True)
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    lane = tl.arange(0, block_k)
    x_at = x + row.to(tl.int64)[:, None] * x_row + head * x_head + lane[None, :] * x_column
    weight_at = weight + head * weight_head + lane[:, None] * weight_k + column[None, :] * weight_n
    total = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, k, block_k):
        inside = lane + start < k
        own = tl.load(x_at + start * x_column, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        line = tl.load(weight_at + start * weight_k, mask=inside[:, None] & (column < n)[None, :], other=0.0)
        total = tl.dot(own, line, total, input_precision="ieee")
    at = out + (row.to(tl.int64)[:, None] * heads + head) * n + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None, :])
