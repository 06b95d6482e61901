"""Captured rounds: a CUDA graph for each bucket, shape and choice, replayed without a host sync.

A graph holds all phases, so that nothing stands between them and the last kernel of one overlaps the first of the next.
Only a round with constrained rows is two: the host says between them what may follow the nodes of their trees. So is
one with a prefill in its forward, which is launched between them, but for prompts in a batch of fixed size: that is in
the graph, whose key says how large.
All graphs share one memory pool and one stream: what passes between phases and rounds lives in `RoundBuffers`, outside
the pool, and nothing that outlives a replay is a view of it. The round with the most nodes is captured first, so that
all others fit into the memory it left in the pool; then the largest prefill step, of which little has logits.

At start prefill steps of all sizes are captured, and greedy rounds of the coarse buckets, and of all buckets where
shapes are chosen, for there each bucket has many; those with prompts in their forward of coarse buckets, which serve
them alone; and sampled rounds of coarse buckets while there is time. The others are when they are first asked for: that
costs one eager run and one capture of a round. Requests wait meanwhile, so nothing else is done then: a collection of
garbage may take longer than the round. Where PyTorch's operations draw, filters sort the vocabulary of every node,
memory that the pool would keep for good, and are a graph of their own.
"""

import gc
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, filterfalse, islice, pairwise, product
from typing import Protocol, cast

import torch
from rich.console import Console
from rich.progress import Progress

from treetop.attention.contract import HostPlanned, RoundExtents
from treetop.engine.graph_memory import GraphMemory
from treetop.engine.memory import memory_of
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import HostStep, RoundKey, parts_of, phases_of, run_phases
from treetop.kernels.garbage import no_collection
from treetop.types.layout import Layout
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode

Run = Callable[[], None]


