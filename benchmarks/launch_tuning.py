"""Which launch of the Triton attention kernel is fastest for a class of calls: tried one by one, checked, timed.

In two steps: blocks and warps at the usual stages and splits; then stages and splits of the best three.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch
from attention_cases import TOLERANCE, Case, build, error_of, num_layers_for, times_in_a_round
from attention_shapes import Shape
from frame import DEVICE, compile_on_all_cores, tell

from treetop.kernels.attention.attention import paged_attention
from treetop.kernels.attention.attention_config import Launch, entry_of, launch_by_formula
from treetop.kernels.attention.stream_k import make_arrivals
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits, power_of_two

WORTH = 0.97
"""A launch replaces the formula's only if it takes less than this share of the formula's time: the rest is noise."""
LENGTHS = {2048: (1024,), 8192: (2048,), 131072: (4096, 32768)}
"""Context limit, which is what a captured round is cut for -> lengths that rows may have then, the usual one first."""
MAX_TOKENS = 8 * 32768
"""Of a batch that a launch is tried on."""
WARPS = {16: (1, 2, 4), 32: (2, 4), 64: (4,), 128: (8,)}
"""Queries of a block (times grouped heads) -> warps: one for 16 of them, or some more, which share the keys."""


def classes_to_tune() -> list[list[Shape]]:
    """Decoding and trees of Llama-3.1-8B's heads in captured rounds of three context limits, and chunks of prompts; of
    GPT-OSS's heads of two, and of its layers with a window.

    A class is one launch and all shapes that it has to serve.
    """
    sizes = itertools.product(LENGTHS.items(), (32, 8, 1, 16, 4, 64), (8, 1, 16, 4, 32, 64))
    tree = [
        [Shape("tree", rows, n, length, n, max_kv_len=limit) for length in lengths if rows * length <= MAX_TOKENS]
        for (limit, lengths), rows, n in sizes
    ]
    kinds = ((2048, 1024, None), (2048, 1024, 128), (16384, 8192, None))
    tree += [
        [Shape("tree", rows, n, length, n, 64, 8, 64, window=window, max_kv_len=limit)]
        for (limit, length, window), rows, n in itertools.product(kinds, (32, 8, 1), (1, 4, 8, 16))
    ]
    prefill = [(1, 512, length) for length in (512, 2048, 8192)]
    prefill += [(1, n, 8192) for n in (1024, 2048, 4096, 8192)]
    prefill += [(rows, 8192 // rows, 8192) for rows in (2, 4, 8, 16)]
    return [*filter(None, tree), *[[Shape("prefill", rows, n, length, 0)] for rows, n, length in prefill]]


def tiles(shape: Shape) -> Iterator[Launch]:
    """Blocks and warps, at splits that fill the GPU once and twice."""
    lanes = max(16, power_of_two(shape.n * shape.heads // shape.kv_heads))
    block_ms = sorted({min(lanes, 64), max(16, min(lanes, 64) // 2), min(lanes, 128)})
    overlap = gpu_traits(DEVICE).can_overlap
    for block_m, block_n in itertools.product(block_ms, (32, 64, 128)):
        for warps in WARPS[block_m]:
            for splits in splits_of(shape, block_m, block_n, (2, 4)):
                yield Launch(block_m, block_n, splits, warps, 2 if block_n == 128 else 3, overlap)


def around(launch: Launch, shape: Shape) -> Iterator[Launch]:
    """The same blocks and warps with other stages and splits."""
    for stages in (2, 3) if launch.block_n == 128 else (2, 3, 4):
        for splits in splits_of(shape, launch.block_m, launch.block_n, (2, 3, 4, 6, 8)):
            yield replace(launch, num_stages=stages, splits=splits)


def splits_of(shape: Shape, block_m: int, block_n: int, halves: tuple[int, ...]) -> list[int]:
    """One split, and those that fill the multiprocessors so many halves of a time."""
    programs = shape.rows * shape.kv_heads * -(-shape.n * shape.heads // shape.kv_heads // block_m)
    maximum = max(1, min(-(-shape.capacity // block_n), 64))
    counts = [gpu_traits(DEVICE).num_sms * half // (2 * programs) for half in halves]
    return sorted({min(max(count, 1), maximum) for count in (1, *counts)})


@lru_cache(maxsize=1)
def _arrivals() -> torch.Tensor:
    return make_arrivals(DEVICE, gpu_traits(DEVICE))


def call(case: Case, launch: Launch, layer: PagedKV) -> torch.Tensor:
    """Attention of one layer, as the backend calls it."""
    shape, metadata = case.shape, case.metadata
    tail = None if metadata.causal else case.tail.data
    gpu = gpu_traits(DEVICE)
    scale, scales = shape.head_dim**-0.5, layer.scales
    return paged_attention(
        case.q, layer.data, metadata, tail, scale, None, gpu, launch, scales=scales, arrivals=_arrivals()
    )[0]


def compile_once(job: tuple[Shape, Launch]) -> None:
    """Compile a launch into Triton's cache on disk."""
    shape, launch = job
    with contextlib.suppress(Exception):  # what does not fit is found out again, and left out, where it is timed
        case = build(shape, 1)
        case.rotate()
        call(case, launch, case.layers[0])


