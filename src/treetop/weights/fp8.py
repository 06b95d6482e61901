"""FP8 (e4m3): a scale for a whole weight, for each of its rows, or for each block of numbers.

Sources: `compressed-tensors` 0.20 (`float-quantized`, `naive-quantized`), `transformers` 5 `finegrained_fp8` (DeepSeek,
Qwen3, MiniMax), vllm `quantization/fp8.py` and `quantization/modelopt.py`. What a checkpoint says of activations counts
where `--quantize-activations` is given (`weights.w8a8`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.gemm.fp8_rows import GROUPS, Activations
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.plain import FLOATS
from treetop.weights.quantized import SCALES, WIDE, Grid, Quantized, relative_error
from treetop.weights.rules import Named, Rule, kept_plain

CODES = ("F8_E4M3",)
WHOLE, BY_ROW = Grid(0, 0), Grid(1, 0)


@dataclass(frozen=True, slots=True)
class Fp8:
    """A tensor NAME of e4m3, and its scales NAME_scale, or what `end` says.

    kinds: of scales.
    apart: ModelOpt's scales of blocks have axes [rows, 1, columns, 1].
    """

    grid: Grid
    end: str = "_scale"
    kinds: tuple[str, ...] = SCALES
    apart: bool = False

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        scales = self.grid.stored(_parts(source), self.kinds)
        if source.parts > 1:
            scales = TensorSpec((prod(scales.shape[:-1]), scales.shape[-1]), self.kinds)
        if self.apart:
            *experts, rows, columns = scales.shape
            scales = TensorSpec((*experts, rows, 1, columns, 1), self.kinds)
        return {source.name: TensorSpec(source.shape, CODES), f"{source.name}{self.end}": scales}

    def unit(self, axis: int) -> int:
        return self.grid.columns or 1 if axis == 1 else 1

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("e4m3", self.grid.columns)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        assert span is None or source.parts == 1
        scale = self.grid.by_row(f"{source.name}{self.end}", _parts(source), span, fetch)
        scale = scale if source.parts == 1 else scale.flatten(0, 1)
        codes = fetch(source.name, span).view(torch.uint8)
        return QuantizedWeight(self.scheme, codes.shape[-1], codes, scale)


def _parts(source: CheckpointTensor) -> tuple[int, ...]:
    """The shape of what is stored, its parts along an axis of their own if there are several."""
    if source.parts == 1:
        return source.shape
    return (source.parts, source.shape[0] // source.parts, *source.shape[1:])


def fp8(
    grid: Grid,
    end: str = "_scale",
    kinds: tuple[str, ...] = SCALES,
    apart: bool = False,
    activations: Activations | str = WIDE,
) -> Quantized:
    """The format. activations: of `Quantized`; other arguments are those of `Fp8`."""
    if isinstance(activations, Activations) and grid.columns != activations.group:
        activations = f"has scales of {grid.columns} columns of weights, and activations {activations}"
    elif isinstance(activations, Activations) and grid.columns and grid.columns not in GROUPS:
        activations = f"has activations {activations}, where {', '.join(map(str, GROUPS))} are built"
    return Quantized("FP8", Fp8(grid, end, kinds, apart), activations)


BLOCK_KINDS = (*SCALES, "F8_E8M0")
"""Of scales of blocks: of whole powers of two some are stored as such (`scale_fmt` ue8m0)."""


def blocks_of(given: object, key: str, where: Path) -> Grid:
    """Blocks [rows, columns] that a configuration names."""
    sizes = given if isinstance(given, list) and len(given) == 2 else [0]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 < each <= _MAX_BLOCK for each in sizes):
        raise CheckpointError(
            f"{where}: quantization_config: {key} must be two sizes of 1 to {_MAX_BLOCK}, got {shown(given)}"
        )
    return Grid(sizes[0], sizes[1])


_MAX_BLOCK = 2**20


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """`quant_method` fp8: blocks with `weight_block_size`, else one scale a weight.

    The output matrix is plain, and so is what joins states and embeddings in an MTP layer.

    Scales of blocks are called `weight_scale_inv`, though weights are multiplied by them too.
    """
    if (kind := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{where}: quantization_config: fmt {shown(kind)} is not supported, only 'e4m3'")
    blocks = config.get("weight_block_size")
    if blocks is None:
        format_ = fp8(WHOLE, activations=_activations(config, 0))
    else:
        grid = blocks_of(blocks, "weight_block_size", where)
        format_ = fp8(grid, "_scale_inv", BLOCK_KINDS, activations=_activations(config, grid.columns))
    plain = [
        rule
        for key in ("modules_to_not_convert", "ignored_layers")
        for rule in kept_plain(config, key, where, ends=True)
    ]
    return (*plain, *(Rule(each, FLOATS) for each in ("*lm_head", "*.eh_proj")), Rule("*", format_))


def _activations(config: Mapping[str, Any], group: int) -> Activations | str:
    """Dynamic ones of a whole weight have a scale a token, as vllm and `transformers` compute them."""
    scheme, scales = config.get("activation_scheme", "dynamic"), config.get("scale_fmt")
    if scales not in (None, "ue8m0", "float"):
        return f"has scale_fmt {shown(scales)}"
    if scheme == "dynamic":
        return Activations(group, powers=scales == "ue8m0")
    if scheme == "static" and group == 0:
        return Activations(fixed=True)
    return f"has activation_scheme {shown(scheme)}"


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """A weight [n, k] in e4m3 with a scale a row, by what follows its module's name, and the `error` of rounding.

    Scales have the weight's dtype. The error is the share of its norm that changes.
    """
    wide, largest = weight.to(torch.float32), torch.finfo(torch.float8_e4m3fn).max
    scales = (wide.abs().amax(1, keepdim=True) / largest).to(weight.dtype)
    step = scales.to(torch.float32)
    codes = (wide / torch.where(step == 0, 1, step)).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales, "error": relative_error(codes.to(torch.float32) * step, wide)}
