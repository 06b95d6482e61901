"""Products with weights on a CPU: which library call is fastest, by the number of rows, found by timing at load.

On one CPU oneDNN's packed layout wins at every count of rows, on another a plain `weight @ x.T` takes less than half of
its time for one row. So each call is timed on weights of the model's shapes, for four classes of row counts, and every
class gets the fastest. Float64 always takes `F.linear`: there one row and many rows are to agree.

Where bits must not depend on the number of rows (`--exactness bits`), one call serves all classes, and a probe says
that it may; where none may, sums are of integers (`exact.fixed_point`). What was chosen first on a machine holds for
all later starts, for calls differ in their bits.

Where few rows are the rule, those of an exact product have weights in 16 bits beside its call
(`weights.float16_products`), which changes no bit.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import combinations
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.exact.fixed_point import FixedPointWeight, fixed_point_linear
from treetop.exact.machine import found_once
from treetop.kernels.exact import BatchInvariantCall, least_rows
from treetop.types.config import ExactSums
from treetop.types.errors import ConfigError
from treetop.weights import float16_products
from treetop.weights.float16_products import MOST_ROWS, Float16Weight, same_sum

Shape = tuple[int, int]
"""Of a weight, (out, in)."""

Product = Callable[[Tensor], Tensor]
"""`x @ weight.T + bias` for x [..., in]. Returns [..., out], contiguous."""


class Order(StrEnum):
    """How a weight lies in memory: [out, in], oneDNN's own, or [in, out]."""

    ROWS = "rows"
    PACKED = "packed"
    COLUMNS = "columns"


class Call(StrEnum):
    """What gives the product: a library call or, where bits are exact, sums of integers. Where times are about equal,
    an earlier one is taken."""

    PACKED = "packed oneDNN"
    LINEAR = "F.linear"
    TURNED = "W @ x.T"
    COLUMNS = "x @ W.T copied"
    INTEGERS = "integers in float64"


_ORDER = {
    Call.PACKED: Order.PACKED,
    Call.LINEAR: Order.ROWS,
    Call.TURNED: Order.ROWS,
    Call.COLUMNS: Order.COLUMNS,
}
"""Of the library's."""
_EXACT: dict[ExactSums, tuple[Call, ...]] = {
    "auto": (Call.PACKED, Call.LINEAR, Call.INTEGERS),
    "packed": (Call.PACKED,),
    "linear": (Call.LINEAR,),
    "integers": (Call.INTEGERS,),
}
"""Calls among which `--exact-sums` chooses; integers where no other is exact."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Row counts that share a call.

    maximum: the largest, None without end.
    timed: the count that is timed.
    shapes: with how many of a model's weights.
    """

    name: str
    maximum: int | None
    timed: int
    shapes: int


ROW_CLASSES = (
    RowClass("1 row", 1, 1, 16),
    RowClass("2 to 8 rows", 8, 6, 3),
    RowClass("9 to 32 rows", 32, 16, 3),
    RowClass("33 rows and more", None, 64, 2),
)
_TIMED_FIRST = (0, 2, 1, 3)
"""Row classes: plain decoding, then what verifies a tree, for time may run out."""
_ENDS = [kind.maximum for kind in ROW_CLASSES if kind.maximum is not None]

TIMED_DTYPES = (torch.float32, torch.bfloat16)
BUDGET_S = 0.25
"""Seconds that timing may take, whatever else the machine does; what is not timed by then is not chosen for."""
_MAX_ELEMENTS = 2**19
"""Of a timed weight: of a larger one a part is timed, for calls keep their order."""
_TURNS = 3, 5
"""Every call has at least, the fast ones at most so many turns; the least time counts."""
_SLOW = 1.5
"""Times the fastest: a call as slow as this has no more turns than the least."""
_ABOUT_EQUAL = 1.1
"""Times the fastest: what a later call must gain; less is within what timing errs by."""
_EXACT_GAIN = 1.25
"""The same of a call for all classes, which is never chosen again: a busy machine had `F.linear` chosen, which takes up
to twice the time of the packed call with large weights."""
_COPY = 1.03
"""What another copy of a weight must gain over all classes together."""


