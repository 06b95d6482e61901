"""Weights of a GGUF file in 4 bits that keep their codes: Q4_0 and Q4_1, in groups of 32 along a row.

A block is a scale in float16, in Q4_1 a minimum too, then 16 bytes: code j in the lower half of byte j, code j + 16 in
the upper. A weight is code * scale + minimum, which in Q4_0 is -8 * scale, in float32: the bits of the library `gguf`.
Source: llama.cpp's `ggml-common.h` and `gguf-py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from treetop.kernels.gemm.quantized_weight import MIDDLE, QuantizedWeight, QuantScheme
from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.quantized import Quantized
from treetop.weights.rules import Named, Rule, name_list

GROUP = 32
Kind = Literal["Q4_0", "Q4_1"]
KINDS: tuple[Kind, ...] = ("Q4_0", "Q4_1")


@dataclass(frozen=True, slots=True)
class Ggml:
    """A tensor of a GGUF file, read as blocks [n, k / 32, bytes] uint8."""

    kind: Kind

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        if len(source.shape) != 2 or source.shape[1] % GROUP:
            raise CheckpointError(f"tensor {source.name}: {source.shape} cannot be in {self.kind}")
        return {source.name: TensorSpec(source.shape, (self.kind,))}

    def unit(self, axis: int) -> int:
        return GROUP if axis == 1 else 1

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("int4", GROUP, minimums=True)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        blocks = fetch(source.name, span)
        head = 4 if self.kind == "Q4_1" else 2
        numbers = blocks[..., :head].contiguous().view(torch.float16).to(torch.float32)
        scale = numbers[..., 0]
        minimum = numbers[..., 1] if self.kind == "Q4_1" else -MIDDLE * scale
        return QuantizedWeight(self.scheme, GROUP * blocks.shape[1], _codes(blocks[..., head:]), scale, minimum=minimum)


def _codes(stored: Tensor) -> Tensor:
    """Of [n, groups, 16] uint8, rows of bytes that hold two codes each, the first in the lower half."""
    codes = torch.cat([stored & 0xF, stored >> 4], -1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1)


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """`quant_method` gguf: the modules in each type, by name, as `checkpoints.gguf` lists them."""
    return tuple(
        Named(frozenset(names), Quantized(kind, Ggml(kind)))
        for kind in KINDS
        if (names := name_list(config, kind, where))
    )
