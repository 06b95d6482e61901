"""What rounds of each shape cost on this machine: measured at start, kept for the next start of the same engine.

Times real rounds, with the engine's own launcher, on the null page: first with next to no context, by buckets of
rows; then of the largest bucket with much, which says what a token of context costs each row.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from treetop.checkpoints.fingerprint import fingerprint
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey, RoundLauncher
from treetop.engine.startup import probed_products
from treetop.engine.startup.plan import EnginePlan
from treetop.engine.startup.self_test import on_null_pages
from treetop.types.cache_files import cache_file, keep, kept
from treetop.types.costs import CatchUpCost, CostTable, RoundCost
from treetop.types.errors import CheckError, ConfigError
from treetop.types.layout import Layout, SpecShape
from treetop.types.sampling import SamplingMode

_VERSION = 6
"""Of what is measured, and how."""
_REPEATS = 3
"""Turns of all rounds, of which the fastest counts; one more before them warms up."""
_SHORT, _LONG = 16, 1024
"""Tokens of context."""


def cost_table(engine_plan: EnginePlan, runner: ModelRunner, launcher: RoundLauncher) -> CostTable:
    """The table of this engine: that of an earlier start on this machine, or measured now and kept.

    Ranks that share a model, or experts, take part together, and measure unless all have a table. Raises CheckError, at
    check level 1, for a table that was made for something else.
    """
    made_for = identity(engine_plan, runner)
    table = read(cost_file(made_for))
    if table is not None and not _covers(table, runner.layout):
        table = None
    if table is not None and runner.check_level >= 1:
        check_made_for(table, made_for)
    place = engine_plan.place
    if place.expert_ranks.minimum(place.parallel.minimum(int(table is not None))):
        assert table is not None
        return table
    table = measure(runner, launcher, made_for)
    write(cost_file(made_for), table)
    return table


def _covers(table: CostTable, layout: Layout) -> bool:
    """Whether all that is asked of a table is in it."""
    return set(layout.shapes) <= {each.shape for each in table.rounds} and (
        bool(table.catch_ups) or not layout.max_deferred
    )


def identity(engine_plan: EnginePlan, runner: ModelRunner) -> str:
    """Of all that costs depend on: models, libraries, what options make of them, and the machine: of GPUs the card, its
    driver and our kernels, so that any host of such a card may read what one has measured.
    """
    config, layout, place = engine_plan.config, runner.layout, engine_plan.place
    on_gpu = place.device.type == "cuda"
    cpu = f"cpu {os.cpu_count()} {torch.get_num_threads()} {os.uname().nodename}"
    device = probed_products.identity(place.device) if on_gpu else cpu
    folders = [each.folder for each in (engine_plan.target, engine_plan.draft) if each is not None]
    models = [None if each is None or place.dummy else fingerprint(each) for each in folders]
    words = (
        *(config.model if place.dummy else "", config.algorithm, *models, device),
        *(_VERSION, torch.__version__, place.dtype, runner.backend.name, config.graphs, place.compressed),
        *(config.tp_size, layout.shapes, layout.coarse_buckets, layout.page_size, layout.max_deferred),
        *(layout.max_context, config.check_level >= 2, config.kv_cache_dtype, config.fp8_draft_kv, place.activations),
    )
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]


def cost_file(made_for: str) -> Path:
    """Where a table is kept: in the user's cache folder."""
    return cache_file("round-costs", made_for)


def read(file: Path) -> CostTable | None:
    """None for a file that is not there or is none of ours, or whose numbers are no costs."""
    try:
        table = _table_of(kept(file))
        measured: list[RoundCost | CatchUpCost] = [*table.rounds, *table.catch_ups]
        positive = [float(number) for each in measured for number in (each.rows, each.seconds)]
    except (ValueError, LookupError, TypeError, OverflowError, ConfigError):
        return None
    costs = all(0 < number < math.inf for number in positive)
    costs = costs and all(0 <= each.seconds_per_token < math.inf for each in measured)
    return table if table.rounds and costs else None


def _table_of(held: dict[str, Any]) -> CostTable:
    """Raises what a value of another kind makes."""
    rounds = [
        RoundCost(
            int(each["rows"]), SpecShape(**each["shape"]), float(each["seconds"]), float(each["seconds_per_token"])
        )
        for each in held["rounds"]
    ]
    catch_ups = [
        CatchUpCost(int(each["rows"]), float(each["seconds"]), float(each["seconds_per_token"]))
        for each in held["catch_ups"]
    ]
    return CostTable(str(held["made_for"]), tuple(rounds), tuple(catch_ups))


