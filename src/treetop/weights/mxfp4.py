"""Experts in MXFP4: blocks and scales as a checkpoint has them, packed in memory too (`kernels.mxfp4`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.experts import Activation, Experts
from treetop.kernels.gate import Gate
from treetop.kernels.mxfp4 import (
    GROUP,
    GROUP_BYTES,
    LARGEST_SCALE,
    NOT_A_NUMBER,
    Mxfp4Weight,
    decode,
    join_groups,
    pack,
)
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.errors import CheckpointError
from treetop.weights.format import (
    MAIN,
    Biases,
    ExpertProducts,
    Fetch,
    GatedLinear,
    Held,
    Holding,
    Linear,
    Parts,
    ProductWeight,
    Source,
    Stored,
)
from treetop.weights.rules import Named, Rule, kept_plain


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A tensor NAME of rows [..., k] is NAME_blocks [..., k / 32, 16] and NAME_scales [..., k / 32], both uint8.

    In memory both are one tensor [..., k / 32, 17]. A `WeightFormat`.
    """

    name: str = "MXFP4"

    def stored(self, source: Source) -> dict[str, Stored]:
        *rows, k = source.shape
        if k % GROUP != 0:
            raise CheckpointError(
                f"tensor {source.name}: rows of {k} numbers cannot be in MXFP4: hidden_size and intermediate_size must"
                f" be multiples of {GROUP}, the size of its groups"
            )
        groups = (*rows, k // GROUP)
        return {
            f"{source.name}_blocks": Stored((*groups, GROUP // 2), ("U8",)),
            f"{source.name}_scales": Stored(groups, ("U8",)),
        }

    def unit(self, axis: int) -> int:
        return GROUP if axis == 1 else 1

    def held(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Held]:
        return {MAIN: Held((*shape[:-1], shape[-1] // GROUP, GROUP_BYTES), torch.uint8)}

    def read(self, source: Source, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
        assert source.span is None or source.stacked
        blocks, scales = (fetch(f"{source.name}_{each}", source.span) for each in ("blocks", "scales"))
        groups = join_groups(blocks, scales)
        large = scales > LARGEST_SCALE
        if bool(large.any()) and not (
            bool((scales[large] != NOT_A_NUMBER).all()) and bool(decode(groups[large], torch.float32).isfinite().all())
        ):
            raise CheckpointError(f"tensor {source.name}_scales: it makes weights NaN or infinite")
        yield MAIN, groups if source.transform is None else source.transform(groups)

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        groups = parts[MAIN].random_(0, 256, generator=generator)
        groups[..., GROUP_BYTES - 1] = 125 - round(log2(groups.shape[-2] * GROUP) / 2)

    def copy_bytes(self, weight: ProductWeight, dtype: torch.dtype, gpu: GpuTraits | None) -> int:
        return 0

    def linear(self, parts: Parts, bias: Tensor | None, holding: Holding) -> Linear:
        raise CheckpointError("weights in MXFP4 are supported as experts only")

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, holding: Holding) -> GatedLinear:
        raise CheckpointError("weights in MXFP4 are supported as experts only")

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, holding: Holding
    ) -> ExpertProducts:
        """Packed where the kernel serves, gates and ups in turn; elsewhere decoded."""
        ops, (both, last) = holding.ops, (gate_up[MAIN], down[MAIN])
        first: Tensor | Mxfp4Weight
        second: Tensor | Mxfp4Weight
        if ops.gpu_for(Ops.experts) is None:
            first, second = decode(both, ops.context.dtype), decode(last, ops.context.dtype)
        else:
            first, second = pack(both.transpose(1, 2)), pack(last)
        return partial(ops.experts, experts=Experts(first, second, *biases, activation))


MXFP4 = Mxfp4()


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """Of `quantization_config`: experts are in MXFP4 but for those that it lists, and nothing else is.

    Source: `transformers` 5 `quantizers/quantizer_mxfp4.py`.
    """
    return (*kept_plain(config, "modules_to_not_convert", where), Rule("*.experts.*", MXFP4))