@dataclass(frozen=True, slots=True)
class ChosenProduct:
    """What was chosen for weights of a shape, and why.

    calls: by row class.
    exact: one call for all, whose rows have the same bits in any company.
    least: it is given at least so many rows; of an exact one.
    times_us: by row class, of each call with `RowClass.timed` rows and, of a large weight, a part; empty where time ran
        out, only other shapes were timed, or an earlier start has chosen.
    count: weights of this shape.
    kept: of sums of integers, that these are held, in twice the memory of the weight, and not made for each product.
    piece: of an exact call, `Float16Weight.piece` by which `MOST_ROWS` and fewer have its bits from weights in float16;
        0 where they have not.
    """

    shape: Shape
    dtype: str
    count: int
    calls: tuple[Call, ...]
    times_us: tuple[Mapping[Call, float], ...]
    exact: bool = False
    least: int = 1
    kept: bool = True
    piece: int = 0

    def sentence(self) -> str:
        """The choice as text, with the times of all calls."""
        classes = []
        for kind, chosen, times in zip(ROW_CLASSES, self.calls, self.times_us, strict=True):
            each = ", ".join(f"{call} {us:.0f} us" for call, us in sorted(times.items(), key=lambda item: item[1]))
            classes.append(f"{kind.name}: {chosen} ({each or 'as others, or not timed'})")
        each_row = f"; exact, in calls of {self.least} rows and more" if self.exact else ""
        few = f"; up to {MOST_ROWS} rows of float16 where that loses nothing" if self.piece else ""
        return f"{self.count} x [{self.shape[0]}, {self.shape[1]}]  " + "; ".join(classes) + each_row + few

    def product(self, weight: Tensor, bias: Tensor | None, then: Product | None = None) -> Product:
        """The product with a weight [out, in] as it was chosen. then: what is done with it, of rows each by itself."""
        held = Float16Weight.of(weight, self.piece) if self.piece else None
        if held is None:
            return self._of_any_rows(weight, bias, then)
        few = held if bias is None else partial(_biased, held, bias)
        own = few if then is None else lambda x: then(few(x))
        return FewRowsProduct(own, self._of_any_rows(weight, bias, then))

    def _of_any_rows(self, weight: Tensor, bias: Tensor | None, then: Product | None) -> Product:
        if not self.exact:
            product = CpuProduct(weight, bias, self.calls)
            return product if then is None else lambda x: then(product(x))
        plain = _exact_product(self.calls[0], weight, self.kept)
        own = plain if bias is None else partial(_biased, plain, bias)
        return BatchInvariantCall(own if then is None else lambda rows: then(own(rows)), self.least)


def choose_products(
    shapes: Iterable[Shape], dtype: torch.dtype, orders: int, budget_s: float = BUDGET_S
) -> dict[Shape, ChosenProduct]:
    """The fastest call of each row class for the weights of a model, by shape; empty where only `F.linear` is used.

    shapes: of every weight. orders: 1 or 2, how many copies of a weight may be kept, each in its order. A shape is
    timed once a process for each dtype and number of threads.
    """
    counts = Counter(shapes)
    if dtype not in TIMED_DTYPES:
        return {}
    times, chosen, default = _times_of(counts, dtype, budget_s), {}, default_call(dtype)
    together = [_together(times[index].values()) for index in range(len(ROW_CLASSES))]
    for shape, count in counts.items():
        own = tuple(times[index].get(shape, {}) for index in range(len(ROW_CLASSES)))
        ratios = [_smoothed(*each) for each in zip(own, together, strict=True)]
        name = str(dtype).removeprefix("torch.")
        chosen[shape] = ChosenProduct(shape, name, count, fastest(ratios, orders, default), own)
    return chosen


def choose_exact_products(
    shapes: Iterable[Shape], orders: int, sums: ExactSums = "auto", budget_s: float = BUDGET_S, few: bool = False
) -> dict[Shape, ChosenProduct]:
    """As `choose_products`, in float32, of each shape one call for all row classes that gives a row its bits alone.

    It is the first in all classes among those of `--exact-sums`, or a later one that was slower in none and faster by
    `_EXACT_GAIN` over all when a shape was first met on this machine. few: few rows are the rule, and may have weights
    in float16 beside. Raises ConfigError if none of them is exact.
    """
    counts, threads, times = Counter(shapes), torch.get_num_threads(), dict[int, dict[Shape, Mapping[Call, float]]]()

    def find(shape: Shape) -> list[object]:
        if not times:  # once something is not known
            times.update(_times_of(counts, torch.float32, budget_s) if len(_EXACT[sums]) > 1 else _NO_TIMES)
        own = tuple(times[index].get(shape, {}) for index in range(len(ROW_CLASSES)))
        found = _fastest_exact(shape, own, threads, _EXACT[sums])
        return [] if found is None else [found[0].value, found[1]]

    chosen = {}
    for shape, count in counts.items():
        found = found_once("exact-products", (sums, shape, threads), partial(find, shape))
        if not found:
            raise ConfigError(
                f"--exact-sums {sums}: on this machine the bits of a product with a weight [{shape[0]}, {shape[1]}]"
                " depend on the batch; use --exact-sums auto or integers"
            )
        own = tuple(times[index].get(shape, {}) if times else {} for index in range(len(ROW_CLASSES)))
        call, least = Call(found[0]), int(found[1])
        piece = exact_piece(shape, call, least) if few else 0
        calls = (call,) * len(ROW_CLASSES)
        chosen[shape] = ChosenProduct(shape, "float32", count, calls, own, True, least, orders > 1, piece)
    return chosen


