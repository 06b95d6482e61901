"""MXFP4 as a format of parameters: blocks and scales as a checkpoint has them, packed in memory too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.mxfp4 import GROUP, GROUP_BYTES, LARGEST_SCALE, NOT_A_NUMBER, decode, join_groups
from treetop.models.params import Fetch, Source, Stored
from treetop.types.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A tensor NAME of rows [..., k] is NAME_blocks [..., k / 32, 16] and NAME_scales [..., k / 32], both uint8.

    A source's transform moves whole rows: it is given [..., k / 32, 17], see `kernels.mxfp4`.
    """

    def stored(self, source: Source) -> dict[str, Stored]:
        *rows, k = source.shape
        groups = (*rows, k // GROUP)
        return {
            f"{source.name}_blocks": Stored((*groups, GROUP // 2), ("U8",)),
            f"{source.name}_scales": Stored(groups, ("U8",)),
        }

    def read(self, source: Source, fetch: Fetch) -> Tensor:
        assert source.span is None or source.stacked
        blocks, scales = (fetch(f"{source.name}_{each}", source.span) for each in ("blocks", "scales"))
        groups = join_groups(blocks, scales)
        large = scales > LARGEST_SCALE
        if bool(large.any()) and not (
            bool((scales[large] != NOT_A_NUMBER).all()) and bool(decode(groups[large], torch.float32).isfinite().all())
        ):
            raise CheckpointError(f"tensor {source.name}_scales: it makes weights NaN or infinite")
        return groups if source.transform is None else source.transform(groups)

    def unit(self, axis: int) -> int:
        return GROUP if axis == 1 else 1

    def held(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // GROUP, GROUP_BYTES)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8


MXFP4 = Mxfp4()
