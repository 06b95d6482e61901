"""The Triton backend: prefix and tail in one pass, pages read through the page table, nothing to plan."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.contract import Queries, TableView, TailKV
from treetop.kernels.attention import Launch, PagedKeys, Sight, TailKeys, choose_launch, paged_attention
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.errors import ConfigError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A phase: the prefix, what queries see of it, and the tail's positions and mask (none in prefill)."""

    view: TableView
    sight: Sight
    tail: tuple[Tensor, Tensor] | None


class TritonBackend:
    """Kernels read lengths, positions and masks where they lie: beginning and planning launch nothing."""

    name = "triton"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        problem = why_not(device)
        if dtype not in _DTYPES:
            problem = f"it computes in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if problem is not None:
            raise ConfigError(f"--attention-backend triton: {problem}; use --attention-backend torch")
        self._gpu = gpu_traits(device)

    def begin(self, view: TableView) -> TableView:
        return view

    def plan(self, prefix: TableView, queries: Queries) -> TritonPlan:
        sight = Sight(queries.positions, queries.window)
        return TritonPlan(prefix, sight, (queries.tail_positions, queries.mask))

    def plan_causal(self, prefix: TableView, positions: Tensor, window: int | None) -> TritonPlan:
        return TritonPlan(prefix, Sight(positions, window, causal=True), None)

    def prefix(self, q: Tensor, kv: PagedKV, plan: TritonPlan, scale: float) -> tuple[Tensor, Tensor]:
        return paged_attention(q, _keys(kv, plan), plan.sight, None, scale, self._launch(q, kv, plan))

    def prefix_tail(self, q: Tensor, kv: PagedKV, plan: TritonPlan, tail: TailKV, scale: float) -> Tensor:
        assert plan.tail is not None
        keys = TailKeys(tail.data, *plan.tail)
        return paged_attention(q, _keys(kv, plan), plan.sight, keys, scale, self._launch(q, kv, plan))[0]

    def causal(self, q: Tensor, kv: PagedKV, plan: TritonPlan, scale: float) -> Tensor:
        return self.prefix(q, kv, plan, scale)[0]

    def _launch(self, q: Tensor, kv: PagedKV, plan: TritonPlan) -> Launch:
        rows, n, heads, dim = q.shape
        kv_heads = kv.data.shape[2]
        bound = plan.view.bound
        return choose_launch(rows, n, kv_heads, heads // kv_heads, dim, q.element_size(), bound, self._gpu)


def _keys(kv: PagedKV, plan: TritonPlan) -> PagedKeys:
    view = plan.view
    return PagedKeys(kv.data, view.table.data, view.rows, view.extent, view.bound, view.page_size)
