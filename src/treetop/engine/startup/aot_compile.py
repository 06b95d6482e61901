"""Kernels of the steps to come, compiled before the first of them runs: all cores at once, not one kernel at a time.

A rehearsal records steps into a CUDA graph that is never replayed. While steps are recorded nothing runs on the device,
so nothing is read or written, and our kernels are compiled instead of launched. What can be recorded depends on shapes
alone, so the steps will launch these kernels; but for few that also depend on how large the pools become, which are
compiled then. No step keeps a tensor that it makes: nothing ever fills it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from treetop.attention.auto import Chosen
from treetop.attention.contract import SparseBackend, TailKV
from treetop.engine.cuda_graphs import Run, greedy_keys
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey, run_phases
from treetop.engine.startup.profile_run import dummy_prefill, profile_steps
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.gemm.skinny_gemm import MAX_ROWS
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import aot_compile
from treetop.types.layout import Layout
from treetop.types.sampling import SamplingMode


def compile_all(runner: ModelRunner) -> None:
    """Compile the kernels of the worst steps, of all greedy rounds, of the smallest of others, and of prefill steps of
    every size, captured and not. The smallest differ from the worst where a budget packs the nodes of many rows.
    """
    layout, drawn = runner.layout, (SamplingMode.FILTER, SamplingMode.LOGPROBS)
    worst = [step for choice in drawn for step in profile_steps(runner, choice)]
    least = [RoundKey(layout.buckets[0], s, choice) for choice in drawn for s in layout.shapes_at(layout.buckets[0])]
    packed = [RoundKey.of_prompts(*size, SamplingMode.FILTER) for size in layout.prefill_sizes]
    rounds = [partial(run_phases, runner, key, layout.max_committed) for key in (*greedy_keys(layout), *least, *packed)]
    compile_steps([*worst, *rounds, *_prefills(runner)])


def _prefills(runner: ModelRunner) -> Iterator[Run]:
    """One in which no prompt ends; steps of few tokens, whose products differ; one in which attention is tried at every
    extent.
    """
    yield partial(dummy_prefill, runner, SamplingMode.GREEDY, 1, 1, False)
    for width in sizes(min(MAX_ROWS, runner.layout.prefill_widths[1])):
        yield partial(dummy_prefill, runner, SamplingMode.GREEDY, 1, width)
    for blocks, width in blocks_of(runner.layout):
        yield partial(dummy_prefill, runner, SamplingMode.GREEDY, blocks, width, ends=1)
    yield partial(dummy_prefill, replace(runner, backend=EveryExtent(runner)), SamplingMode.GREEDY, 1, 1)


def blocks_of(layout: Layout) -> list[tuple[int, int]]:
    """Batches of blocks that are not captured, of each kind that launches tell apart: blocks, and tokens of one."""
    return [(max(blocks - less, 1), width) for blocks, width in layout.largest_in_blocks for less in range(2)]


def sizes(maximum: int) -> list[int]:
    """Numbers up to `maximum`, some of each kind that launches tell apart: by powers of two, and as multiples of 16."""
    steps = (2**i for i in range(maximum.bit_length()))
    kinds = (size for step in steps for size in (step, 5 * step // 4, 3 * step // 2, 7 * step // 4, 2 * step - 1))
    return sorted({maximum, *(size for size in kinds if size < maximum)})


class EveryExtent:
    """A backend that attends, at the first of each kind of layers, with all kinds of rows, queries and keys too.

    extents: (rows, queries a row, bound of the keys) of those.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._real, layout = runner.backend, runner.layout
        self.name, self.capabilities = self._real.name, self._real.capabilities
        longest = layout.max_committed
        bounds = [*(2**i for i in range(longest.bit_length())), longest]
        self.extents = [
            (rows, width, bound)
            for rows, maximum in layout.prefill_widths.items()
            for width in sizes(maximum)
            for bound in bounds
            if width <= bound
        ]
        self.extents += [(*batch, bound) for batch in blocks_of(layout) for bound in bounds if batch[1] <= bound]
        self._done: set[object] = set()

    def begin(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def plan(self, begun: AttentionMetadata, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def causal(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        kind = plan.window, plan.chunked, q.shape[2:], kv.data.shape[1:], sinks is None
        for metadata in self._every(plan, kind):
            width = metadata.positions.shape[1]
            self._attend(q.new_empty((len(metadata.rows), width, *q.shape[2:])), kv, metadata, scale, sinks)
        return self._attend(q, kv, plan, scale, sinks)

    def _every(self, plan: AttentionMetadata, kind: object) -> Iterator[AttentionMetadata]:
        """The plan at every extent, unless a call of this kind has had them."""
        for rows, width, bound in [] if kind in self._done else self.extents:
            each, positions = plan.rows.new_zeros(rows), plan.rows.new_zeros((rows, width))
            chosen = plan.chosen
            if chosen is not None:
                most = chosen.positions.shape[2]
                count = chosen.count.new_zeros((rows, width))
                lists = SparseKeys(chosen.positions.new_zeros((rows, width, most)), count, None)
                chosen = lists if bound > most else None
            yield replace(plan, rows=each, kv_len=each, max_kv_len=bound, positions=positions, chosen=chosen)
        self._done.add(kind)

    def _attend(
        self, q: Tensor, kv: PagedKV, metadata: AttentionMetadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        return self._real.causal(q, kv, self._planned(metadata), scale, sinks)

    def _planned(self, metadata: AttentionMetadata) -> Any:
        return self._real.plan(self._real.begin(metadata), metadata)

    def choose(self, query: IndexQuery, kv: PagedKV, plan: AttentionMetadata, tail: TailKV | None) -> Any:
        """What the real one chooses, after it has chosen at every extent."""
        real = cast(SparseBackend[Any], self._real)
        for metadata in self._every(plan, ("choose", query.heads.shape[2:], query.top_k)):
            sizes = metadata.positions.shape
            heads = query.heads.new_zeros((*sizes, *query.heads.shape[2:]))
            weights = query.weights.new_zeros((*sizes, *query.weights.shape[2:]))
            real.choose(IndexQuery(heads, weights, query.top_k), kv, self._planned(metadata), tail)
        return real.choose(query, kv, self._planned(plan), tail)

    def hidden(self, plan: AttentionMetadata, chosen: Any) -> Tensor:
        return cast(SparseBackend[Any], self._real).hidden(self._planned(plan), chosen)

    def narrowed(self, plan: AttentionMetadata, chosen: Any) -> AttentionMetadata:
        """Of a backend whose plan is the metadata, or of `auto`, which has taken such a one."""
        narrowed = cast(SparseBackend[Any], self._real).narrowed(self._planned(plan), chosen)
        metadata: AttentionMetadata = narrowed.inner if isinstance(narrowed, Chosen) else narrowed
        return metadata

    def prefix_tail(self, *_: object) -> Tensor:
        raise AssertionError("no tail in a prefill")


@torch.inference_mode()
def compile_steps(steps: Iterable[Run]) -> None:
    """Compile the kernels of `steps`, each of which can be recorded before anything ran. A terminal says so.

    Relaxed: what runs for the first time may load and allocate while it is recorded.
    """
    recorded = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="relaxed")

    def record() -> None:
        with recorded:
            for step in steps:
                step()

    with Console(stderr=True).status("compiling kernels"):
        aot_compile(record)
