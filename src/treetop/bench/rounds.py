"""Milliseconds a decode round: a grid of shapes, batches and prompt lengths, each against its floor.

The wall time of a round is what a caller of `LLM.stream` sees between two rounds of a full batch: scheduler, host work
and any overlap included. The device's own time comes from running rounds on a posed batch, and the phases' from running
them one after another there, between CUDA events on a GPU and by the clock on a CPU.
"""

import gc
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from treetop.bench.columns import Columns
from treetop.bench.equality import equal_outputs
from treetop.bench.experts import distinct_experts
from treetop.bench.machine import Machine, measure_machine, synchronize
from treetop.bench.prompts import prompt_ids
from treetop.bench.roofline import Case, round_floor, saved_bytes
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device, compute_dtype
from treetop.engine.cuda_graphs import CudaGraphs, plan_host_extents
from treetop.engine.rounds import RoundKey, phases_of
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.weight_copies import packing
from treetop.llm import LLM, RequestOutput, TextDelta
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode, SamplingParams

_WARM_UP = {"cpu": 5, "cuda": 25}
"""Rounds that are not timed: the clocks of a GPU at its power limit stay low for some 0.2 s after long prompts."""
_CHECKED_TOKENS = 32
CONTEXT_STEP = 1024
"""Contexts are rounded up to these steps, so that runs of different grids are alike."""
_SPARE = 4
"""Rounds that may be in flight when the last one that counts ends."""
_MIN_CHUNK, _MAX_CHUNK = 512, 8192


