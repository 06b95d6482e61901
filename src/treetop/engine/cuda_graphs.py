"""Captured rounds: a CUDA graph for each phase of each bucket and shape, replayed back to back without a host sync.

All graphs share one memory pool and one stream: what passes between phases lives in `RoundBuffers`, outside the pool,
and nothing that outlives a replay is a view of it. The biggest bucket is captured first, so that the smaller ones fit
into the memory it left in the pool.

Greedy rounds are captured at start. Of a sampled round only VERIFY is another graph, for no other phase reads the
choice, and that one is captured when it is first asked for: it costs one eager run and one capture of a verify, some
tens of milliseconds for an 8B model, for which an engine that never samples has no use. Where PyTorch's operations
draw, filters sort the vocabulary of every node, memory that the pool would keep for good, and are a graph of their own.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Protocol, cast

import torch
from rich.console import Console
from rich.progress import Progress

from treetop.attention.contract import HostPlanned, RoundExtents
from treetop.engine.device import Device
from treetop.engine.rounds import RoundKey, phases_of
from treetop.types.phase import Phase
from treetop.types.sampling import Choice

CHOOSING = frozenset({Phase.VERIFY})
"""Phases that read `RoundKey.choice`; the others are the same graph for every choice."""

Run = Callable[[], None]


class Graph(Protocol):
    """A recorded sequence of launches."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Runs a function once for real, which compiles and sizes everything, then records it."""

    def record(self, run: Run) -> Graph: ...


class CudaRecorder:
    """Records on one stream of its own and into one memory pool."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, run: Run) -> Graph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph


class CudaGraphs:
    """Captures on a batch of dummy rows, which leaves no trace in any state.

    seconds: what capturing took so far.
    """

    def __init__(self, device: Device, recorder: Recorder | None = None) -> None:
        self._device = device
        self._recorder = recorder or CudaRecorder()
        self._graphs: dict[tuple[Phase, RoundKey], Graph] = {}
        self._rounds: dict[RoundKey, dict[Phase, Run]] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, key: RoundKey, bound: int) -> None:
        assert bound <= self._device.layout.max_committed
        runs = self.phases(key, bound)
        plan_host_extents(self._device, key)
        for run in runs.values():
            run()

    def phases(self, key: RoundKey, bound: int) -> dict[Phase, Run]:
        """A round's phases in order, captured if they are not yet. bound: the graphs hold for the largest there is."""
        assert bound <= self._device.layout.max_committed
        runs = self._rounds.get(key)
        if runs is None:
            self.capture([key])
            runs = {phase: self._graphs[_place(self._device, phase, key)].replay for phase in phases_of(self._device)}
            self._rounds[key] = runs
        return runs

    def capture_all(self) -> None:
        """Capture every bucket and shape for greedy rounds; a progress bar shows on a terminal."""
        self.capture(greedy_keys(self._device))

    def capture(self, keys: Sequence[RoundKey]) -> None:
        """Capture what these keys lack, in their order."""
        device, bound = self._device, self._device.layout.max_committed
        if all(_place(device, phase, key) in self._graphs for key in keys for phase in phases_of(device)):
            return
        started_s, rows = time.perf_counter(), device.buffers.rows.clone()
        device.buffers.rows.fill_(device.layout.dummy_row)
        console = Console(stderr=True)
        hidden = len(keys) == 1 or not sys.stderr.isatty()
        with _no_collection(), Progress(console=console, transient=True, disable=hidden) as progress:
            for key in progress.track(keys, description="capturing graphs"):
                for phase, function in phases_of(device).items():
                    place = _place(device, phase, key)
                    if place not in self._graphs:
                        self._graphs[place] = self._recorder.record(partial(function, device, key, bound))
        device.buffers.rows.copy_(rows)
        self.seconds += time.perf_counter() - started_s


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: a graph of an engine that is gone, freed while another is captured, spoils that."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_host_extents(device: Device, key: RoundKey) -> None:
    """For a backend that plans on the host: read the lengths of a round about to run, which waits for the device."""
    if device.backend.capabilities.needs_host_extents:
        shape = key.shape
        queries = {
            Phase.DRAFT: shape.topk,
            Phase.VERIFY: shape.num_draft_tokens,
            Phase.EXTEND: shape.commit_width,
        }
        round = RoundExtents(device.buffers.rows[: key.bucket], device.state.committed, queries)
        cast(HostPlanned, device.backend).plan_round(round)


def greedy_keys(device: Device) -> list[RoundKey]:
    """What is captured at start: the biggest bucket first, in it the widest tree first."""
    shapes = sorted(device.layout.shapes, key=lambda shape: -shape.num_draft_tokens)
    return [RoundKey(bucket, shape, Choice.GREEDY) for bucket, shape in product(device.layout.buckets[::-1], shapes)]


def num_graphs(device: Device) -> int:
    """Most graphs that this device can come to hold, sampled rounds included."""
    places = {
        _place(device, phase, replace(key, choice=choice))
        for key, phase, choice in product(greedy_keys(device), phases_of(device), Choice)
    }
    return len(places)


def _place(device: Device, phase: Phase, key: RoundKey) -> tuple[Phase, RoundKey]:
    """Where a phase's graph is kept: rounds that are the same work share it."""
    choice = key.choice if phase in CHOOSING else Choice.GREEDY
    if choice is Choice.FILTER and not device.round_ops.filters_apart:
        choice = Choice.SAMPLE
    return phase, replace(key, choice=choice)
