"""Calls of attention as an engine makes them: random inputs, their dense reference, floors and timers on one GPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from attention_shapes import Shape
from frame import COLD_BYTES, DEVICE, graph_of, median_us, times_us
from torch import Tensor

from treetop.attention.contract import AttentionBackend, TailKV
from treetop.attention.library_backend import LibraryPlan
from treetop.kernels.attention.attention import paged_attention, paged_attention_reference
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.fused import rotate_and_write
from treetop.kernels.kv import PagedKV, PageTable, encoded
from treetop.kernels.tree.tree import ancestor_mask
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.phase import Phase

Backend = AttentionBackend[Any, Any]
Attend = Callable[[PagedKV], Tensor]
LONG_OPERATIONS = 10**11
"""Of a call that takes some 0.2 ms: two layers in a replay are enough, for operations take longer than cold bytes."""
MAX_COMPARED = 256
"""Queries a row of a large prefill that are compared with the reference, from the first to the last."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative error, ||out - reference|| / ||reference||, of a right kernel in each dtype."""


@dataclass
class Case:
    """Random inputs of a shape: layers that share everything but their pages.

    rotate: the rotation that comes before attention in a round, of one head on tensors of its own. All heads, which lie
    in the L2 cache in a round, would be driven out of it by the calls of attention here.
    """

    shape: Shape
    q: Tensor
    layers: list[PagedKV]
    metadata: AttentionMetadata
    tail: TailKV
    rotate: Callable[[], object]
    expected: dict[int, Tensor] = field(default_factory=dict)  # by the layer's id

    @cached_property
    def rotation_us(self) -> float:
        """Median us of a rotation in a graph of nothing else."""
        return median_us([self.rotate] * len(self.layers), 20)

    def call(self, backend: Backend, plan: Any, layer: PagedKV) -> Tensor:
        scale = self.shape.head_dim**-0.5
        if self.shape.kind == "prefill":
            return backend.causal(self.q, layer, plan, scale)
        if self.shape.kind == "prefix":
            if isinstance(plan, LibraryPlan):  # its own call alone
                return plan.attend(self.q, layer, scale).out
            gpu = gpu_traits(DEVICE)
            return paged_attention(self.q, layer.data, self.metadata, None, scale, None, gpu, scales=layer.scales)[0]
        return backend.prefix_tail(self.q, layer, plan, self.tail, scale)

    def plan(self, backend: Backend) -> Any:
        return backend.plan(backend.begin(self.metadata), self.metadata)

    @cached_property
    def compared(self) -> Tensor:
        """Which queries of a row are compared with the reference: all, or evenly spaced ones of a large prefill.

        Dense scores of 8192 queries over 32k keys would take 32 GiB a row.
        """
        n = self.shape.n
        return torch.linspace(0, n - 1, min(n, MAX_COMPARED), device=DEVICE).round().long()


