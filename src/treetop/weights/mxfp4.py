"""`quant_method` mxfp4: GPT-OSS's experts, all of a layer's in one tensor of blocks and one of scales.

Sources: `transformers` 5 `quantizers/quantizer_mxfp4.py`; OCP Microscaling Formats (MX) Specification 1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.fp4 import MXFP4_GROUP
from treetop.weights.quantized import Quantized, own_groups
from treetop.weights.rules import Named, Rule, kept_plain


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A tensor NAME of rows [..., k] is NAME_blocks [..., k / 32, 16] and NAME_scales [..., k / 32], both uint8.

    Two codes are a byte, the first in the lower half.
    """

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        *rows, k = source.shape
        if k % MXFP4_GROUP != 0:
            raise CheckpointError(
                f"tensor {source.name}: rows of {k} numbers cannot be in MXFP4: hidden_size and intermediate_size must"
                f" be multiples of {MXFP4_GROUP}, the size of its groups"
            )
        groups = (*rows, k // MXFP4_GROUP)
        return {
            f"{source.name}_blocks": TensorSpec((*groups, MXFP4_GROUP // 2), ("U8",)),
            f"{source.name}_scales": TensorSpec(groups, ("U8",)),
        }

    def unit(self, axis: int) -> int:
        return MXFP4_GROUP if axis == 1 else 1

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("e2m1", MXFP4_GROUP, "e8m0")

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        if span is not None and span.axis == len(source.shape) - 1:
            span = own_groups(span, MXFP4_GROUP)
        codes, scale = (fetch(f"{source.name}_{each}", span) for each in ("blocks", "scales"))
        return QuantizedWeight(self.scheme, MXFP4_GROUP * scale.shape[-1], codes.flatten(-2), scale)


MXFP4 = Quantized("MXFP4", Mxfp4())


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """Of `quantization_config`: experts are in MXFP4 but for those that it lists, and nothing else is."""
    return (*kept_plain(config, "modules_to_not_convert", where), Rule("*.experts.*", MXFP4))
