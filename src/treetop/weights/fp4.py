"""FP4 (e2m1) of dense layers and of experts one by one: NVFP4 with scales of two levels, MXFP4 with powers of two.

NVFP4: 16 of a row's numbers share an e4m3 scale, which a scale of the whole weight multiplies, or divides in
`compressed-tensors`' files. MXFP4: 32 share a power of two. A scale's kind says which: e4m3 and e8m0 of equal shapes
are never taken for each other (vllm-28435).
Sources: `compressed-tensors` 0.20 (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`), vllm `quantization/modelopt.py`;
OCP Microscaling Formats (MX) Specification 1.0.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.quantized import Quantized, own_groups


@dataclass(frozen=True, slots=True)
class Fp4:
    """Two codes a byte, the first in the lower half.

    group: numbers that share a scale.
    codes: the end of the name of the tensor of codes.
    whole: the end of that of a scale of all, and what it does.
    """

    group: int
    codes: str = "_packed"
    whole: tuple[str, Literal["times", "over"]] | None = None

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        *_, k = source.shape
        if k % self.group:
            raise CheckpointError(f"tensor {source.name}: rows of {k} numbers are not whole groups of {self.group}")
        kinds = ("U8", "F8_E8M0") if self.whole is None else ("F8_E4M3",)
        tensors = {
            f"{source.name}{self.codes}": TensorSpec((*source.shape[:-1], k // 2), ("U8",)),
            f"{source.name}_scale": TensorSpec((*source.shape[:-1], k // self.group), kinds),
        }
        if self.whole is not None:
            tensors[f"{source.name}{self.whole[0]}"] = TensorSpec((1,), ("F32",), others=((),))
        return tensors

    def unit(self, axis: int) -> int:
        return self.group if axis == 1 else 1

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme("e2m1", self.group, "e8m0" if self.whole is None else self.whole[1])

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        last = len(source.shape) - 1
        packed = groups = span
        if span is not None and span.axis == last:
            packed, groups = Span(last, span.start // 2, -(-span.stop // 2)), own_groups(span, self.group)
        codes = fetch(f"{source.name}{self.codes}", packed)
        scale = fetch(f"{source.name}_scale", groups).view(torch.uint8)
        factor = None
        if self.whole is not None:
            one = fetch(f"{source.name}{self.whole[0]}", None).to(torch.float32).view(())
            if self.whole[1] == "over" and not bool(one):
                raise CheckpointError(f"tensor {source.name}: its scales make weights NaN or infinite")
            factor = one.expand(*codes.shape[:-1], 1)
        return QuantizedWeight(self.scheme, 2 * codes.shape[-1], codes, scale, factor)


NVFP4_GROUP, MXFP4_GROUP = 16, 32
NVFP4 = Quantized("NVFP4", Fp4(NVFP4_GROUP, whole=("_global_scale", "over")))
NVFP4_OF_MODELOPT = Quantized("NVFP4", Fp4(NVFP4_GROUP, "", ("_scale_2", "times")))
MXFP4_EACH = Quantized("MXFP4", Fp4(MXFP4_GROUP))