class Graph(Protocol):
    """A recorded sequence of launches."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Recorder(Protocol):
    """Runs a function once for real, which compiles and sizes everything, then records it."""

    def record(self, run: Run) -> Graph: ...


class CudaRecorder:
    """Records on one stream and into one memory pool of its own."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """stream: of recorders before, for a library keeps memory for each; None for another."""
        self._pool, self.stream = torch.cuda.graph_pool_handle(), stream or torch.cuda.Stream()

    def record(self, run: Run) -> Graph:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            run()
        return graph


class CudaGraphs:
    """Captures on a batch of dummy rows, which leaves no trace in any state.

    seconds: what capturing took so far. prefill_seconds: of these, prefill steps alone.
    memory: what those at a start took; None before.
    """

    def __init__(
        self, runner: ModelRunner, recorder: Recorder | None = None, free: Callable[[], int] | None = None
    ) -> None:
        """free: measures the device's free bytes."""
        self._runner = runner
        self._free = free or (lambda: memory_of(runner.buffers.rows.device).free)
        self.memory: GraphMemory | None = None
        self._recorder = recorder or CudaRecorder()
        self._graphs: dict[RoundKey, tuple[Graph, ...]] = {}
        self.seconds = self.prefill_seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def release(self) -> None:
        """Give back what the graphs hold; libraries of collectives wait for that before they end."""
        for graph in chain.from_iterable(self._graphs.values()):
            graph.reset()
        self._graphs.clear()

    def launch(self, key: RoundKey, max_kv_len: int, host_step: HostStep | None = None) -> None:
        """Replay a round, captured if it is not yet. max_kv_len: the graphs hold for the largest there is."""
        assert max_kv_len <= self._runner.layout.max_committed
        first, *behind = self._captured(key)
        plan_host_extents(self._runner, key)
        first.replay()
        if host_step is not None:
            host_step()
        for graph in behind:
            graph.replay()

    def round(self, key: RoundKey) -> Run:
        """What replays a round that is not held, captured if it is not yet, without planning on the host."""
        (graph,) = self._captured(key)
        return graph.replay

    def phases(self, key: RoundKey) -> dict[Phase, Run]:
        """A round's phases in order, captured one by one, to be measured: they are not kept."""
        max_kv_len = self._runner.layout.max_committed
        with self._on_dummy_rows():
            graphs = {
                phase: self._recorder.record(partial(run, self._runner, key, max_kv_len))
                for phase, run in phases_of(self._runner, key).items()
            }
        return {phase: graph.replay for phase, graph in graphs.items()}

    @property
    def num_prefills(self) -> int:
        """Captured prefill steps, with drafts and without."""
        return sum(not _has_rows(key) for key in self._graphs)

    def capture_all(self) -> None:
        """Capture greedy rounds of each coarse bucket, and of every one where shapes are chosen; a progress bar shows
        on a terminal.

        The largest round, and the largest prefill step, are first and measured apart: they make the pool.
        """
        gc.collect()  # the graphs of an engine that is gone
        layout, free = self._runner.layout, [self._free()]
        early = {0, *(layout.buckets if len(layout.shapes) > 1 else layout.coarse_buckets)}  # 0 for prompts alone
        keys = [key for key in greedy_keys(layout) if key.bucket in early and _gains(layout, key)]
        largest = [*islice(filter(_has_rows, keys), 1), *islice(filterfalse(_has_rows, keys), 1)]
        for part in (largest, keys):
            self.capture(part)
            free.append(self._free())
        first, others = (max(before - after, 0) for before, after in pairwise(free))
        self.memory = GraphMemory(_in_rounds(self._graphs), num_rounds(self._runner), first, others, free[-1])

    def capture_sampled(self, seconds: float) -> None:
        """Capture sampled rounds of the coarse buckets for so long, then those with penalties, of each those with few
        nodes first. Called behind `capture_all`, of which this is the rest.

        Ranks that run them together capture as many.
        """
        assert self.memory is not None
        runner, until_s = self._runner, time.perf_counter() + seconds
        small = [key for key in reversed(greedy_keys(runner.layout)) if key.bucket in runner.layout.coarse_buckets]
        small = [key for key in small if not (key.mixed or key.catches_up) and _gains(runner.layout, key)]
        drawn = [replace(key, choice=SamplingMode.SAMPLE) for key in small]
        if SamplingMode.PROCESS in runner.state.choices:
            drawn += [replace(key, choice=SamplingMode.PROCESS) for key in small if not key.prompts]
        for key in drawn:
            in_time = runner.ops.parallel.minimum(int(time.perf_counter() < until_s))
            if not runner.ops.expert_ranks.minimum(in_time):
                break
            self.capture(self._alike(key))
        more = max(self.memory.free - (free := self._free()), 0)
        self.memory = replace(
            self.memory, captured=_in_rounds(self._graphs), others=self.memory.others + more, free=free
        )

    def capture(self, keys: Sequence[RoundKey]) -> None:
        """Capture those of the keys that are not yet, in their order."""
        runner, max_kv_len = self._runner, self._runner.layout.max_committed
        missing = [
            place
            for place in dict.fromkeys(_place(runner.ops.filters_apart, key) for key in keys)
            if place not in self._graphs
        ]
        if not missing:
            return
        hidden = len(missing) == 1 or not sys.stderr.isatty()
        with (
            self._on_dummy_rows(),
            Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress,
        ):
            for place in progress.track(missing, description="capturing graphs"):
                began_s = time.perf_counter()
                if place.prompts:
                    runner.buffers.prompts.clear(place.prompts, place.block, runner.layout.dummy_row)
                if place.mixed:  # what its EXTEND reads is written between its graphs
                    run_phases(runner, replace(place, mixed=False), max_kv_len)
                self._graphs[place] = tuple(
                    self._recorder.record(partial(run, runner, place, max_kv_len)) for run in parts_of(runner, place)
                )
                self.prefill_seconds += 0.0 if _has_rows(place) else time.perf_counter() - began_s

    def _captured(self, key: RoundKey) -> tuple[Graph, ...]:
        place = _place(self._runner.ops.filters_apart, key)
        if place not in self._graphs:
            self.capture(self._alike(key))
        return self._graphs[place]

    def _alike(self, key: RoundKey) -> list[RoundKey]:
        """What is captured with a round. Capturing runs it, and ranks that share experts run rounds together.

        They agree on how tokens are chosen, not on who is constrained: so each captures both forms in one step.
        """
        shared, constrains = self._runner.ops.expert_ranks.size > 1, self._runner.state.masks is not None
        if not (shared and constrains and key.choice.processes) or key.catches_up:
            return [key]
        return [replace(key, grammar_masked=False), replace(key, grammar_masked=True)]

    @contextmanager
    def _on_dummy_rows(self) -> Iterator[None]:
        """The row list is all dummies inside, and prompts may be cleared; the time counts as capturing.

        Nothing is collected: a graph of an engine that is gone, freed while another is captured, spoils that.
        """
        buffers, dummy_row = self._runner.buffers, self._runner.layout.dummy_row
        started_s, inputs = time.perf_counter(), (buffers.row_lists, buffers.prompts.inputs)
        before = [each.clone() for each in inputs]
        buffers.row_lists.fill_(dummy_row)
        try:
            with no_collection(first=False):
                yield
        finally:
            for each, held in zip(inputs, before, strict=True):
                each.copy_(held)
            self.seconds += time.perf_counter() - started_s


