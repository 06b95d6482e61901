"""Products of e4m3 inputs with e4m3 weights by PyTorch's `scaled_mm`, which is cuBLASLt's, for many rows.

The operands are those of `kernels.gemm.fp8_rows` as they lie: codes by rows; with one scale of a row [rows, 1] and of a
line [1, lines] (RowWise); with scales of 128 columns by groups, of inputs and of lines alike (BlockWise1x128), so a
weight needs no second copy of scales by blocks of 128 lines.

What cuBLASLt asks for: lines and k in sixteens, by groups k in whole groups and rows in fours, for a group's scales
begin at multiples of 16 bytes. Its sums are float32 (no fast accumulation) and rounded once, but their order is its
own, so a row's bits may depend on how many there are: not for `--exactness bits`.
Sources: pytorch/pytorch pull 166752 and `aten/src/ATen/native/cuda/ScaledBlas.cpp`, torch 2.11 and 2.13; cuBLAS 13
documentation, "1D and 2D Block Scaling for FP8 Data Types".
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.gemm.fp8_rows import QuantizedRows
from treetop.kernels.gemm.quantized_weight import QuantizedWeight
from treetop.kernels.kv import FP8
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable, read_table

GROUP = 128
"""Columns of a group that the library knows, beside whole rows."""
ROWS_OF_GROUPS = 4
"""Rows of inputs by groups come in multiples of this."""
CUDA_OF_GROUPS = (12, 9)
"""Whose cuBLASLt knows scales of groups; PyTorch raises with an earlier one."""
TABLE = Path(__file__).with_name("scaled_mm.json")
_FROM = 1024
"""Rows from which the library multiplies with weights that were not measured. Source: vllm-project/vllm pull 49932,
which finds it as fast as any from there on."""


def cuda_version() -> tuple[int, ...]:
    """Of PyTorch's build; (0,) of one without."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def why_not(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, gpu: GpuTraits) -> str | None:
    """Why the library does not multiply rows of `dtype` with a weight; None if it does."""
    (lines, k), group = weight.shape, weight.scheme.group
    if not gpu.can_overlap or not gpu.by_warp_groups or gpu.has_tensor_memory:
        return "it was tried on compute capability 9.0 alone"
    if dtype != torch.bfloat16:
        return f"results in {dtype}"
    if lines % 16 or k % 16:
        return f"{lines} lines of {k} numbers are not in sixteens"
    if group and cuda_version() < CUDA_OF_GROUPS:
        return "scales of groups need cuBLASLt of CUDA 12.9"
    if group not in (0, GROUP) or (group and k % GROUP):
        return f"groups of {group} in rows of {k}"
    return "a bias beside scales of groups" if group and bias is not None else None


def scaled_rows(x: QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`fp8_rows_reference` of a weight that `why_not` has nothing against, in bfloat16 [rows, lines].

    x: with groups in multiples of `ROWS_OF_GROUPS` rows. The scales of both lie as kernels read them, those of a group
    side by side. bias: bfloat16.
    """
    kinds = torch.nn.functional.ScalingType
    grouped = weight.scheme.group > 0
    assert not grouped or len(x.codes) % ROWS_OF_GROUPS == 0
    return torch.nn.functional.scaled_mm(
        x.codes.view(FP8),
        weight.codes.view(FP8).T,
        x.scale if grouped else x.scale.flatten().view(-1, 1),  # a stride of 1, though there is one column
        kinds.BlockWise1x128 if grouped else kinds.RowWise,
        weight.scale if grouped else weight.scale.view(1, -1),
        kinds.BlockWise1x128 if grouped else kinds.RowWise,
        bias=bias,
        output_dtype=torch.bfloat16,
    )


@cache
def library_from(shape: tuple[int, int], group: int, gated: bool, gpu: GpuTraits) -> int | None:
    """Rows from which the library is the faster one for a weight [lines, k]; None if at no number that was measured.

    `scaled_mm.json` has what was measured (`benchmarks/scaled_mm.py --write-table` measures again).
    """
    entry = load_table().find((*shape, group, gated), gpu)
    return _FROM if entry is None else entry[0]


@cache
def load_table() -> TunedTable[tuple[int | None]]:
    """The committed table, by lines, k, group and whether gated."""
    return read_table(TABLE, lambda entry: (entry["from_rows"],), ("lines", "k", "group", "gated"))