def build(shape: Shape, num_layers: int) -> Case:
    """Pages in random order; the last table row is the dummy's. Ragged: lengths vary, and the last row is padding."""
    s, p = shape, shape.page_size
    columns, longest = -(-s.prefix_len // p), -(-s.longest_len // p)
    num_pages = 1 + s.rows * columns + longest - columns
    order = torch.randperm(num_pages - 1, device=DEVICE) + 1
    table = torch.zeros((s.rows + 1, -(-s.capacity // p)), dtype=torch.int32, device=DEVICE)
    table[: s.rows, :columns] = order[: s.rows * columns].view(s.rows, columns)
    table[0, columns:longest] = order[s.rows * columns :]
    rows = torch.randperm(s.rows, device=DEVICE)
    kv_len = torch.where(rows == 0, s.longest_len, s.prefix_len)
    if s.ragged:
        rows[-1] = s.rows
        minimum = s.n if s.kind == "prefill" else 0
        kv_len[:-1] = torch.randint(minimum, s.prefix_len + 1, (s.rows - 1,), device=DEVICE)
        kv_len[-1] = 0
    pages = (num_pages * p, s.planes, s.kv_heads, s.head_dim + s.index_dim)
    scales = torch.rand((s.planes, s.kv_heads), device=DEVICE) / 16 + 1 / 16 if s.fp8 else None
    layers = []
    for _ in range(num_layers):
        data = torch.randn(pages, dtype=s.dtype, device=DEVICE)
        data[:p] = 0
        layers.append(PagedKV(encoded(data, scales), s.latent, s.index_dim, scales))
    fused = torch.randn(s.rows, s.n, s.heads + 2 * s.kv_heads, s.head_dim, dtype=s.dtype, device=DEVICE)
    q = fused[:, :, : s.heads]  # as it leaves the projection; of compressed attention, as `write_latent` makes it
    q = q if s.latent is None else q.contiguous()
    columns_of_q = torch.arange(s.n, device=DEVICE)
    columns_of_tail = torch.randn((s.rows, s.tail, *pages[1:]), dtype=s.dtype, device=DEVICE)
    tail = TailKV(encoded(columns_of_tail, scales), s.latent, s.index_dim, scales)
    made = partial(AttentionMetadata, Phase.VERIFY, PageTable(FULL, table), rows, kv_len, s.capacity, p)
    if s.kind == "prefill":
        positions = (kv_len - s.n).clamp(min=0)[:, None] + columns_of_q
        positions = torch.where(kv_len[:, None] > 0, positions, 0)
        metadata = made(positions, s.window)
    elif s.kind == "prefix":
        positions = kv_len[:, None] + columns_of_q
        metadata = made(positions, None, positions, torch.empty((s.rows, s.n, 0), dtype=torch.bool, device=DEVICE))
    else:
        picks = torch.rand(s.rows, s.tail, device=DEVICE) * torch.arange(s.tail, device=DEVICE)
        mask = ancestor_mask(picks.long(), s.tail)[:, -s.n :].contiguous()
        depth = ancestor_mask(picks.long(), s.tail).sum(dim=2) - 1
        spots = kv_len[:, None] + depth
        metadata = made(spots[:, -s.n :], s.window, spots, mask)
    if s.top_k:
        metadata = replace(metadata, chosen=chosen_at_random(s, kv_len, metadata.mask))
    return Case(s, q, layers, metadata, tail, rotation(s))


def chosen_at_random(s: Shape, kv_len: Tensor, mask: Tensor | None) -> SparseKeys:
    """Of each query by itself, so that those of a row share few: all columns of the tail that it sees, and no more of
    the prefix than `top_k`. The rest of a list is what an indexer may leave there."""
    order = torch.rand((s.rows, s.n, s.prefix_len), device=DEVICE)
    order = order.masked_fill_(torch.arange(s.prefix_len, device=DEVICE) >= kv_len[:, None, None], 2.0)
    first = order.argsort(2)[..., : s.top_k]
    first = first.where(first < kv_len[:, None, None], s.prefix_len).sort(2)[0].to(torch.int32)
    positions = first.new_full((s.rows, s.n, s.top_k), s.prefix_len)
    positions[..., : first.shape[2]] = first
    count = kv_len.clamp(max=s.top_k).to(torch.int32)[:, None].expand(s.rows, s.n).contiguous()
    return SparseKeys(positions, count, mask)


def rotation(s: Shape) -> Callable[[], object]:
    """Rotates one head's q and k, and writes its K/V where nobody reads them."""
    qkv = torch.randn((1, s.rows, s.n, 3, s.head_dim), dtype=s.dtype, device=DEVICE)
    angles = torch.zeros((1, 2, s.head_dim), device=DEVICE)
    positions = torch.zeros((s.rows, s.n), dtype=torch.int64, device=DEVICE)
    target = torch.empty((s.rows, s.n, 2, 1, s.head_dim), dtype=s.dtype, device=DEVICE)
    return partial(rotate_and_write, qkv, (angles, positions), target, None, None, gpu_traits(DEVICE))


def reference(case: Case, layer: PagedKV) -> Tensor:
    """Dense attention in float32 of the queries that are compared, a row at a time."""
    s, metadata, at, chosen = case.shape, case.metadata, case.compared, case.metadata.chosen
    outs = []
    for i in range(s.rows):
        one = slice(i, i + 1)
        tail = case.tail.planes[one] if s.kind not in ("prefill", "prefix") else None
        mine = replace(
            metadata,
            rows=metadata.rows[one],
            kv_len=metadata.kv_len[one],
            max_kv_len=s.longest_len,
            positions=metadata.positions[one][:, at],
            tail_positions=None if metadata.tail_positions is None else metadata.tail_positions[one],
            mask=None if metadata.mask is None else metadata.mask[one],
            chosen=None if chosen is None else SparseKeys(chosen.positions[one], chosen.count[one], None),
        )
        q = case.q[one][:, at].to(torch.float32)
        out = paged_attention_reference(q, layer.planes, mine, tail, s.head_dim**-0.5, scales=layer.scales)[0]
        outs.append(out[..., : s.value_dim])
    return torch.cat(outs)


def relative_error(out: Tensor, expected: Tensor) -> float:
    difference = out.to(torch.float32) - expected
    return float(difference.norm() / expected.norm())


def check(case: Case, backend: Backend) -> float:
    """The larger relative error of the first and last layer's results."""
    plan = case.plan(backend)
    return max(error_of(case, case.call(backend, plan, layer), layer) for layer in (case.layers[0], case.layers[-1]))


def error_of(case: Case, out: Tensor, layer: PagedKV) -> float:
    at = id(layer)
    if at not in case.expected:
        case.expected[at] = reference(case, layer)
    return relative_error(out[:, case.compared], case.expected[at])


def describe(shape: Shape) -> dict[str, object]:
    return {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch.")}


def num_layers_for(shape: Shape) -> int:
    if shape.operations > LONG_OPERATIONS:
        return 2
    return max(2, min(64, COLD_BYTES // max(shape.kv_bytes, 1)))


def memory_bytes(shape: Shape) -> int:
    """What measuring a shape takes, about: pages, projections and results, and the reference's scores of a row."""
    queries = shape.rows * shape.n * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * shape.dtype.itemsize
    scores = 4 * min(shape.n, MAX_COMPARED) * shape.longest_len * shape.heads
    return num_layers_for(shape) * shape.page_bytes + 4 * queries + 6 * scores


@dataclass(frozen=True)
class Measured:
    """Median, 10th and 90th percentile of a call's time in a round, in us; error of what the last replay left.

    plan_us: host time of planning one phase, for a backend that plans on the host; else 0.
    """

    us: float
    us_p10: float
    us_p90: float
    error: float
    plan_us: float = 0.0


def measure(case: Case, backend: Backend, replays: int = 40) -> Measured:
    """Beginning and planning are outside the graph for a backend that plans on the host, else inside, once."""
    hosted = backend.capabilities.needs_host_extents
    plan = case.plan(backend)

    def begin() -> Attend:
        return partial(case.call, backend, plan if hosted else case.plan(backend))

    times, out = times_in_a_round(case, begin, replays)
    error = error_of(case, out, case.layers[-1])
    tenth, planning = len(times) // 10, plan_us(case, backend) if hosted else 0.0
    return Measured(statistics.median(times), times[tenth], times[-1 - tenth], error, planning)


def times_in_a_round(case: Case, begin: Callable[[], Attend], replays: int) -> tuple[list[float], Tensor]:
    """Us that a call adds to the rotation before it, one number a replay, sorted; and what the last call returned.

    begin: what is done once before the layers, and gives what each of them calls. What a replay costs once, the launch
    of the graph, is in both and so in neither. Where the programs of a kernel land depends on what ran before: back to
    back, calls of attention that overlap crowd on some multiprocessors, which calls that follow a rotation do not.
    """
    last: list[Tensor] = []

    def work() -> None:
        attend = begin()
        for layer in case.layers:
            case.rotate()
            last[:] = [attend(layer)]

    times = times_us(graph_of(work).replay, replays)
    return sorted(t / len(case.layers) - case.rotation_us for t in times), last[0]


def plan_us(case: Case, backend: Backend, repeats: int = 10) -> float:
    """Host time of `begin` and `plan`, the device idle before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.plan(backend)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