def exact_piece(shape: Shape, call: Call, least: int) -> int:
    """`ChosenProduct.piece` beside an exact call with weights of a shape: a probe says with which the bits are its."""
    if call not in _ORDER or not float16_products.serves():
        return 0

    def find() -> int:
        weight = _probed(shape).bfloat16().float()
        return same_sum(BatchInvariantCall(_product(call, _in_order(weight, _ORDER[call]), None), least), weight)

    return int(found_once("float16-pieces", (shape, call, least, torch.get_num_threads()), find))


_NO_TIMES: dict[int, dict[Shape, Mapping[Call, float]]] = {index: {} for index in range(len(ROW_CLASSES))}


def _times_of(
    counts: Mapping[Shape, int], dtype: torch.dtype, budget_s: float
) -> dict[int, dict[Shape, Mapping[Call, float]]]:
    """By row class and shape, of the shapes that are timed, the times of each call. counts: of weights."""
    ends_s, threads = time.perf_counter() + budget_s, torch.get_num_threads()
    largest = sorted(counts, key=lambda shape: counts[shape] * shape[0] * shape[1], reverse=True)
    times: dict[int, dict[Shape, Mapping[Call, float]]] = {}
    for index in _TIMED_FIRST:
        kind = ROW_CLASSES[index]
        keys = {shape: _Timed.of(shape, kind.timed, dtype, threads) for shape in largest[: kind.shapes]}
        missing = dict.fromkeys(key for key in keys.values() if key not in _TIMES)
        _TIMES.update(_time_calls(list(missing), ends_s))
        times[index] = {shape: _TIMES[key] for shape, key in keys.items()}
    return times


def _together(times: Iterable[Mapping[Call, float]]) -> dict[Call, float]:
    """Of each call, the geometric mean over weights of its time in proportion to the fastest."""
    timed = [each for each in times if each]
    return {
        call: prod(each[call] / min(each.values()) for each in timed) ** (1 / len(timed))
        for call in Call
        if timed and call in timed[0]
    }


def _smoothed(own: Mapping[Call, float], together: Mapping[Call, float]) -> Mapping[Call, float]:
    """What a call costs for one shape: its own times and those of all shapes weigh the same.

    So one time that other work on the machine disturbed does not decide, and a shape that was not timed goes with the
    others.
    """
    return {call: sqrt(own[call] / min(own.values()) * ratio) for call, ratio in together.items()} if own else together


def _fastest_exact(
    shape: Shape, times: Sequence[Mapping[Call, float]], threads: int, among: Sequence[Call] = _EXACT["auto"]
) -> tuple[Call, int] | None:
    """Of these calls for any number of rows one that is exact, and `ChosenProduct.least` of it; None for none.

    That is the first, or a later one that is slower in no class and faster by `_EXACT_GAIN` over all. times: by row
    class, of each call. A call that is given more rows than a class has takes the time of those.
    """
    exact = {call: least for call in _of_library(among) if (least := _least_rows(shape, call, threads)) is not None}
    if not exact:
        return (Call.INTEGERS, 1) if Call.INTEGERS in among else None
    classes = range(len(ROW_CLASSES))
    at = {call: [max(i, bisect_left(_ENDS, least)) for i in classes] for call, least in exact.items()}
    if any(call not in times[j] for call, places in at.items() for j in places):
        return next(iter(exact.items()))  # not all were timed
    taken = {call: [times[j][call] for j in places] for call, places in at.items()}
    least_us = [min(each[i] for each in taken.values()) for i in classes]
    cost = {call: sum(taken[call][i] / least_us[i] for i in classes) for call in exact}
    first = next(iter(exact))
    never_slower = [call for call in exact if all(taken[call][i] <= taken[first][i] for i in classes)]
    best = min(never_slower, key=lambda call: cost[call] * (1 if call is first else _EXACT_GAIN))
    return best, exact[best]


