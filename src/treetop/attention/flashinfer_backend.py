"""Pages by FlashInfer: a plan from exact lengths on the host for each (phase, group, rows), into buffers of its own.

A decode plan's buffers are static, so the graphs that read them are captured once; `plan_round` fills them again before
each replay. An eager phase plans itself when it begins. Prefill packs its queries, which FlashInfer wants without gaps.
Source: `BatchPrefillWithPagedKVCacheWrapper` of flashinfer-python 0.6.15, flashinfer/prefill.py.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, GroupNeed, Need
from treetop.attention.contract import BackendSpec, RoundExtents
from treetop.attention.library_backend import AttendPages, LibraryBackend, first_line
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.ids import GroupName
from treetop.types.phase import Phase

CAPABILITIES = Capabilities(HALF, head_dims=(64, 128, 256), own_windows=False, own_sinks=False, needs_host_extents=True)

_NATURAL = math.log(2.0)
"""Its log-sum-exp is of base 2."""

_TILES_A_MULTIPROCESSOR = 2
_LISTS = 16 << 20
"""Bytes of the workspace for what is no part of a result."""

Key = tuple[Phase, GroupName, int, int]
"""Phase, group, rows, queries a row."""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Lengths and pages of a batch on the host.

    lengths: [rows].
    table: [rows, columns] int32, on the CPU.
    """

    lengths: list[int]
    table: Tensor
    page_size: int

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """FlashInfer's indptr [rows + 1], page indices and tokens on each row's last page [rows], int32."""
        p = self.page_size
        counts = torch.tensor([-(-length // p) for length in self.lengths], dtype=torch.int32)
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        used = torch.arange(self.table.shape[1]) < counts[:, None]
        last = [(length - 1) % p + 1 if length else 0 for length in self.lengths]
        return indptr, self.table[used], torch.tensor(last, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A wrapper, the table its pages come from, and the tokens a page."""

    wrapper: Any
    table: Tensor
    page_size: int


def workspace_bytes(need: Need, num_sms: int) -> int:
    """What any plan takes of the workspace at most: parts and log-sum-exps of tiles of queries, in float32.

    A tile holds queries of one row for a K/V head, each once for every head grouped on it. As many tiles as can run at
    a time have a place, and in a plan of static buffers all tiles that its rows could need if one of them had nearly
    all queries. Source: `PrefillPlanImpl`, include/flashinfer/attention/scheduler.cuh.
    """

    def parts(group: GroupNeed) -> int:
        grouped = group.heads // group.kv_heads
        at_a_time = _TILES_A_MULTIPROCESSOR * num_sms // group.kv_heads * 128
        tile = _tile((need.rows * (need.queries - 1) + 1) * grouped, group.head_dim)
        of_a_round = (-(-need.rows * need.queries * grouped // tile) + need.rows) * tile
        return max(at_a_time, of_a_round) * group.heads * (group.head_dim + 1) * 4

    return max(map(parts, need.groups), default=0) + _LISTS


def _tile(longest: int, head_dim: int) -> int:
    """Queries of a tile, by those that one row could have. Source: `FA2DetermineCtaTileQ`, include/flashinfer/utils."""
    if longest > 64 and head_dim < 256:
        return 128
    return 64 if longest > 16 else 16


class FlashInferPages:
    """need: with its groups, and the largest phase of a round.
    make_wrapper: FlashInfer's class, or one for tests.
    """

    def __init__(self, need: Need, make_wrapper: Callable[..., Any] | None = None) -> None:
        self._dtype, self._device = need.dtype, need.device
        self._groups: Mapping[GroupName, GroupNeed] = {group.name: group for group in need.groups}
        self._make = make_wrapper or importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        size = workspace_bytes(need, gpu_traits(need.device).num_sms)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=need.device)
        self._decode: dict[Key, _Planned] = {}
        self._prefill: dict[GroupName, Any] = {}

    def begin(self, metadata: AttentionMetadata) -> None:
        """A plan is made of lengths and positions together."""

    def plan(self, begun: None, metadata: AttentionMetadata) -> AttendPages:
        return self._plan_causal(metadata) if metadata.causal else self._plan_decode(metadata)

    def _plan_decode(self, metadata: AttentionMetadata) -> AttendPages:
        """Plans with the lengths as they are, unless a graph is being captured: `plan_round` does that for a replay."""
        key = (metadata.phase, metadata.table.group, *metadata.positions.shape)
        planned = self._decode.get(key)
        if planned is None:
            planned = self._decode[key] = self._wrapper(metadata)
        if not _capturing(self._device):
            self._fill(
                key, planned, _host_pages(metadata.table.data, metadata.rows, metadata.kv_len, metadata.page_size)
            )
        wrapper = planned.wrapper

        def attend(q: Tensor, kv: PagedKV, scale: float) -> PrefixPart:
            out, lse = _run(wrapper, q.flatten(0, 1), kv, metadata.page_size, scale)
            return PrefixPart(out.view(q.shape), lse.view(q.shape[:3]), metadata.kv_len, _NATURAL)

        return attend

    def _plan_causal(self, metadata: AttentionMetadata) -> AttendPages:
        group, positions = metadata.table.group, metadata.positions
        n = positions.shape[1]
        pages = _host_pages(metadata.table.data, metadata.rows, metadata.kv_len, metadata.page_size)
        query_len = [length - start for length, start in zip(pages.lengths, positions[:, 0].tolist(), strict=True)]
        if group not in self._prefill:
            self._prefill[group] = self._make(self._workspace, "NHD", backend="fa2")
        wrapper = self._prefill[group]
        self._plan(wrapper, group, _offsets(query_len), pages, causal=True)
        real = torch.arange(n, device=positions.device) < torch.tensor(query_len, device=positions.device)[:, None]
        packed = real.flatten().nonzero().flatten()

        def attend(q: Tensor, kv: PagedKV, scale: float) -> PrefixPart:
            rows, width, heads, dim = q.shape
            some, some_lse = _run(wrapper, q.flatten(0, 1).index_select(0, packed), kv, metadata.page_size, scale)
            out = q.new_zeros((rows * width, heads, dim)).index_copy_(0, packed, some)
            lse = some_lse.new_full((rows * width, heads), float("-inf")).index_copy_(0, packed, some_lse)
            return PrefixPart(out.view(q.shape), lse.view(q.shape[:3]), metadata.kv_len, _NATURAL)

        return attend

    def plan_round(self, round: RoundExtents) -> None:
        """One transfer from the device a group, then the plan of every phase that this round runs."""
        bucket, seen = round.rows.shape[0], {}
        for key, planned in self._decode.items():
            phase, group, rows, n = key
            if rows == bucket and round.queries.get(phase) == n:
                if group not in seen:
                    kv_len = round.committed[round.rows]
                    seen[group] = _host_pages(planned.table, round.rows, kv_len, planned.page_size)
                self._fill(key, planned, seen[group])

    def _wrapper(self, metadata: AttentionMetadata) -> _Planned:
        """A wrapper whose buffers hold the largest batch of its rows."""
        rows, columns = metadata.rows.shape[0], metadata.table.data.shape[1]

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        wrapper = self._make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=ints(rows + 1),
            paged_kv_indptr_buf=ints(rows + 1),
            paged_kv_indices_buf=ints(rows * columns),
            paged_kv_last_page_len_buf=ints(rows),
            backend="fa2",
        )
        return _Planned(wrapper, metadata.table.data, metadata.page_size)

    def _fill(self, key: Key, planned: _Planned, pages: HostPages) -> None:
        _, group, rows, n = key
        self._plan(planned.wrapper, group, _offsets([n] * rows), pages, causal=False)

    def _plan(self, wrapper: Any, group: GroupName, query_offsets: Tensor, pages: HostPages, causal: bool) -> None:
        shape = self._groups[group]
        indptr, indices, last = pages.arrays()
        wrapper.plan(
            query_offsets,
            indptr,
            indices,
            last,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            pages.page_size,
            causal=causal,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def _run(wrapper: Any, q: Tensor, kv: PagedKV, page_size: int, scale: float) -> tuple[Tensor, Tensor]:
    """q: [queries, heads, d]. Returns out like q and lse [queries, heads] float32, base 2."""
    pages = kv.data.unflatten(0, (-1, page_size))
    # Its scale is 1 / sqrt(d), times what is given here.
    factor = scale * math.sqrt(q.shape[2])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run: tuple[Tensor, Tensor] = wrapper.run(
        q, (pages[:, :, 0], pages[:, :, 1]), out=out, return_lse=True, q_scale=None if factor == 1.0 else factor
    )
    return run


def _host_pages(table: Tensor, rows: Tensor, kv_len: Tensor, page_size: int) -> HostPages:
    """One transfer: each row's length, then its columns."""
    both = torch.cat([kv_len.to(torch.int32)[:, None], table[rows]], dim=1).cpu()
    return HostPages(both[:, 0].tolist(), both[:, 1:], page_size)


def _offsets(counts: list[int]) -> Tensor:
    """Where each row's queries begin, and the end: [rows + 1] int32."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return torch.tensor(ends, dtype=torch.int32)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def problem(device: torch.device) -> str | None:
    """Why FlashInfer cannot be called; None if it can be imported. Its kernels are compiled when first planned."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # it looks for compilers and drivers when it is imported
        return f"flashinfer-python cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None


def _make(need: Need) -> LibraryBackend:
    ops = Ops(OpContext(need.device, need.dtype))
    return LibraryBackend("flashinfer", CAPABILITIES, FlashInferPages(need), TritonBackend(need.device), ops)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not, problem))