def plan_host_extents(runner: ModelRunner, key: RoundKey) -> None:
    """For a backend that plans on the host: read the lengths of a round about to run, which waits for the device."""
    if runner.backend.capabilities.needs_host_extents:
        shape = key.shape
        queries = {
            Phase.DRAFT: shape.topk,
            Phase.VERIFY: shape.num_draft_tokens,
            Phase.EXTEND: shape.commit_width,
        }
        round = RoundExtents(runner.buffers.rows[: key.bucket], runner.state.committed, queries)
        cast(HostPlanned, runner.backend).plan_round(round)


def greedy_keys(layout: Layout) -> list[RoundKey]:
    """Greedy rounds of every bucket and shape, also with prompts in their forward, and prompts alone, those with the
    most tokens first; then mixed ones that are launched in parts, and what catches up, if any do.
    """
    buckets = layout.buckets[::-1]
    rounds = [RoundKey(bucket, shape, SamplingMode.GREEDY) for bucket in buckets for shape in layout.shapes_at(bucket)]
    with_prompts = [
        replace(key, prompts=size, block=layout.prompt_block)
        for key in rounds
        if key.bucket in layout.coarse_buckets
        for size in layout.prompt_sizes
    ]
    alone = (False, True) if layout.max_deferred else (False,)  # rows may lose their draft
    with_prompts += [
        RoundKey.of_prompts(size, block, SamplingMode.GREEDY, undrafted)
        for (size, block), undrafted in product(layout.prefill_sizes, alone)
    ]
    mixed = [replace(key, mixed=True) for key in rounds if layout.mixed]
    rounds += with_prompts
    rounds.sort(key=lambda key: key.shape.nodes_at(key.bucket) + key.prompts, reverse=True)
    rounds += mixed
    return rounds + [RoundKey.of_catch_up(bucket) for bucket in buckets if layout.max_deferred]


def _has_rows(key: RoundKey) -> bool:
    """Else it is prompts alone."""
    return key.bucket > 0


def _gains(layout: Layout, key: RoundKey) -> bool:
    """Whether a round is worth having ready: with prompts in its forward one of many nodes is not."""
    return not (key.prompts and _has_rows(key)) or layout.few_nodes_beside_prompts(key.shape, key.bucket)


def num_rounds(runner: ModelRunner) -> int:
    """Most rounds that can come to be captured on this device, sampled and held ones included."""
    return num_captured(runner.layout, runner.state.choices, runner.state.masks is not None, runner.ops.filters_apart)


def num_captured(layout: Layout, choices: Sequence[SamplingMode], holds: bool, filters_apart: bool) -> int:
    """The same of a layout. holds: trees of some rows may be constrained."""
    made = [replace(key, choice=choice) for key, choice in product(greedy_keys(layout), choices)]
    made = [key for key in made if not (key.prompts and key.choice.processes)]
    if holds:
        made += [
            replace(key, grammar_masked=True)
            for key in made
            if key.choice.processes and not (key.catches_up or key.mixed)
        ]
    return _in_rounds({_place(filters_apart, key) for key in made})


def _in_rounds(places: Collection[RoundKey]) -> int:
    """How many rounds these are to a driver's memory: prompts alone are one phase, a third of one, with and without a
    draft together: engines that have both take a third of what is set aside."""
    num_rounds = sum(map(_has_rows, places))
    prompts = sum(not _has_rows(place) and not place.undrafted for place in places)
    return num_rounds + -(-prompts // 3)


def _place(filters_apart: bool, key: RoundKey) -> RoundKey:
    """Where a round's graph is kept: rounds that are the same work share it."""
    if key.undrafted and _has_rows(key):  # it is data
        key = replace(key, undrafted=False)
    if key.catches_up:
        return RoundKey.of_catch_up(key.bucket)
    if key.mixed:
        return RoundKey.of_mixed(key.bucket, key.shape)
    if not _has_rows(key) and key.choice is SamplingMode.GREEDY:  # one draw for each prompt costs next to nothing
        return replace(key, choice=SamplingMode.SAMPLE)
    alike = key.choice is SamplingMode.FILTER and not filters_apart
    return replace(key, choice=SamplingMode.SAMPLE) if alike else key
