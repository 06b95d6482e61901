"""The memory of the pages: one tensor a KV group."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.layer import LayerKV
from treetop.kernels.kv import PagedKV
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout


@dataclass(frozen=True, slots=True)
class KVPool:
    """All pages of one group. data: [layers, num_pages * page_size, *group.kv.shape]."""

    group: KVGroup
    data: Tensor

    def layers(self) -> list[LayerKV]:
        """The group's layers in order, each with its pages."""
        form = self.group.kv
        layers = (PagedKV(pages, form.value_dim, form.index_dim) for pages in self.data)
        return [LayerKV(self.group.name, i, layer) for i, layer in enumerate(layers)]


def make_pools(
    layout: Layout, dtype: torch.dtype, zeros: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> dict[GroupName, KVPool]:
    """Zeroed pools of every group of the layout. zeros: makes a tensor of a shape and dtype."""
    pools = {}
    for group in layout.groups:
        slots = layout.num_pages[group.name] * layout.page_size
        shape = (group.num_layers, slots, *group.kv.shape)
        pools[group.name] = KVPool(group, zeros(shape, dtype))
    return pools
