"""The Triton backend: prefix and tail in one pass, pages read through the page table, nothing to plan."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.capabilities import CAPABILITIES, Need, require
from treetop.attention.contract import Queries, TableView, TailKV
from treetop.kernels.attention import PagedKeys, Sight, TailKeys, paged_attention
from treetop.kernels.kv import PagedKV
from treetop.kernels.launch import CallShape, Launch, choose_launch
from treetop.kernels.triton_guard import gpu_traits


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A phase: the prefix, what queries see of it, and the tail's positions and mask (none in prefill)."""

    view: TableView
    sight: Sight
    tail: tuple[Tensor, Tensor] | None


class TritonBackend:
    """Kernels read lengths, positions and masks where they lie: beginning and planning launch nothing."""

    name = "triton"
    capabilities = CAPABILITIES["triton"]

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        require("triton", Need(dtype, device))
        self._gpu = gpu_traits(device)

    def begin(self, view: TableView) -> TableView:
        return view

    def plan(self, prefix: TableView, queries: Queries) -> TritonPlan:
        sight = Sight(queries.positions, queries.window)
        return TritonPlan(prefix, sight, (queries.tail_positions, queries.mask))

    def plan_causal(self, prefix: TableView, positions: Tensor, window: int | None) -> TritonPlan:
        return TritonPlan(prefix, Sight(positions, window, causal=True), None)

    def prefix(self, q: Tensor, kv: PagedKV, plan: TritonPlan, scale: float) -> tuple[Tensor, Tensor]:
        return paged_attention(q, _keys(kv, plan), plan.sight, None, scale, self.launch_of(q, kv, plan))

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: TritonPlan, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        assert plan.tail is not None
        keys = TailKeys(tail.data, *plan.tail)
        return paged_attention(q, _keys(kv, plan), plan.sight, keys, scale, self.launch_of(q, kv, plan), sinks)[0]

    def causal(self, q: Tensor, kv: PagedKV, plan: TritonPlan, scale: float, sinks: Tensor | None = None) -> Tensor:
        return paged_attention(q, _keys(kv, plan), plan.sight, None, scale, self.launch_of(q, kv, plan), sinks)[0]

    def launch_of(self, q: Tensor, kv: PagedKV, plan: TritonPlan) -> Launch:
        """How a call is cut, for benchmarks to report."""
        return choose_launch(shape_of(q, kv, plan), self._gpu)


def shape_of(q: Tensor, kv: PagedKV, plan: TritonPlan) -> CallShape:
    """What a call looks like to its launch."""
    rows, n, heads, dim = q.shape
    kv_heads, bound = kv.data.shape[2], plan.view.bound
    return CallShape(rows, n, kv_heads, heads // kv_heads, dim, q.element_size(), bound, plan.sight.causal)


def _keys(kv: PagedKV, plan: TritonPlan) -> PagedKeys:
    view = plan.view
    return PagedKeys(kv.data, view.table.data, view.rows, view.extent, view.bound, view.page_size)