def compile_all(shapes: list[Shape]) -> None:
    """Compile on all cores. Of a launch's splits a kernel depends on one or more, and on multiples of 16."""
    jobs: dict[object, tuple[Shape, Launch]] = {}
    for shape in shapes:
        for launch in {each for tile in tiles(shape) for each in around(tile, shape)}:
            splits = 1 if launch.splits == 1 else 16 if launch.splits % 16 == 0 else 2
            n = shape.n % 16 if shape.kind == "prefill" else shape.n  # a tail is as wide as its queries are many
            kind = (n, shape.kind, shape.rows == 1, shape.heads, shape.window, replace(launch, splits=splits))
            jobs.setdefault(kind, (shape, launch))
    compile_on_all_cores(compile_once, jobs.values())


def time_launch(cases: list[Case], launch: Launch, replays: int) -> float:
    """Us of a call, the geometric mean over the cases of a class; a difference of times may be nothing."""
    return statistics.geometric_mean(max(time_case(case, launch, replays), 0.01) for case in cases)


def time_case(case: Case, launch: Launch, replays: int) -> float:
    """Median us of a call in a round; infinite where the result is wrong or the launch does not fit."""
    try:
        call(case, launch, case.layers[0])
    except Exception:  # out of shared memory or registers: Triton's errors have no common class
        return float("inf")
    times, out = times_in_a_round(case, lambda: partial(call, case, launch), replays)
    right = error_of(case, out, case.layers[-1]) <= TOLERANCE[case.shape.dtype]
    return statistics.median(times) if right else float("inf")


def tune(classes: list[list[Shape]], end: float) -> dict[str, Any]:
    """Entries of the launch table for `classes` begun before `end`: the fastest launch, its time, and the formula's."""
    table: dict[str, Any] = {}
    compile_all([shapes[0] for shapes in classes])
    for shapes in classes:
        if time.monotonic() > end:
            tell(f"time is up after {len(table)} of {len(classes)} classes")
            break
        shape, cases = shapes[0], [build(each, min(num_layers_for(each), 16)) for each in shapes]
        formula = launch_by_formula(shape.call, gpu_traits(DEVICE))
        timed = {launch: time_launch(cases, launch, 7) for launch in tiles(shape)}
        by_time = [replace(each, splits=1, num_stages=2) for each in sorted(timed, key=timed.__getitem__)]
        for tile in list(dict.fromkeys(by_time))[:3]:
            timed |= {launch: time_launch(cases, launch, 7) for launch in around(tile, shape) if launch not in timed}
        finalists = [formula, *sorted(timed, key=timed.__getitem__)[:4]]
        again = {launch: time_launch(cases, launch, 30) for launch in finalists}
        best = min(again, key=lambda launch: again[launch])
        if not math.isfinite(again[formula]):
            tell(f"{shape.call.shape_class}: left out, the formula's launch is wrong or does not fit")
            continue
        if again[best] > WORTH * again[formula]:
            best = formula
        tell(f"{shape.call.shape_class}: formula {again[formula]:.1f} us, best {again[best]:.1f} us {asdict(best)}")
        times = {"us": round(again[best], 2), "formula_us": round(again[formula], 2)}
        table[shape.call.shape_class] = {**entry_of(best), **times}
        del cases
    return table
