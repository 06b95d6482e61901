"""Which launch of the Triton attention kernel is fastest for a class of calls: tried one by one, checked, timed."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from attention_cases import DEVICE, TOLERANCE, Case, Shape, build, error_of, graph_of, num_layers_for, times_us

from treetop.kernels.attention import PagedKeys, Sight, TailKeys, paged_attention
from treetop.kernels.launch import Launch, entry_of, launch_by_formula
from treetop.kernels.triton_guard import gpu_traits, power_of_two

WORTH = 0.97
"""A launch replaces the formula's only if it takes less than this share of the formula's time: the rest is noise."""


def shapes_to_tune() -> list[Shape]:
    """Decoding and trees of Llama-3.1-8B's heads, at the lengths that captured rounds are made for, and chunks."""
    sizes = [(rows, n) for rows in (1, 8, 32) for n in (1, 4, 8, 16)] + [(1, 64), (8, 64)]
    tree = [Shape("tree", rows, n, length, n) for rows, n in sizes for length in (1024, 2048, 4096)]
    long = [Shape("tree", 1, n, 16384, n) for n in (1, 8, 16)]
    return [*tree, *long, *[Shape("prefill", 1, 512, length, 0) for length in (512, 2048, 8192)]]


def candidates(shape: Shape) -> Iterator[Launch]:
    """Around the formula's launch: block sizes, warps and stages, each with a few numbers of splits."""
    base = launch_by_formula(shape.call, gpu_traits(DEVICE))
    lanes = max(16, power_of_two(shape.n * shape.heads // shape.kv_heads))
    block_ms = sorted({min(lanes, 64), max(16, min(lanes, 64) // 2), min(lanes, 128)})
    for block_m, block_n, warps, stages in itertools.product(block_ms, (32, 64, 128), (4, 8), (2, 3, 4)):
        if (warps == 8 and block_m < 64) or (block_n == 128 and stages == 4) or (block_m == 128 and warps == 4):
            continue  # too little work a warp, or more shared memory or registers than there are
        programs = shape.rows * shape.kv_heads * -(-shape.n * shape.heads // shape.kv_heads // block_m)
        most = max(1, min(-(-shape.capacity // block_n), 64))
        counts = {1, base.splits, base.splits * 2, 132 // programs, 264 // programs, 528 // programs}
        for splits in sorted({min(max(count, 1), most) for count in counts}):
            yield Launch(block_m, block_n, splits, warps, stages, base.overlap)


def time_launch(case: Case, launch: Launch, replays: int) -> float:
    """Median us of a call in a replayed graph; infinite where the result is wrong or the launch does not fit."""
    shape, view = case.shape, case.view
    sight = Sight(case.queries.positions, shape.window, shape.kind == "prefill")
    tail = None if sight.causal else TailKeys(case.tail.data, case.queries.tail_positions, case.queries.mask)
    keys = [
        PagedKeys(layer.data, view.table.data, view.rows, view.extent, view.bound, view.page_size)
        for layer in case.layers
    ]
    last: list[torch.Tensor] = []

    def work() -> None:
        for one in keys:
            last[:] = [paged_attention(case.q, one, sight, tail, shape.head_dim**-0.5, launch)[0]]

    try:
        work()
    except Exception:  # out of shared memory or registers: Triton's errors have no common class
        return float("inf")
    if not error_of(case, last[0], case.layers[-1]) <= TOLERANCE[shape.dtype]:
        return float("inf")
    times = sorted(times_us(graph_of(work).replay, replays))
    return times[len(times) // 2] / len(keys)


def tune(shapes: list[Shape], end: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Entries of the launch table for `shapes` begun before `end`: the fastest launch, its time, and the formula's."""
    table: dict[str, Any] = {}
    for shape in shapes:
        if time.monotonic() > end:
            say(f"time is up after {len(table)} of {len(shapes)} shapes")
            break
        case = build(shape, min(num_layers_for(shape), 16))
        formula = launch_by_formula(shape.call, gpu_traits(DEVICE))
        timed = {launch: time_launch(case, launch, 7) for launch in candidates(shape)}
        finalists = [formula, *sorted(timed, key=lambda launch: timed[launch])[:4]]
        again = {launch: time_launch(case, launch, 30) for launch in finalists}
        best = min(again, key=lambda launch: again[launch])
        if again[best] > WORTH * again[formula]:
            best = formula
        say(f"{shape.call.shape_class}: formula {again[formula]:.1f} us, best {again[best]:.1f} us {asdict(best)}")
        times = {"us": round(again[best], 2), "formula_us": round(again[formula], 2)}
        table[shape.call.shape_class] = {**entry_of(best), **times}
        del case
    return table