def without_exact_call(shapes: Iterable[Shape], sums: ExactSums) -> Shape | None:
    """A shape of which no library's call among those of `--exact-sums` is exact, in float32; None if each has one.

    A probe says so, whose finding holds for all starts on this machine, and never a timing.
    """
    threads, calls = torch.get_num_threads(), _of_library(_EXACT[sums])

    def find(shape: Shape) -> bool:
        return any(_least_rows(shape, call, threads) is not None for call in calls)

    for shape in dict.fromkeys(shapes):
        if not found_once("exact-calls", (sums, shape, threads), partial(find, shape)):
            return shape
    return None


def _of_library(among: Iterable[Call]) -> list[Call]:
    packs = default_call(torch.float32) is Call.PACKED
    return [call for call in among if call in _ORDER and (packs or call is not Call.PACKED)]


_MAX_PROBED = 2**27
"""Elements of a probed weight: of a larger one the first rows are probed."""


@cache
def _least_rows(shape: Shape, call: Call, threads: int) -> int | None:
    """`kernels.exact.least_rows` of a call with float32 weights of this shape. threads: of PyTorch."""
    weight = _probed(shape)
    return least_rows(_product(call, _in_order(weight, _ORDER[call]), None), shape[1])


def _probed(shape: Shape) -> Tensor:
    """A weight of this shape, or with fewer outputs; as many as the shape's stand behind the last whole 64 of them, for
    libraries sum these otherwise.
    """
    most = max(1, _MAX_PROBED // shape[1])
    out = shape[0] if shape[0] <= most else max(1, most - (most - shape[0]) % 64)
    return torch.randn((out, shape[1]), generator=torch.Generator().manual_seed(out))


def is_exact_from(shape: Shape, call: Call, least: int) -> bool:
    """Whether products with weights of this shape are exact in calls of `least` rows and more."""
    if call is Call.INTEGERS:
        return True
    own = _least_rows(shape, call, torch.get_num_threads())
    return own is not None and own <= least


def default_call(dtype: torch.dtype) -> Call:
    """What is taken unless timing says otherwise. bfloat16 is packed only where the CPU multiplies it natively."""
    if not torch.backends.mkldnn.is_available() or dtype not in TIMED_DTYPES:
        return Call.LINEAR
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return Call.PACKED if packs else Call.LINEAR


def fastest(times: Sequence[Mapping[Call, float]], orders: int, default: Call) -> tuple[Call, ...]:
    """The calls by row class, of at most so many orders, whose times are least in proportion to the fastest.

    times: by row class, of each call, in any unit. A class without times takes the default.
    """
    known = [each or {default: 1.0} for each in times]
    best: tuple[float, tuple[Call, ...]] | None = None
    for kept in (kept for count in range(1, orders + 1) for kept in combinations(Order, count)):
        calls = tuple(call for each in known if (call := _pick(each, kept)) is not None)
        if len(calls) == len(known):
            cost = sum(each[call] / min(each.values()) for call, each in zip(calls, known, strict=True))
            cost *= _COPY ** (len(kept) - 1) * (1.0 if _ORDER[default] in kept else _ABOUT_EQUAL)
            best = (cost, calls) if best is None or cost < best[0] else best
    return (default,) * len(times) if best is None else best[1]


def _pick(times: Mapping[Call, float], kept: Sequence[Order]) -> Call | None:
    """The fastest call of these orders, or an earlier one that is about as fast; None if there is none."""
    there = {call: times[call] for call in Call if call in times and _ORDER[call] in kept}
    return next((call for call, us in there.items() if us <= _ABOUT_EQUAL * min(there.values())), None)


class CpuProduct:
    """A weight's product by one call for each row class, with the copies of the weight that these need."""

    def __init__(self, weight: Tensor, bias: Tensor | None, calls: Sequence[Call]) -> None:
        """weight: [out, in]. calls: by row class."""
        orders = {order: _in_order(weight, order) for order in {_ORDER[call] for call in calls}}
        self._products = [_product(call, orders[_ORDER[call]], bias) for call in calls]

    def __call__(self, x: Tensor) -> Tensor:
        return self._products[bisect_left(_ENDS, x.numel() // x.shape[-1])](x)


class FewRowsProduct:
    """A product of up to `MOST_ROWS` rows by one way, of more by another."""

    def __init__(self, few: Product, many: Product) -> None:
        self._few, self._many = few, many

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.numel() <= MOST_ROWS * x.shape[-1] else self._many(x)


def _in_order(weight: Tensor, order: Order) -> Tensor:
    if order is Order.PACKED:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed
    return weight.contiguous() if order is Order.ROWS else weight.t().contiguous()


def _product(call: Call, weight: Tensor, bias: Tensor | None) -> Product:
    """The product by one call. weight: in that call's order."""
    if call is Call.PACKED:
        packed, no_args = torch.ops.mkldnn._linear_pointwise.default, list[float]()
        return lambda x: packed(x, weight, bias, "none", no_args, "")
    if call is Call.LINEAR:
        return lambda x: F.linear(x, weight, bias)
    if call is Call.COLUMNS:
        return (lambda x: x @ weight) if bias is None else (lambda x: x @ weight + bias)

    def turned(x: Tensor) -> Tensor:
        out = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().contiguous()
        return (out if bias is None else out + bias).view(*x.shape[:-1], -1)

    return turned


def _exact_product(call: Call, weight: Tensor, kept: bool) -> Product:
    """The product by one call. weight: [out, in] float32. kept: see `ChosenProduct`."""
    if call is not Call.INTEGERS:
        return _product(call, _in_order(weight, _ORDER[call]), None)
    return FixedPointWeight(weight) if kept else partial(fixed_point_linear, weight=weight, bias=None)


def _biased(product: Product, bias: Tensor, rows: Tensor) -> Tensor:
    return product(rows).add_(bias)


@dataclass(frozen=True, slots=True)
class _Timed:
    """What is timed: a weight or its first part, and a number of rows."""

    shape: Shape
    rows: int
    dtype: torch.dtype
    threads: int

    @classmethod
    def of(cls, shape: Shape, rows: int, dtype: torch.dtype, threads: int) -> "_Timed":
        inner = min(shape[1], _MAX_ELEMENTS // 64)
        return cls((min(shape[0], _MAX_ELEMENTS // inner), inner), rows, dtype, threads)

    @property
    def calls(self) -> list[Call]:
        """A copy [in, out] is for one row alone, whose product is a walk through memory."""
        packs = default_call(self.dtype) is Call.PACKED
        return [
            call for call in _ORDER if packs or call is not Call.PACKED if call is not Call.COLUMNS or self.rows == 1
        ]


_TIMES: dict[_Timed, Mapping[Call, float]] = {}
"""What was timed in this process, in microseconds; empty where time ran out."""


def _time_calls(timed: Sequence[_Timed], ends_s: float) -> dict[_Timed, Mapping[Call, float]]:
    """The least time of each call in microseconds; empty if the least number of turns is not over by `ends_s`.

    A turn goes through all weights with one call, then with the next. So a machine that slows down slows all calls, and
    a weight has left the nearer caches when it is read again, as in a model. Random generators are not touched. The
    clock is the day's: a thread's own loses microseconds on virtual machines, and the least of many keeps such a loss.
    """
    minimum: dict[_Timed, dict[Call, float]] = {key: dict.fromkeys(key.calls, float("inf")) for key in timed}
    for turn, runs in enumerate(_turns(_runs(timed), minimum)):
        for run in runs:
            if time.perf_counter() > ends_s:
                return {key: minimum[key] if turn >= _TURNS[0] else {} for key in timed}
            started_s = time.perf_counter()
            run.product(run.x)
            taken_us = 1e6 * (time.perf_counter() - started_s)
            minimum[run.timed][run.call] = min(minimum[run.timed][run.call], taken_us)
    return {**minimum}


@dataclass(frozen=True, slots=True)
class _Run:
    """One call on one weight, ready to be timed."""

    timed: _Timed
    call: Call
    product: Product
    x: Tensor


def _runs(timed: Sequence[_Timed]) -> Iterator[_Run]:
    """All calls with each weight, call by call. Made one by one, so that what takes long can be left."""
    weights: dict[tuple[Shape, Order], Tensor] = {}
    for call in Call:
        for key in (key for key in timed if call in key.calls):
            place = key.shape, _ORDER[call]
            if place not in weights:
                weights[place] = _in_order(torch.full(key.shape, 0.01, dtype=key.dtype), place[1])
            x = torch.full((1, key.rows, key.shape[1]), 0.01, dtype=key.dtype)
            yield _Run(key, call, _product(call, weights[place], None), x)


def _turns(runs: Iterator[_Run], minimum: Mapping[_Timed, Mapping[Call, float]]) -> Iterator[Iterable[_Run]]:
    """Turns of all runs, then of those that were not slow."""
    made: list[_Run] = []

    def first() -> Iterator[_Run]:
        for run in runs:
            made.append(run)
            yield run

    yield first()
    for turn in range(1, _TURNS[1]):
        if turn < _TURNS[0]:
            yield made
        else:
            yield [run for run in made if minimum[run.timed][run.call] < _SLOW * min(minimum[run.timed].values())]
