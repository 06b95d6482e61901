"""Times uncut products of few rows with weights in 13 bits against 16, and finds the launches of `--exactness bits`.

    python benchmarks/ordered_weights.py                  the committed launches, and what 16 bits take
    python benchmarks/ordered_weights.py --write-table    measure all that fit, write kernels/gemm/ordered_weights.json,
                                                  where entries of other weights and rows on the same kind of GPU stay

A launch whose bits are not those of 16 bits is named, not timed, and the exit code is 1. 13 bits have to take less than
0.98 of the time of 16, else the table says that 16 serve. As in `benchmarks/skinny_gemm.py` a time is that of one
product in a replayed graph over weights that are not in the cache. JSON lines on stdout, all candidates on stderr.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial

import torch
from frame import (
    DEVICE,
    Table,
    compile_on_all_cores,
    end_with,
    entries_of,
    machine_of,
    median_us,
    parser_of,
    say,
    tell,
    write_entries,
)
from skinny_gemm import SHAPES, calls, key_of
from torch import Tensor

from treetop.exact.probe import adversarial, same_bits
from treetop.kernels.gemm.ordered_weights import (
    CHUNK,
    GROUP,
    OrderedLaunch,
    OrderedWeight,
    encode,
    fits,
    ordered_gemm,
    shared_bytes,
)
from treetop.kernels.gemm.skinny_gemm import choose_no_split_k, gated_rows, skinny_gemm
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.ordered import ROWS, TABLE, offers

WORTH = 0.98
_RESERVED = 1 << 10
"""Bytes of shared memory that a program has beside its own."""
_SHARED = 228 << 10
"""Of a multiprocessor."""
Job = tuple[int, bool, OrderedLaunch]


def candidates(rows: int, n: int, gated: bool) -> Iterator[OrderedLaunch]:
    """Launches that could be fast: one to six programs a multiprocessor, with as many slots as they have room for."""
    forms = [OrderedLaunch(warps * each, 2, warps) for warps in (1, 2, 4, 8) for each in (1, 2)]
    for form in [*forms, *([] if gated else [OrderedLaunch(2, 2, 4, rows_left=True)])]:
        if CHUNK % form.groups or n % (GROUP * form.groups):
            continue
        seen = set[int]()
        for programs in (1, 2, 3, 4, 6):
            slots = min((_SHARED // programs - _RESERVED) * 2 // shared_bytes(form, rows), 8)
            if slots >= 2 and slots not in seen and programs * form.num_warps <= 16:
                seen.add(slots)
                yield replace(form, slots=slots)


def whole(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """The uncut product in 16 bits."""
    gpu = gpu_traits(DEVICE)
    launch = choose_no_split_k(len(x), *weight.shape, gated, gpu)
    assert launch is not None
    if gated:
        return gated_rows(x, weight, launch, gpu, rounds=True)
    return skinny_gemm(x, weight, launch, gpu, rounds=True)[0]


def compile_once(job: Job) -> None:
    """Compile a launch into Triton's cache on disk."""
    rows, gated, launch = job
    n = GROUP * launch.groups * 2
    weight = encode(torch.zeros(n, 512, dtype=torch.bfloat16, device=DEVICE), gated)
    assert weight is not None
    ordered_gemm(torch.zeros(rows, 512, dtype=torch.bfloat16, device=DEVICE), weight, launch, gpu_traits(DEVICE))


def measured(n: int, k: int, gated: bool, all_rows: Sequence[int], write: bool) -> Iterator[Table]:
    """Entries of the table, with us. wrong: of launches whose bits are not those of 16."""
    generator, gpu = torch.Generator(DEVICE).manual_seed(n + k), gpu_traits(DEVICE)
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5 for _ in range(calls(n, k))]
    made = [coded for weight in weights if (coded := encode(weight, gated)) is not None]
    for rows in all_rows:
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
        hard = adversarial((rows, k), generator).to(x.dtype)
        want = whole(hard, weights[0], gated)
        whole_us = median_us([partial(whole, x, weight, gated) for weight in weights])
        known = [launch for most, launch in offers(n, k, gated, gpu).items() if most == rows]
        found, wrong = list[tuple[float, OrderedLaunch | None]](), list[tuple[int, ...]]()
        for launch in candidates(rows, n, gated) if write else known:
            if not same_bits(ordered_gemm(hard, made[0], launch, gpu), want):
                wrong.append(astuple(launch))
                continue
            found.append((times_of(x, made, launch), launch))
            tell(f"{(n, k)}, {rows} rows: {found[-1][0]:.1f} us by {launch}, {whole_us:.1f} in 16 bits")
        us, best = min(found, key=lambda pair: pair[0], default=(whole_us, None))
        if us >= WORTH * whole_us and write:
            us, best = whole_us, None
        entry = {"n": n, "k": k, "gated": gated, "rows": rows, "launch": None if best is None else astuple(best)}
        yield {**entry, "us": round(us, 1), "whole_us": round(whole_us, 1), **({"wrong": wrong} if wrong else {})}


def times_of(x: Tensor, made: Sequence[OrderedWeight], launch: OrderedLaunch) -> float:
    gpu = gpu_traits(DEVICE)
    return median_us([partial(ordered_gemm, x, weight, launch, gpu) for weight in made])


def compile_all(shapes: Iterable[tuple[int, int, bool]], all_rows: Sequence[int]) -> None:
    jobs = {
        (rows, gated, launch) for n, _, gated in shapes for rows in all_rows for launch in candidates(rows, n, gated)
    }
    compile_on_all_cores(compile_once, sorted(jobs, key=repr))


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write-table", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args(arguments)
    machine = machine_of()
    say(machine)
    shapes = {name: SHAPES[name] for name in args.only if fits(*SHAPES[name][:2])}
    if args.write_table:
        compile_all(shapes.values(), args.rows)
    is_wrong, entries = False, {key_of(each): each for each in entries_of(TABLE, machine)}
    for name, (n, k, gated) in shapes.items():
        for found in measured(n, k, gated, args.rows, args.write_table):
            say({"name": name, **found})
            is_wrong |= bool(found.pop("wrong", None))
            entries[key_of(found)] = {"name": name, **found}
            if args.write_table:
                write_entries(TABLE, entries.values(), machine)
    return int(is_wrong)


if __name__ == "__main__":
    end_with(main)
