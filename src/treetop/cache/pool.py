"""The memory of the pages: one tensor a KV group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.layer import LayerKV
from treetop.kernels.kv import KVParts, PagedKV, kv_dtype
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout


@dataclass(frozen=True, slots=True)
class KVPool:
    """All pages of one group. data: [layers, num_pages * page_size, *group.kv.shape].
    scales: [layers, planes, kv_heads] float32, in FP8; else None.
    parts: how planes lie there, where that is in parts.
    """

    group: KVGroup
    data: Tensor
    scales: Tensor | None = None
    parts: KVParts | None = None

    def layers(self) -> list[LayerKV]:
        """The group's layers in order, each with its pages."""
        form, scales = self.group.kv, [None] * len(self.data) if self.scales is None else [*self.scales]
        return [
            LayerKV(self.group.name, i, PagedKV(pages, form.value_dim, form.index_dim, scales[i], self.parts))
            for i, pages in enumerate(self.data)
        ]


def make_pools(
    layout: Layout,
    dtype: torch.dtype,
    zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
    scales: Mapping[GroupName, Tensor],
) -> dict[GroupName, KVPool]:
    """Zeroed pools of every group of the layout.

    dtype: the engine's. zeros: makes a tensor of a shape and dtype. scales: of groups in FP8, see `KVPool`.
    """
    pools = {}
    for group in layout.groups:
        slots = layout.num_pages[group.name] * layout.page_size
        shape = (group.num_layers, slots, *group.kv.shape)
        data = zeros(shape, kv_dtype(group.kv, dtype))
        parts = KVParts(group.kv.parts, dtype) if group.kv.parts else None
        pools[group.name] = KVPool(group, data, scales[group.name] if group.kv.fp8 else None, parts)
    return pools
