"""Times products with weights in 12 bits against 16, whatever the weights, and says which of them are accepted.

    python benchmarks/lossless_weights.py                  the committed table: every distribution, weight, row count
    python benchmarks/lossless_weights.py --write-table    measure launches and limits first, and write them into
                                                src/treetop/kernels/gemm/skinny_gemm.json; then the same with those

A limit is how many outliers a block of lines may have. It is measured with that many in every block, so a weight whose
fullest block is within it takes no longer, wherever its outliers lie. 12 bits have to take less than 0.97 of the time
of 16. A line that is accepted and takes longer than 16 bits is marked SLOWER, and the exit code is 1.

As in `benchmarks/skinny_gemm.py` a time is that of one product in a replayed graph over weights that are not in the
cache, and results are checked first. Lines as they are known, on stderr a table, on stdout JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product

import torch
from frame import DEVICE, end_with, graph_of, machine_of, parser_of, say, times_us, write_entries
from skinny_gemm import SHAPES, TABLE, check_result, key_of, multiply
from torch import Tensor

from treetop.kernels.gemm.lossless_weights import (
    BLOCK,
    QUARTER,
    TILE,
    LosslessLaunch,
    LosslessWeight,
    compress,
    lossless_gemm,
)
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, choose_launch, load_table, row_class
from treetop.kernels.triton_guard import aot_compile, gpu_traits
from treetop.weights.lossless import ROWS, LaunchLimit, LosslessProducts, offers

NAMES = ("qkv", "output", "gate_up", "down", "lm_head", "draft fc", "draft qkv", "draft lm_head")
UNMEASURED = {"70b qkv": (10240, 8192, False), "14b gate_up": (27648, 5120, True)}
"""Weights that the table does not have, so that what others get is timed too."""
WORTH = 0.97
TENSORS = ("words", "scale", "starts", "lines", "columns", "values")
COLD_BYTES = 300 << 20
"""Weights that a graph walks through: several times the L2 cache."""
STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
PICKS = (16, 32, 64)
CUTS = (LosslessLaunch(64, 4, 5, 4, 0), LosslessLaunch(64, 1, 3, 4, 0), LosslessLaunch(128, 1, 3, 8, 0))
"""Launches that were the fastest of all that fit, but for their picks."""

Shape = tuple[int, int, bool]
Case = tuple[Sequence[Tensor], Sequence[LosslessWeight]]


# ---------------------------------------------------------------------------------------------------- the weights


def student_t(n: int, k: int) -> Tensor:
    """Of four degrees of freedom."""
    spread = torch.rand(n, k, device=DEVICE).mul_(torch.rand(n, k, device=DEVICE)).clamp_(min=1e-30).log_()
    return torch.randn(n, k, device=DEVICE).div_(spread.mul_(-0.5).sqrt_()).mul_(k**-0.5).bfloat16()


def normal(n: int, k: int) -> Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE).mul_(k**-0.5)


def uniform(n: int, k: int) -> Tensor:
    return torch.rand(n, k, dtype=torch.bfloat16, device=DEVICE).sub_(0.5).mul_(k**-0.5)


def scaled_columns(n: int, k: int) -> Tensor:
    """Eight columns times ten."""
    weight = normal(n, k)
    weight[:, :: k // 8] *= 10
    return weight


def bad_tile(n: int, k: int, outliers: int) -> Tensor:
    """So many numbers of one tile are far below the others."""
    weight = normal(n, k)
    weight[:TILE] = with_outliers(weight[:TILE], outliers)
    return weight


def huge_value(n: int, k: int) -> Tensor:
    """One number is a thousand times as large as the largest of the others."""
    weight = normal(n, k)
    weight[n // 3, k // 3] = 1000 * float(weight[n // 3].abs().max())
    return weight


DISTRIBUTIONS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": normal,
    "uniform": uniform,
    "student-t": student_t,
    "scaled columns": scaled_columns,
    "tile of 100": partial(bad_tile, outliers=100),
    "tile of 400": partial(bad_tile, outliers=400),
    "huge value": huge_value,
}


def with_outliers(weight: Tensor, count: int) -> Tensor:
    """The weight with `count` numbers of each of its tiles made tiny, at random columns, spread over its rows."""
    n, k = weight.shape
    out = weight.view(n // TILE, TILE, k).clone()
    at = torch.arange(count, device=weight.device)
    first = torch.randint(k, (n // TILE, TILE), device=weight.device)
    column = (first[:, at % TILE] + at // TILE * 97) % k  # distinct in a row: k has no factor 97
    tile = torch.arange(n // TILE, device=weight.device)[:, None]
    out[tile, (at % TILE)[None], column] = 2.0**-60
    return out.view(n, k)


def full(n: int, k: int, count: int) -> Tensor:
    """A weight all of whose tiles have `count` outliers."""
    sign = torch.randint(0, 2, (n, k), dtype=torch.int8, device=DEVICE).mul_(2).sub_(1)
    return with_outliers((torch.rand(n, k, dtype=torch.bfloat16, device=DEVICE) / 2 + 0.5).mul_(sign), count)


def copies(shape: Shape, weight: Tensor) -> Case:
    """The weight in 16 and in 12 bits, as often as no cache holds; none in 12 if its numbers range too widely."""
    n, k, gated = shape
    count = max(1, -(-COLD_BYTES // (2 * n * k)))
    small = compress(weight, gated)
    wholes = [weight, *(weight.clone() for _ in range(count - 1))]
    if small is None:
        return wholes, []
    smalls = [small]
    for _ in range(count - 1):
        tensors = {name: getattr(small, name).clone() for name in TENSORS}
        smalls.append(replace(small, **tensors))
    return wholes, smalls


# ------------------------------------------------------------------------------------------------------- the times


def times_in_turn(works: Sequence[Callable[[], None]], repeats: int = 5) -> list[float]:
    """Us of each work, the median of several times in turn, so that a change of clocks meets all."""
    graphs = [graph_of(work) for work in works]
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for graph, times in zip(graphs, found, strict=True):
            times.extend(times_us(graph.replay, 3))
    return [statistics.median(times) for times in found]


def whole_work(x: Tensor, wholes: Sequence[Tensor], gated: bool, launch: RowsLaunch | None, turns: int) -> None:
    for _ in range(turns):
        for whole in wholes:
            multiply(x, whole, gated, launch)


def small_work(x: Tensor, smalls: Sequence[LosslessWeight], launch: LosslessLaunch, turns: int) -> None:
    for _ in range(turns):
        for small in smalls:
            lossless_gemm(x, small, launch, gpu_traits(DEVICE))


def timed(shape: Shape, rows: int, case: Case, launches: Sequence[LosslessLaunch]) -> tuple[float, list[float]]:
    """Us of the product in 16 bits and of those in 12, after their results were compared."""
    (n, k, gated), (wholes, smalls) = shape, case
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
    launch = choose_launch(rows, n, k, gated, gpu_traits(DEVICE))
    want = multiply(x, wholes[0], gated, None).float()
    for each in launches:
        check_result(lossless_gemm(x, smalls[0], each, gpu_traits(DEVICE)), gated, want, str(each))
    turns = max(1, 4 // len(wholes))
    works = [partial(whole_work, x, wholes, gated, launch, turns)]
    works += [partial(small_work, x, smalls, each, turns) for each in launches]
    whole_us, *small_us = (us / (turns * len(wholes)) for us in times_in_turn(works))
    return whole_us, small_us


# ------------------------------------------------------------------------------------------ launches and limits


def candidates(shape: Shape, rows: int) -> Iterator[LosslessLaunch]:
    """The cuts that fit, with every number of picks."""
    n, k, gated = shape
    entries = [entry for key, entry in load_table().entries.items() if key[:3] == shape]
    known = [LosslessLaunch(*entry["compressed"]["launch"]) for entry in entries if "compressed" in entry]
    for cut, picks in product(dict.fromkeys([replace(each, picks=0) for each in (*CUTS, *known)]), PICKS):
        launch = replace(cut, picks=picks)
        whole = n % launch.block_n == 0 and k % (launch.splits * BLOCK) == 0
        if gated:
            whole = whole and launch.splits == 1 and launch.block_n > TILE
        stage = 3 * launch.block_n * QUARTER * 2 + row_class(rows) * BLOCK * 2
        programs = n // launch.block_n * launch.splits
        filled = programs >= 64 and (launch.splits == 1 or programs <= 800)
        if whole and filled and stage * launch.num_stages < 227 * 1024:
            yield launch


def measure_entry(name: str, shape: Shape, rows: int, case: Case) -> dict[str, object] | None:
    """A table entry's `compressed`: the fastest launch for normal weights, and its limits.

    None if 16 bits are faster.
    """
    launches = list(candidates(shape, rows))
    whole_us, all_us = timed(shape, rows, case, launches)
    us, launch = min(zip(all_us, launches, strict=True), key=lambda pair: pair[0])
    tried = {str(astuple(each)): round(its_us, 1) for each, its_us in zip(launches, all_us, strict=True)}
    say({"weight": name, "rows": rows, "us_16": round(whole_us, 1), "us_12": tried})
    if us >= WORTH * whole_us:
        return None
    classes = [each for each in ROWS if row_class(each) == rows]
    limits = measure_limits(name, shape, launch, classes)
    enough = {each: maximum for each, maximum in limits.items() if case[1][0].crowd[launch.block_n] <= maximum}
    if not enough:
        return None
    return {
        "launch": astuple(launch),
        "us": round(us, 1),
        "most_outliers": {str(r): maximum for r, maximum in limits.items()},
    }


def measure_limits(name: str, shape: Shape, launch: LosslessLaunch, classes: Sequence[int]) -> dict[int, int]:
    """By rows, the most outliers of every block of lines with which 12 bits take less than `WORTH` of 16."""
    n, k, _ = shape
    tiles, step = launch.block_n // TILE, launch.splits * launch.picks
    ratios: dict[int, list[tuple[int, float]]] = {rows: [] for rows in classes}
    for steps in STEPS:
        count = steps * step // tiles
        if count > k // 8 or count * tiles * BLOCK > launch.picks * k:
            break
        going = [rows for rows in classes if all(ratio < WORTH for _, ratio in ratios[rows])]
        case = copies(shape, full(n, k, count)) if going else None
        for rows in going:
            assert case is not None
            assert case[1][0].crowd[launch.block_n] == count * tiles
            whole_us, (us,) = timed(shape, rows, case, [launch])
            ratios[rows].append((count * tiles, us / whole_us))
        del case
    shown = {rows: [(count, round(ratio, 3)) for count, ratio in found] for rows, found in ratios.items()}
    say({"weight": name, "launch": astuple(launch), "outliers_and_ratios": shown})
    return limits_of(ratios)


def limits_of(ratios: dict[int, list[tuple[int, float]]]) -> dict[int, int]:
    """The last count before the first that is not worth it, and no more than fewer rows have; none if the first is not.

    ratios: by rows, counts in order, each with the time over that of 16 bits.
    """
    limits: dict[int, int] = {}
    for rows in sorted(ratios):
        good = [count for i, (count, _) in enumerate(ratios[rows]) if all(r < WORTH for _, r in ratios[rows][: i + 1])]
        if not good or (limits and min(limits.values()) == 0):
            break
        limits[rows] = min([max(good), *limits.values()])
    return {rows: maximum for rows, maximum in limits.items() if maximum > 0}


def measure_table(shapes: dict[str, Shape]) -> None:
    """Measure launches and limits of these weights, and write them into the table after each."""
    for name, shape in shapes.items():
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        case = copies(shape, normal(*shape[:2]))
        for entry in table["entries"]:
            if key_of(entry)[:3] == shape and entry["rows"] in (16, 32):
                entry.pop("compressed", None)
                made = measure_entry(name, shape, entry["rows"], case)
                if made is not None:
                    entry["compressed"] = made
                say({"weight": name, "rows": entry["rows"], "compressed": made})
        write_entries(TABLE, table["entries"], table["machine"])
        del case
    load_table.cache_clear()
    offers.cache_clear()


# -------------------------------------------------------------------------------------------- all weights, compared


HEADER = "weight        distribution     rows            outliers   limit  16 bits  12 bits  ratio"


@dataclass(frozen=True)
class Line:
    """One weight, distribution and number of rows. outliers: of the fullest block; limit: what the table allows it."""

    weight: str
    distribution: str
    rows: int
    accepted: bool
    outliers: int | None
    limit: int | None
    us_16: float
    us_12: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.us_12 is None else self.us_12 / self.us_16

    @property
    def slower(self) -> bool:
        return self.accepted and self.ratio is not None and self.ratio > 1

    def row(self) -> str:
        cells = [f"{self.weight:14}{self.distribution:16}{self.rows:5}", "accepted" if self.accepted else "refused "]
        cells += [f"{'-' if each is None else each:>7}" for each in (self.outliers, self.limit)]
        cells += [f"{self.us_16:8.1f}", f"{self.us_12:8.1f} {self.ratio:6.3f}" if self.us_12 is not None else " " * 15]
        return " ".join(cells) + ("  SLOWER" if self.slower else "")


def compare(name: str, shape: Shape, distribution: str, offered: dict[int, LaunchLimit]) -> Iterator[Line]:
    """Products of all numbers of rows; refused ones are timed too where there is a launch that can."""
    n, k, _ = shape
    wholes, smalls = copies(shape, DISTRIBUTIONS[distribution](n, k))
    products = LosslessProducts(smalls[0], offered) if smalls else None
    for rows in ROWS:
        offer, outliers, launches = offered.get(rows), None, []
        if offer is not None and products is not None:
            outliers = products.weight.crowd[offer.launch.block_n]
            launches = [offer.launch] if outliers * BLOCK <= offer.launch.picks * k else []
        us_16, us_12 = timed(shape, rows, (wholes, smalls), launches)
        accepted = products is not None and products.launch(rows) is not None
        limit = offer.most_outliers if offer is not None else None
        yield Line(name, distribution, rows, accepted, outliers, limit, us_16, us_12[0] if us_12 else None)


def compile_all(shapes: dict[str, Shape], writing: bool) -> None:
    """Ask for every kernel that will be timed, and compile them on all cores. Nothing is read, so weights are empty."""
    gpu = gpu_traits(DEVICE)
    blank = {}
    for shape in shapes.values():
        blank[shape] = torch.empty(shape[:2], dtype=torch.bfloat16, device=DEVICE), blank_weight(shape)

    def ask() -> None:
        for (shape, (whole, small)), rows in product(blank.items(), ROWS):
            n, k, gated = shape
            x = torch.empty((rows, k), dtype=torch.bfloat16, device=DEVICE)
            launch = choose_launch(rows, n, k, gated, gpu)
            if launch is not None:
                multiply(x, whole, gated, launch)
            offer = offers(n, k, gated, gpu).get(rows)
            launches = [offer.launch] if offer is not None else []
            for each in [*launches, *(candidates(shape, row_class(rows)) if writing else ())]:
                lossless_gemm(x, small, each, gpu)

    aot_compile(ask)


def blank_weight(shape: Shape) -> LosslessWeight:
    n, k, gated = shape
    make = partial(torch.empty, device=DEVICE)
    lists = make(16, dtype=torch.int32), make(16, dtype=torch.int32), make(16, dtype=torch.bfloat16)
    words = make((n // TILE, k // BLOCK, 3, TILE, QUARTER), dtype=torch.int16)
    starts = make(n // TILE + 1, dtype=torch.int32)
    return LosslessWeight(words, make(n, dtype=torch.float32), starts, *lists, gated, dict.fromkeys((64, 128, 256), 0))


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write-table", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*NAMES, *UNMEASURED], default=[*NAMES, *UNMEASURED])
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    args = parser.parse_args(arguments)
    if not load_table().holds_for(gpu_traits(DEVICE)):
        parser.error("the table was measured on another kind of GPU; run benchmarks/skinny_gemm.py --write-table first")
    begun = time.perf_counter()
    torch.manual_seed(0)
    say(machine_of())
    shapes = {name: {**SHAPES, **UNMEASURED}[name] for name in args.only}
    compile_all(shapes, args.write_table)
    say({"compiled_s": round(time.perf_counter() - begun, 1)})
    if args.write_table:
        measure_table({name: shape for name, shape in shapes.items() if name in SHAPES})
        say({"measured_s": round(time.perf_counter() - begun, 1)})
    slower = []
    print(HEADER, file=sys.stderr)
    for name, shape in shapes.items():
        for distribution in args.distributions:
            for line in compare(name, shape, distribution, offers(*shape, gpu_traits(DEVICE))):
                say({**asdict(line), "ratio": line.ratio})
                print(line.row(), file=sys.stderr, flush=True)
                slower += [line] if line.slower else []
    say({"slower": len(slower), "seconds": round(time.perf_counter() - begun, 1)})
    return 1 if slower else 0


if __name__ == "__main__":
    end_with(main)