def write(file: Path, table: CostTable) -> None:
    """Keep a table; see `cache_files.keep`."""
    keep(file, json.dumps(asdict(table)))


def check_made_for(table: CostTable, made_for: str) -> None:
    """Level 1: costs are this engine's."""
    if table.made_for != made_for:
        raise CheckError(f"round costs: those at hand are of another engine, {table.made_for}, not of {made_for}")


@torch.inference_mode()
def measure(runner: ModelRunner, launcher: RoundLauncher, made_for: str) -> CostTable:
    """Seconds of rounds of every shape and of catching up. Leaves state and null pages as they were."""
    layout = runner.layout
    long = min(_LONG, layout.max_committed)
    short = min(_SHORT, long)
    coarse = {
        shape: [rows for rows in layout.coarse_buckets if shape in layout.shapes_at(rows)] for shape in layout.shapes
    }
    keys = [RoundKey(rows, shape, SamplingMode.GREEDY) for shape in layout.shapes for rows in coarse[shape]]
    least_deferred = int(runner.buffers.rows.device.type == "cpu")  # elsewhere all columns are computed
    behind = [
        (RoundKey.of_catch_up(rows, least_deferred), RoundKey.of_catch_up(rows))
        for rows in layout.coarse_buckets
        if layout.max_deferred
    ]
    keys += dict.fromkeys(chain.from_iterable(behind))
    runs = [(key, short) for key in keys] + [
        (RoundKey(coarse[shape][-1], shape, SamplingMode.GREEDY), long) for shape in layout.shapes
    ]
    least = dict.fromkeys(runs, float("inf"))
    with on_null_pages(runner):
        for turn in range(1 + _REPEATS):  # a machine that is busy for a while is so for all
            for key, tokens in runs:
                seconds = _seconds(runner, launcher, key, tokens)
                least[key, tokens] = min(least[key, tokens], seconds) if turn else least[key, tokens]
    rounds = []
    for key in (key for key in keys if not key.catches_up):
        largest = coarse[key.shape][-1]
        full = RoundKey(largest, key.shape, SamplingMode.GREEDY)
        more = max(least[full, long] - least[full, short], 0.0) / max(long - short, 1)
        rounds.append(RoundCost(key.bucket, key.shape, least[key, short], more * key.bucket / largest))
    catch_ups = []
    for one, most in behind:
        more = max(least[most, short] - least[one, short], 0.0) / max(layout.max_deferred - 1, 1)
        catch_ups.append(CatchUpCost(one.bucket, least[one, short], more))
    return CostTable(made_for, smoothed(rounds), tuple(catch_ups))


def smoothed(rounds: Sequence[RoundCost]) -> tuple[RoundCost, ...]:
    """A round takes no longer than one with as many rows, levels, branches and nodes, and more of some."""

    def size(cost: RoundCost) -> tuple[int, ...]:
        return cost.rows, cost.shape.num_steps, cost.shape.topk, cost.shape.nodes_at(cost.rows)

    def holds(larger: RoundCost, cost: RoundCost) -> bool:
        return all(a >= b for a, b in zip(size(larger), size(cost), strict=True))

    least = [min(other.seconds for other in rounds if holds(other, each)) for each in rounds]
    return tuple(replace(each, seconds=seconds) for each, seconds in zip(rounds, least, strict=True))


def _seconds(runner: ModelRunner, launcher: RoundLauncher, key: RoundKey, tokens: int) -> float:
    """One run with so many tokens in each row."""
    state, layout, rows = runner.state, runner.layout, runner.buffers.rows[: key.bucket]
    rows.copy_(rows.new_tensor(range(key.bucket)))
    state.committed[: key.bucket] = tokens
    if state.deferred is not None:
        most = min(key.deferred or layout.max_deferred, tokens)
        state.deferred.count[: key.bucket] = most if key.catches_up else 0
    _wait(rows.device)
    clock = work_clock(rows.device)
    started_s = clock()
    launcher.launch(key, min(tokens + layout.commit_width, layout.max_committed))
    _wait(rows.device)
    return clock() - started_s


def work_clock(device: torch.device) -> Callable[[], float]:
    """By which rounds are timed: on a CPU the thread's own time, for others on a busy machine are no cost of a shape.

    A thread works or spins in all that it shares with its helpers. It waits for a GPU, which nobody else has.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