@dataclass(frozen=True, slots=True)
class RoundGrid:
    """What is measured: every shape with every batch and every prompt length (tokens).

    rounds, warm_up: timed of each, and before that not timed.
    prefill_size: what was asked of a prefill step, if anything.
    """

    shapes: tuple[SpecShape, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    rounds: int
    warm_up: int = _WARM_UP["cpu"]
    prefill_size: int | None = None

    def most_tokens(self, shape: SpecShape) -> int:
        """Tokens that a request comes to hold: its prompt, and rounds: timed, before them, and while others prefill."""
        waiting = -(-max(self.batches) * max(self.lengths) // self.chunk) * 2  # prompts may leave half of a step empty
        return max(self.lengths) + 1 + (self.warm_up + self.rounds + waiting + _SPARE) * shape.commit_width

    @property
    def chunk(self) -> int:
        """Prompt tokens of a prefill step: many, since rows that wait for others' prompts go on and grow."""
        return self.prefill_size or min(max(max(self.lengths) * max(self.batches), _MIN_CHUNK), _MAX_CHUNK)


_COLUMNS = Columns.of(
    ("S", 3), ("k", 4), ("T", 4), ("B", 5), ("input", 7), ("wall ms", 10), ("low .. high", 19), ("device ms", 11),
    ("draft + verify + extend", 26), ("floor", 9), ("wall/floor", 12), ("device/floor", 14), ("wall/read", 11),
    ("tokens/s", 10), ("accept", 8), ("experts", 9),
)  # fmt: skip
"""Titles and widths of a row of figures."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One case, in milliseconds a round.

    wall_ms: median, with low and high.
    device_ms: of the device alone, median.
    phase_ms: of each phase by itself; of several ranks neither is measured, and the floor is each one's share.
    floor_ms: of the round.
    read_floor_ms: of the bytes really read, less where weights lie in 12 or 13 bits.
    start_s: making the engine, capture included.
    accept_length: mean tokens a row-round gave.
    distinct_experts: that a verify reads, mean of the layers that have any.
    """

    shape: tuple[int, int, int]
    batch: int
    length: int
    wall_ms: float
    wall_ms_low: float
    wall_ms_high: float
    device_ms: float | None
    phase_ms: dict[str, float]
    floor_ms: float
    wall_over_floor: float
    device_over_floor: float | None
    read_floor_ms: float
    wall_over_read_floor: float
    tokens_per_second: float
    accept_length: float
    rounds: int
    start_s: float
    distinct_experts: float | None = None

    HEADER = _COLUMNS.head

    def row(self) -> str:
        parts = (self.phase_ms.get(phase, 0.0) for phase in (Phase.DRAFT, Phase.VERIFY, Phase.EXTEND))
        texts = (
            *map(str, (*self.shape, self.batch, self.length)),
            f"{self.wall_ms:.3f}",
            f"{self.wall_ms_low:.2f} .. {self.wall_ms_high:.2f}",
            "-" if self.device_ms is None else f"{self.device_ms:.3f}",
            " + ".join(f"{ms:.3f}" for ms in parts),
            f"{self.floor_ms:.3f}",
            f"{self.wall_over_floor:.2f}x",
            "-" if self.device_over_floor is None else f"{self.device_over_floor:.2f}x",
            f"{self.wall_over_read_floor:.2f}x",
            f"{self.tokens_per_second:.0f}",
            f"{self.accept_length:.2f}",
            "-" if self.distinct_experts is None else f"{self.distinct_experts:.1f}",
        )
        return _COLUMNS.row(texts)


@dataclass(frozen=True, slots=True)
class RoundsReport:
    """A grid's figures. checked: what was compared before timing, or why nothing was."""

    machine: Machine
    checked: str
    figures: tuple[Figures, ...]

    def as_json(self) -> dict[str, Any]:
        return {"machine": asdict(self.machine), "checked": self.checked, "cases": [asdict(f) for f in self.figures]}


_COMPARED = "outputs of all shapes and of plain decoding are compared before a shape is timed"


def warm_up(device: torch.device) -> int:
    """Rounds that are not timed on `device`."""
    return _WARM_UP[device.type]


def run_grid(model: str | None, options: dict[str, Any], grid: RoundGrid, tell: Callable[[str], None]) -> RoundsReport:
    """Measure a grid, an engine a shape. tell: gets each line of text as it is known.

    With real weights each shape's greedy output is first compared with that of the first shape, or of plain decoding if
    that is not among them. Raises UserError for options that cannot work, EngineError for outputs that differ.
    """
    longest = max(map(longest_path, grid.shapes))
    asked = options.get("simulate_accept_length")
    if asked is not None and not 1 <= asked <= longest:
        raise ConfigError(f"--simulate-accept-length {asked}: the longest path of these shapes has {longest} tokens")
    configs = [engine_config(model, options, shape, grid) for shape in grid.shapes]
    for config in configs:
        plan_engine(config)  # refuses what an engine would, before the machine is measured
    device = compute_device(configs[0].device)
    machine = measure_machine(device, compute_dtype(configs[0].dtype, device))
    forced, dummy = options.get("simulate_accept_length"), configs[0].load_format == "dummy"
    why = "random weights" if dummy else f"forced accept length {forced:g}" if forced is not None else None
    why = "acceptance is simulated" if why is None and options.get("simulate_acceptance") is not None else why
    if why is None and grid.shapes == (PLAIN,):
        why = "plain decoding alone"
    tell(machine.sentence())
    tell(_COMPARED if why is None else f"outputs not checked: {why}")
    tell(Figures.HEADER)
    figures: list[Figures] = []
    expected: list[RequestOutput] = []
    if why is None and PLAIN not in grid.shapes:
        expected = _greedy(LLM(**asdict(engine_config(model, options, PLAIN, grid))), grid)
        gc.collect()  # an engine's memory, before the next one takes its share
    found: list[str] = []
    for config in configs:
        started_s = time.perf_counter()
        llm = LLM(**asdict(config))
        start_s = time.perf_counter() - started_s
        if why is None:
            outputs = _greedy(llm, grid)
            if expected:
                found.append(_compare(llm, expected, outputs))
            expected = expected or outputs
        for length in grid.lengths:
            for batch in grid.batches:
                figures.append(measure(llm, batch, length, grid.rounds, machine, start_s))
                tell(figures[-1].row())
        del llm
        gc.collect()
    checked = "; ".join(dict.fromkeys(found)) if why is None else f"outputs not checked: {why}"
    return RoundsReport(machine, checked, tuple(figures))


def engine_config(model: str | None, options: dict[str, Any], shape: SpecShape, grid: RoundGrid) -> EngineConfig:
    """The engine of one shape: rows and context as the grid needs them, unless they were given. Raises ConfigError.

    Prompts come again and again, so there is no prefix cache: a request that hits it would take up its rounds earlier.
    Prefill steps are as large while requests decode: the first rows would grow far beyond their prompts before the
    last one joins.
    """
    need = grid.most_tokens(shape)
    rows: dict[str, Any] = {
        "max_running_requests": max(grid.batches),
        "context_length": up_to_step(need),
        "chunked_prefill_size": grid.chunk,
        "prefill_tokens_per_round": grid.chunk,
        **options,
        "speculative_policy": "fixed",
        "disable_radix_cache": True,
    }
    base = EngineConfig.of(model, **plain_options(rows))
    positions = target_spec(resolve_folder(base.model)).config.max_positions
    if need > min(options.get("context_length", positions), positions):
        raise ConfigError(
            f"prompts of {max(grid.lengths)} tokens and the rounds after them need a context of {need}, have"
            f" {min(options.get('context_length', positions), positions)}; lower --inputs, --batches or --rounds"
        )
    rows["context_length"] = min(rows["context_length"], positions)
    if max(grid.batches) > rows["max_running_requests"]:
        raise ConfigError(
            f"a batch of {max(grid.batches)} exceeds --max-running-requests {rows['max_running_requests']}"
        )
    forced = options.get("simulate_accept_length")
    if shape == PLAIN:
        return EngineConfig.of(model, **plain_options(rows))
    rows |= {
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
        "simulate_accept_length": None if forced is None else min(forced, longest_path(shape)),
    }
    config = EngineConfig.of(model, **rows)
    if not config.speculates:
        raise ConfigError(f"the tree {shape} needs --speculative-draft-model-path")
    return config


def longest_path(shape: SpecShape) -> int:
    """Most tokens that a round of this shape can give a row."""
    return min(shape.commit_width, shape.num_draft_tokens)


def up_to_step(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the engine that decodes the same plainly: no draft, hence nothing to force."""
    own = (
        "draft",
        "speculative_algorithm",
        "speculative_calibration_dir",
        "speculative_shapes",
        "simulate_accept_length",
        "simulate_acceptance",
    )
    alone = {"speculative_calibration": "off", "speculative_policy": "fixed"}
    return {**options, **dict.fromkeys(own), **alone}


def measure(llm: LLM, batch: int, length: int, rounds: int, machine: Machine, start_s: float) -> Figures:
    """Rounds of `batch` rows whose prompts have `length` tokens."""
    wall, accept_length = wall_times_ms(llm, prompt_ids(llm, batch, length), rounds)
    ranks = llm.config.tp_size
    alone = ranks == 1  # a posed batch is of one rank only
    phases = phase_times_ms(llm, batch, length, rounds) if alone else {}
    shape = llm.config.shape
    size, config = llm.engine.dtype.itemsize, llm.config
    case = Case(shape, batch, length, size, config.fp8_kv, packing(config), config.fp8_draft_kv)
    runner = llm.engine.runner
    mine = saved_bytes(runner.target, runner.drafter, llm.engine.draft, shape, llm.engine.layout.bucket_for(batch))
    saved = {phase: ranks * less for phase, less in mine.items()}
    distinct = None
    if alone:
        pose(llm, batch, length)
        distinct = distinct_experts(runner, greedy_key(llm, batch), length)
    floor_of = partial(round_floor, llm.engine.target, llm.engine.draft, case, machine, distinct=distinct)
    floor_ms, read_floor_ms = (1e3 * sum(floor.values()) / ranks for floor in (floor_of(), floor_of(saved=saved)))
    wall_ms = statistics.median(wall)
    device_ms = statistics.median(device_times_ms(llm, batch, length, rounds)) if alone else None
    return Figures(
        shape=(shape.num_steps, shape.topk, shape.num_draft_tokens),
        batch=batch,
        length=length,
        wall_ms=wall_ms,
        wall_ms_low=min(wall),
        wall_ms_high=max(wall),
        device_ms=device_ms,
        phase_ms={str(phase): statistics.median(times) for phase, times in phases.items()},
        floor_ms=floor_ms,
        wall_over_floor=wall_ms / floor_ms,
        device_over_floor=None if device_ms is None else device_ms / floor_ms,
        read_floor_ms=read_floor_ms,
        wall_over_read_floor=wall_ms / read_floor_ms,
        tokens_per_second=1e3 * batch * accept_length / wall_ms,
        accept_length=accept_length,
        rounds=len(wall),
        start_s=start_s,
        distinct_experts=None if distinct is None else statistics.mean(distinct),
    )


def wall_times_ms(llm: LLM, prompts: list[list[int]], rounds: int) -> tuple[list[float], float]:
    """Times between rounds in which every prompt took part, and the mean tokens that a row got from one of them."""
    params = SamplingParams(max_tokens=llm.engine.layout.max_context, ignore_eos=True)
    skipped = warm_up(llm.engine.runner.buffers.rows.device)
    begun: set[int] = set()
    stamps: list[float] = []
    emitted = 0
    stream = cast(Generator[TextDelta, None, None], llm.stream(prompts, params))
    for delta in stream:
        if delta.output is not None:
            raise EngineError(f"a request of the benchmark ended early: {delta.output.error or 'its context is full'}")
        emitted += len(delta.token_ids)
        if delta.index == 0 and len(begun) == len(prompts):
            stamps.append(time.perf_counter())
            if len(stamps) == 1 + skipped:
                emitted = 0  # from one delta of the first prompt to another every row gets a delta a round
            if len(stamps) == 1 + skipped + rounds:
                break
        begun.add(delta.index)
    stream.close()
    times = [1e3 * (b - a) for a, b in pairwise(stamps)]
    return times[skipped:], emitted / (rounds * len(prompts))


@torch.inference_mode()
def device_times_ms(llm: LLM, batch: int, length: int, rounds: int, shape: SpecShape | None = None) -> list[float]:
    """Times of whole rounds on a batch of rows with `length` committed tokens. No request may be alive.

    shape: one of the engine's; None for its own.

    Of captured rounds those of their graph, which overlaps the phases a little; else of the phases one after another.
    """
    launcher, key = llm.engine.launcher, greedy_key(llm, batch, shape)
    if isinstance(launcher, CudaGraphs):
        return _posed_times_ms(llm, key, batch, length, rounds, [launcher.round(key)])[0]
    phases = phase_times_ms(llm, batch, length, rounds, shape)
    return [sum(times) for times in zip(*phases.values(), strict=True)]


@torch.inference_mode()
def phase_times_ms(
    llm: LLM, batch: int, length: int, rounds: int, shape: SpecShape | None = None
) -> dict[Phase, list[float]]:
    """Each phase's times, as `device_times_ms`; of captured rounds each is a graph of its own."""
    launcher, runner, key = llm.engine.launcher, llm.engine.runner, greedy_key(llm, batch, shape)
    if isinstance(launcher, CudaGraphs):
        runs = launcher.phases(key)
    else:
        runs = {phase: partial(run, runner, key, length) for phase, run in phases_of(runner, key).items()}
    times = _posed_times_ms(llm, key, batch, length, rounds, list(runs.values()))
    return dict(zip(runs, times, strict=True))


def greedy_key(llm: LLM, batch: int, shape: SpecShape | None = None) -> RoundKey:
    return RoundKey(llm.engine.layout.bucket_for(batch), shape or llm.config.shape, SamplingMode.GREEDY)


def _posed_times_ms(
    llm: LLM, key: RoundKey, batch: int, length: int, rounds: int, runs: list[Callable[[], None]]
) -> list[list[float]]:
    """Times of each run, one after another, `rounds` times over."""
    runner = llm.engine.runner
    device = runner.buffers.rows.device
    times: list[list[float]] = [[] for _ in runs]
    skipped = warm_up(device)
    for index in range(skipped + rounds):
        pose(llm, batch, length)
        if isinstance(llm.engine.launcher, CudaGraphs):
            plan_host_extents(runner, key)
        synchronize(device)
        marks = [_mark(device)]
        for run in runs:
            run()
            marks.append(_mark(device))
        synchronize(device)
        if index >= skipped:
            for each, (begin, end) in zip(times, pairwise(marks), strict=True):
                each.append(_between_ms(begin, end))
    runner.probes.raise_if_fired()
    return times


def pose(llm: LLM, batch: int, length: int) -> None:
    """Rows 0 .. batch - 1 with `length` committed tokens, which the draft has too, and pages all over the pools."""
    layout, runner = llm.engine.layout, llm.engine.runner
    rows = runner.buffers.row_lists
    rows.fill_(layout.dummy_row)
    rows[:, :batch] = torch.arange(batch, device=rows.device)
    runner.state.committed[:batch] = length
    if runner.state.deferred is not None:
        runner.state.deferred.count[:batch] = 0
    for name, table in runner.state.page_tables.items():
        cells = torch.arange(batch * layout.page_columns, device=rows.device) % (layout.num_pages[name] - 1)
        table.data[:batch] = (1 + cells).view(batch, -1).to(table.data.dtype)


def _mark(device: torch.device) -> Any:
    """Now: an event of the device's stream, or the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))


def _greedy(llm: LLM, grid: RoundGrid) -> list[RequestOutput]:
    """What this shape makes of a prompt or two."""
    prompts = prompt_ids(llm, min(2, max(grid.batches)), min(grid.lengths))
    return llm.generate(prompts, SamplingParams(max_tokens=_CHECKED_TOKENS, ignore_eos=True))


def _compare(llm: LLM, expected: list[RequestOutput], outputs: list[RequestOutput]) -> str:
    """How this shape's outputs compare with the expected ones. Raises EngineError if they differ and must not."""
    equality = equal_outputs(llm, expected, outputs)
    if not equality.ok:
        raise EngineError(f"{llm.config.shape}: {equality.sentence()}")
    return equality.sentence()
