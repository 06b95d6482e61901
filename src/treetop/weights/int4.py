"""W4A16: integers of 4 bits with a scale, perhaps a zero, for each group of a row's numbers.

Three layouts of the same: `compressed-tensors` 0.20 (`pack-quantized`), GPTQ (gptqmodel's, formats "gptq" and
"gptq_v2"), AWQ (AutoAWQ's "gemm"). Groups of 0 numbers are whole rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.gemm.quantized_weight import MIDDLE, QuantizedWeight, QuantScheme
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.plain import FLOATS
from treetop.weights.quantized import SCALES, Grid, Quantized, own_groups, relative_error, unpacked
from treetop.weights.rules import Named, Rule, kept_plain, patterns

_WORDS = ("I32",)
_IN_WORD = 8


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """`compressed-tensors`: words along rows, zeros in words along columns. zeros: there are any."""

    group: int
    zeros: bool

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        n, k = matrix_shape(source, self.group)
        module, groups = source.module, Grid(1, self.group).shape((n, k))[1]
        tensors = {
            f"{module}.weight_packed": TensorSpec((n, -(-k // _IN_WORD)), _WORDS),
            f"{module}.weight_scale": TensorSpec((n, groups), SCALES),
            f"{module}.weight_shape": TensorSpec((2,), ("I64", "I32")),
        }
        if self.zeros:
            tensors[f"{module}.weight_zero_point"] = TensorSpec((-(-n // _IN_WORD), groups), _WORDS)
        return tensors

    def unit(self, axis: int) -> int:
        return lcm(_IN_WORD, self.group or 1) if axis == 1 else _IN_WORD if self.zeros else 1

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("int4", self.group, zeros=self.zeros)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        module, grid = source.module, Grid(1, self.group)
        said = fetch(f"{module}.weight_shape", None).tolist()
        if said != [*source.shape]:
            raise CheckpointError(f"tensor {module}.weight_shape says {said}, expected {[*source.shape]}")
        rows, columns = ranges(source, span)
        k = columns.stop - columns.start
        codes = fetch(f"{module}.weight_packed", in_words(span, 1)).contiguous().view(torch.uint8)
        zero = None
        if self.zeros:
            first = Span(0, rows.start // _IN_WORD, -(-rows.stop // _IN_WORD))
            packed, own = fetch(f"{module}.weight_zero_point", first), own_groups(columns, self.group)
            whole = unpacked(packed.T).T[rows.start - first.start * _IN_WORD :][: rows.stop - rows.start]
            zero = whole[:, own.start : own.stop].to(torch.uint8)
        scale = grid.by_row(f"{module}.weight_scale", source.shape, span, fetch)
        return QuantizedWeight(self.scheme, k, codes[:, : self.scheme.bytes_of(k)], scale, zero=zero)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Words along a weight's rows, which are stored as columns; zeros in words along them.

    g_idx says the group of each of a row's numbers.

    added: to stored zeros, 1 in format "gptq" and 0 in "gptq_v2".
    ordered: groups may be out of order (`desc_act`).
    """

    group: int
    added: int
    ordered: bool = False

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        n, k = matrix_shape(source, self.group)
        module, groups = source.module, k // (self.group or k)
        _whole_words(source, n, k)
        return {
            f"{module}.qweight": TensorSpec((k // _IN_WORD, n), _WORDS),
            f"{module}.qzeros": TensorSpec((groups, n // _IN_WORD), _WORDS),
            f"{module}.scales": TensorSpec((groups, n), SCALES),
            f"{module}.g_idx": TensorSpec((k,), _WORDS),
        }

    def unit(self, axis: int) -> int:
        return _IN_WORD

    @property
    def scheme(self) -> QuantScheme | None:
        return None if self.ordered else QuantScheme("int4", self.group, zeros=True)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        module, (rows, columns) = source.module, ranges(source, span)
        turned = None if span is None else Span(1 - span.axis, span.start, span.stop)
        words = fetch(f"{module}.qweight", in_words(turned, 0)).T.clone(memory_format=torch.contiguous_format)
        codes = words.view(torch.uint8)
        scales, zeros = scales_and_zeros(module, rows, fetch)
        zero = (unpacked(zeros) + self.added).to(torch.uint8)
        order = fetch(f"{module}.g_idx", Span(0, columns.start, columns.stop)).long()
        if bool(((order < 0) | (order >= len(scales))).any()):
            raise CheckpointError(f"tensor {module}.g_idx names a group outside [0, {len(scales)})")
        k, own = len(order), own_groups(columns, self.group)
        scheme = QuantScheme("int4", self.group, zeros=True)
        follows = torch.arange(columns.start, columns.stop, device=order.device) // (self.group or source.shape[1])
        if torch.equal(order, follows) and (not self.group or columns.start % self.group == 0):
            scales, zero = scales[own.start : own.stop], zero[own.start : own.stop]
            return QuantizedWeight(scheme, k, codes, scales.T, zero=zero.T)
        return QuantizedWeight(scheme, k, codes, scales.T, zero=zero.T, order=order)


_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word of AWQ has each of its 8 columns."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Words along a weight's columns, its rows as columns, eight of them in an order of their own."""

    group: int

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        n, k = matrix_shape(source, self.group)
        module, groups = source.module, k // (self.group or k)
        _whole_words(source, n, n)
        return {
            f"{module}.qweight": TensorSpec((k, n // _IN_WORD), _WORDS),
            f"{module}.qzeros": TensorSpec((groups, n // _IN_WORD), _WORDS),
            f"{module}.scales": TensorSpec((groups, n), SCALES),
        }

    def unit(self, axis: int) -> int:
        return self.group or 1 if axis == 1 else _IN_WORD

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("int4", self.group, zeros=True)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        module, (rows, columns) = source.module, ranges(source, span)
        turned = None if span is None else Span(1 - span.axis, span.start, span.stop)
        numbers = _in_order(fetch(f"{module}.qweight", in_words(turned, 1))).to(torch.uint8).T
        k, own = numbers.shape[1], own_groups(columns, self.group)
        even, odd = F.pad(numbers, (0, k % 2)).unflatten(1, (-1, 2)).unbind(2)
        scales, zeros = scales_and_zeros(module, rows, fetch)
        scale, zero = (each[own.start : own.stop].T for each in (scales, _in_order(zeros).to(torch.uint8)))
        return QuantizedWeight(self.scheme, k, even | (odd << 4), scale, zero=zero)


def matrix_shape(source: CheckpointTensor, group: int) -> tuple[int, int]:
    """Of a source that can be in groups. Raises CheckpointError for another."""
    if len(source.shape) != 2:
        raise CheckpointError(f"tensor {source.name}: experts in one tensor are not supported in groups of 4 bits")
    n, k = source.shape
    if group and k % group != 0:
        raise CheckpointError(f"tensor {source.name}: rows of {k} numbers are not whole groups of group_size {group}")
    return n, k


def _whole_words(source: CheckpointTensor, *sizes: int) -> None:
    if any(size % _IN_WORD for size in sizes):
        raise CheckpointError(f"tensor {source.name}: {source.shape} is not whole words of {_IN_WORD} numbers")


def ranges(source: CheckpointTensor, span: Span | None) -> tuple[Span, Span]:
    """Rows and columns of a matrix, or of a span of it."""
    rows, columns = (Span(axis, 0, size) for axis, size in enumerate(source.shape))
    if span is None:
        return rows, columns
    return (span, columns) if span.axis == 0 else (rows, span)


def in_words(span: Span | None, axis: int) -> Span | None:
    """A span of numbers as one of what is stored in words along an axis; a tail may be part of a word."""
    if span is None or span.axis != axis:
        return span
    return Span(axis, span.start // _IN_WORD, -(-span.stop // _IN_WORD))


def scales_and_zeros(module: str, rows: Span, fetch: Fetch) -> tuple[Tensor, Tensor]:
    """Of some rows of GPTQ's and AWQ's: [groups, rows] float32, [groups, rows / 8] int32."""
    scales = fetch(f"{module}.scales", Span(1, rows.start, rows.stop)).to(torch.float32)
    return scales, fetch(f"{module}.qzeros", Span(1, rows.start // _IN_WORD, -(-rows.stop // _IN_WORD)))


def _in_order(words: Tensor) -> Tensor:
    codes: Tensor = unpacked(words).unflatten(-1, (-1, _IN_WORD))[..., list(_ORDER)]
    return codes.flatten(-2)


def w4a16(layout: PackQuantized | Gptq | Awq) -> Quantized:
    return Quantized("W4A16", layout)


def read_gptq(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """`quant_method` gptq: all products of layers, but for what `dynamic` takes out.

    Source: gptqmodel 2 (`dynamic`: a regular expression after -: leaves modules as they are); vllm
    `quantization/gptq.py`.
    """
    _four_bits(config, "bits", where)
    stored = config.get("checkpoint_format") or config.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        raise _refused(where, "checkpoint_format", stored)
    if config.get("lm_head"):
        raise _refused(where, "lm_head", config["lm_head"])
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(each).startswith("-:") for each in dynamic):
        raise _refused(where, "dynamic", dynamic)
    left = patterns([f"re:{str(each)[2:]}" for each in dynamic], FLOATS, "dynamic", where)
    inside = config.get("modules_in_block_to_quantize")
    group, ordered = _group_size(config, "group_size", where), bool(config.get("desc_act"))
    layout = Gptq(group, 1 if stored == "gptq" else 0, ordered)
    if inside is None:
        return (*left, *_not_of_layers(config, where), Rule("*", w4a16(layout)))
    names = [name for each in inside for name in each] if _is_nested(inside) else None
    if names is None:
        raise _refused(where, "modules_in_block_to_quantize", inside)
    return (*left, *(Rule(f"*.layers.*.{name}", w4a16(layout)) for name in names))


def _is_nested(given: object) -> bool:
    return isinstance(given, list) and all(
        isinstance(each, list) and all(isinstance(name, str) for name in each) for each in given
    )


def read_awq(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """`quant_method` awq: all products of layers. Source: AutoAWQ 0.2 (`AwqConfig`), vllm `quantization/awq.py`."""
    bits = "bits" if "bits" in config else "w_bit"
    _four_bits(config, bits, where)
    if (version := str(config.get("version") or "gemm").lower()) != "gemm":
        raise _refused(where, "version", version)
    if config.get("zero_point", True) is not True:
        raise _refused(where, "zero_point", config["zero_point"])
    layout = Awq(_group_size(config, "group_size" if "group_size" in config else "q_group_size", where))
    return (*_not_of_layers(config, where), Rule("*", w4a16(layout)))


def _not_of_layers(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """What is listed, and the output matrix."""
    return (*kept_plain(config, "modules_to_not_convert", where, ends=True), Rule("*lm_head", FLOATS))


def _four_bits(config: Mapping[str, Any], key: str, where: Path) -> None:
    if config.get(key) != 4:
        raise CheckpointError(f"{where}: quantization_config: {key} {shown(config.get(key))} is not supported, only 4")


def _group_size(config: Mapping[str, Any], key: str, where: Path) -> int:
    """Numbers that share a scale; 0 for whole rows, which are said as -1."""
    group = config.get(key)
    if not isinstance(group, int) or isinstance(group, bool) or group < -1 or group == 0:
        raise _refused(where, key, group)
    return max(group, 0)


def _refused(where: Path, what: str, value: object) -> CheckpointError:
    return CheckpointError(f"{where}: quantization_config: {what} {shown(value)} is not supported")


def rounded(weight: Tensor, group: int) -> dict[str, Tensor]:
    """A weight [n, k] as `PackQuantized` without zeros has it, by what follows its module's name, and the `error`.

    Scales have the weight's dtype. group: k is a multiple of it; 0 for whole rows. The error is as in `fp8.rounded`.
    """
    n, k = weight.shape
    groups = weight.to(torch.float32).view(n, -1, group or k)
    scales = (groups.abs().amax(2) / 7.5).to(weight.dtype)
    step = scales.to(torch.float32)[..., None]
    codes = (groups / torch.where(step == 0, 1, step)).round_().clamp_(-MIDDLE, MIDDLE - 1)
    error = relative_error(codes * step, groups)
    nibbles = F.pad(codes.view(n, k).to(torch.int64) + MIDDLE, (0, -k % _IN_WORD)).view(n, -1, _IN_WORD)
    words = (nibbles << torch.arange(0, 32, 4, device=weight.device)).sum(2)
    packed = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([n, k]), "error": error}
