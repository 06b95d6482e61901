"""Conformance: production rounds against the dense oracle, over backends, runners, shapes, pages and batches.

A case builds a real engine and scheduler on the small two-group pair (or its windowless twin), lets requests of
different lengths grow and drain a batch, and compares every round of every row with `debug.oracle`: the drafted tree
(tokens, parents and log-probabilities: prefill, draft and draft extend) and the emitted tokens (verify and commit).
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from treetop.debug.oracle import DensePair, OracleCalibration, OracleNode
from treetop.debug.two_group import write_two_group_pair
from treetop.llm import LLM
from treetop.types.ids import PageId
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan, StepPlan, StepResult
from treetop.types.sampling import SamplingParams
from treetop.types.tree import Accepted, DraftTree

WINDOW = 12
TOLERANCE = {"float64": 1e-5, "float32": 2e-4}
"""Of a path's log-probability, which is float32 in either dtype."""

AXES: dict[str, tuple[object, ...]] = {
    "backend": ("torch",),
    "runner": ("off", "sim"),
    "page_size": (1, 2, 16, 64),
    "topk": (1, 2, 8),
    "num_steps": (1, 2, 3, 5, 8),
    "tree_size": ("smallest", "middle", "largest"),
    "window": (None, WINDOW),
    "rows": (1, 2, 3, 5, 8),
    "order": ("shuffled", "interleaved", "descending"),
    "dtype": ("float64", "float32"),
    "overlap": (False, True),
    "shapes": ("one", "switched"),
}


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """One point of the matrix; the fields are the axes."""

    backend: str
    runner: str
    page_size: int
    topk: int
    num_steps: int
    tree_size: str
    window: int | None
    rows: int
    order: str
    dtype: str
    overlap: bool
    shapes: str = "one"

    @property
    def shape(self) -> SpecShape:
        """A valid shape: a chain's T is given, a tree's lies between S + 1 and what it can grow, 24 at most."""
        k, s = self.topk, self.num_steps
        if k == 1:
            return SpecShape(1, s, s + 1)
        largest = min(1 + k + (s - 1) * k * k, 24)
        sizes = {"smallest": 2, "middle": max(2, (2 + largest) // 2), "largest": largest}
        return SpecShape(k, s, sizes[self.tree_size])


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What a case found.

    rounds: row-rounds compared.
    ties: float32 rows left after a near tie.
    failure: or None.
    """

    case: ConformanceCase
    rounds: int
    ties: int
    failure: str | None


def all_cases() -> Iterator[ConformanceCase]:
    """The full matrix."""
    for values in product(*AXES.values()):
        yield ConformanceCase(*values)  # type: ignore[arg-type]  # AXES is in the order of the fields


def quick_cases(count: int, seed: int = 0, gpu: bool = False, backend: str = "auto") -> list[ConformanceCase]:
    """Random cases in which every value of every axis appears. gpu: Triton and captured rounds too.

    backend: only this one, if it is one of those that can be compared in full precision.

    Triton does not compute in float64, and only its rounds are captured; a case that asks for more is brought back.
    """
    rng = random.Random(seed)
    columns = []
    axes = {**AXES, "backend": ("torch", "triton"), "runner": ("off", "auto")} if gpu else dict(AXES)
    if backend in axes["backend"]:
        axes["backend"] = (backend,)
    for values in axes.values():
        column = [values[i % len(values)] for i in range(max(count, len(values)))]
        rng.shuffle(column)
        columns.append(column[:count])
    cases = [ConformanceCase(*values) for values in zip(*columns, strict=True)]
    return [replace(case, dtype="float32") if case.backend == "triton" else case for case in cases]


class RandomShapes:
    """A `ShapePolicy` that takes any shape, and mostly the same for a few rounds: for conformance and tests.

    chosen: of each round. num_put_back: rows, for a draft.
    """

    def __init__(self, shapes: Sequence[SpecShape], seed: int = 0, loses: bool = False) -> None:
        """loses: rows lose their draft now and then, most begin without while it watches, and some are put back."""
        self._shapes, self._random, self._loses = shapes, random.Random(seed), loses
        self.chosen: list[SpecShape] = []
        self.watches = self.looks = self.alone = self._puts_back = False
        self.num_put_back = 0

    @property
    def shape(self) -> SpecShape:
        return self.chosen[-1] if self.chosen else self._shapes[0]

    def pays_to_catch_up(self, rows: int, drafting: int) -> bool:
        return not self._loses or self._random.random() < 0.5

    def pays_to_read(self, rows: int, drafting: int, coming: int, others: int) -> bool:
        return not self.watches

    def cost_of_draft(self, rows: int, computed: int, left: int) -> float | None:
        self._puts_back = self._puts_back or (self._loses and self._random.random() < 0.5)
        return 1.0 if self._puts_back and left > 1 else None

    def pay(self, rounds: float) -> None:
        self.num_put_back, self._puts_back, self.watches = self.num_put_back + 1, False, False

    def choose(
        self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0, drafting: int | None = None
    ) -> SpecShape:
        stays = bool(self.chosen) and self._random.random() < 0.6
        self.chosen.append(self.chosen[-1] if stays else self._random.choice(self._shapes))
        if self._loses and not stays:
            self.watches, self.alone = self._random.random() < 0.2, self._random.random() < 0.3
            self.looks = not self.alone
        return self.chosen[-1]

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None, tokens: float | None = None) -> None:
        """It learns nothing."""

    def begin(self) -> None:
        """It knows nothing of a head."""


class Conformance:
    """Holds the checkpoints on disk while cases run; a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="treetop-conformance-")
        self._pairs: dict[int | None, tuple[Path, Path, DensePair]] = {}
        self._seeded: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> "Conformance":
        for window in (None, WINDOW):
            folder = Path(self._folder.name) / str(window)
            target, head = write_two_group_pair(folder, window or 10_000)
            self._pairs[window] = (target, head, DensePair(target, head))
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def pair(self, seed: int) -> tuple[str, str]:
        """Folders of the pair with windows that this seed makes."""
        if seed not in self._seeded:
            target, head = write_two_group_pair(Path(self._folder.name) / f"seed-{seed}", WINDOW, seed)
            self._seeded[seed] = (str(target), str(head))
        return self._seeded[seed]

    def run(self, case: ConformanceCase, device: str = "auto", check_level: int = 3) -> CaseResult:
        """Run one case to its end or its first difference."""
        target, head, oracle = self._pairs[case.window]
        shape = case.shape
        words: dict[str, Any] = {"device": device, "dtype": case.dtype, "graphs": case.runner}
        words["attention_backend"] = case.backend
        llm = LLM(
            str(target),
            str(head),
            **words,
            page_size=case.page_size,
            overlap=case.overlap,
            max_running_requests=8,
            context_length=96,
            chunked_prefill_size=7,
            check_level=check_level,
            speculative_calibration="off",
            speculative_num_steps=shape.num_steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.num_draft_tokens,
            speculative_policy="fixed" if case.shapes == "one" else "auto",
            speculative_max_deferred=3,
        )
        if case.shapes == "switched":
            llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, loses=True)
        calibrate(llm, case.rows)
        llm.scheduler.arrange_pages(lambda pages: _ordered(case.order, pages))
        rng = random.Random(f"{case.page_size} {case.topk} {case.num_steps} {case.rows}")
        prompts = [[rng.randrange(96) for _ in range(rng.choice((1, 5, 11, 16, 30)))] for _ in range(case.rows)]
        params = [SamplingParams(max_tokens=2 + 3 * (i % 3)) for i in range(case.rows)]
        rounds, ties, failure = follow(llm, oracle, prompts, params)
        llm.scheduler.check_integrity()
        return CaseResult(case, rounds, ties, failure)


_INV_TEMPS = (0.5, 1.0, 1.7)


def calibrate(llm: LLM, seed: int) -> None:
    """Write what a pair might have taught: an engine with calibration off keeps it."""
    calibration, random_ = llm.engine.runner.state.calibration, random.Random(seed)
    first, others = random_.choice(_INV_TEMPS), calibration.inv_temp[1:]
    shifts = [random_.uniform(-1, 1) for _ in range(calibration.logprob_bias[0].numel())]
    calibration.logprob_bias.copy_(torch.tensor(shifts).view(calibration.logprob_bias.shape[1:]))
    inv_temps = [first, *(random_.choice(_INV_TEMPS) for _ in others)]
    calibration.inv_temp.copy_(torch.tensor(inv_temps)[:, None])


def calibration_of(llm: LLM) -> OracleCalibration:
    """By which an engine that learns nothing grows trees of greedy requests."""
    calibration = llm.engine.runner.state.calibration
    return OracleCalibration(calibration.inv_temp[:, 0].tolist(), calibration.logprob_bias[0].tolist())


def follow(
    llm: LLM, oracle: DensePair, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[int, int, str | None]:
    """Generate, and compare every round of every row with the oracle: (rounds, near ties, first failure or None).

    Of a row without a draft the tree is its root.
    """
    rounds: list[_RowRound] = []
    scheduler = llm.scheduler  # an observer that held the LLM would keep its memory until the collector comes

    def observe(plan: RoundPlan, tree: DraftTree, accepted: Accepted) -> None:
        ids = scheduler.ids_by_row()  # a row that is not there has ended, and what it gave is dropped
        for index, row in enumerate(plan.rows):
            if row in ids:
                shape = PLAIN if row in plan.no_draft else plan.shape
                rounds.append(_row_round(index, ids[row], shape, tree, accepted))

    llm.engine.observer = observe
    llm.generate(prompts, params)
    ties, calibration = 0, calibration_of(llm)
    for each in rounds:
        failure = _compare(each, oracle, calibration, str(llm.engine.dtype).removeprefix("torch."))
        if failure == _TIE:
            ties += 1
        elif failure is not None:
            return len(rounds), ties, failure
    return len(rounds), ties, None


_TIE = "near tie"


@dataclass(frozen=True, slots=True)
class _RowRound:
    """One row's part of a round. ids: committed tokens and the root."""

    ids: list[int]
    shape: SpecShape
    tree: list[OracleNode]
    emitted: list[int]


def _row_round(index: int, ids: tuple[int, ...], shape: SpecShape, tree: DraftTree, accepted: Accepted) -> _RowRound:
    columns = zip(tree.tokens[index].tolist(), tree.parent[index].tolist(), tree.logprob[index].tolist(), strict=True)
    emitted = accepted.tokens[index, : int(accepted.accept_len[index]) + 1].tolist()
    nodes = [OracleNode(*column) for column in columns][: shape.num_draft_tokens]
    return _RowRound(list(ids), shape, nodes, emitted)


def _compare(have: _RowRound, oracle: DensePair, calibration: OracleCalibration, dtype: str) -> str | None:
    """The first difference from the oracle, `_TIE` for one that float32 may break either way, or None."""
    shape = have.shape
    want = oracle.tree(have.ids, shape.topk, shape.num_steps, shape.num_draft_tokens, calibration)
    scores = [(a.logprob, b.logprob) for a, b in zip(sorted_by_score(want), sorted_by_score(have.tree), strict=True)]
    gap = max(abs(a - b) for a, b in scores)
    if not gap <= TOLERANCE[dtype]:  # NaN is a difference too
        return f"tree after {len(have.ids)} tokens: log-probabilities differ by {gap:.2e}"
    same = [(node.token, node.parent) for node in want] == [(node.token, node.parent) for node in have.tree]
    if not same and dtype == "float64":
        return f"tree after {len(have.ids)} tokens: {have.tree} instead of {want}"
    expected = oracle.greedy_path(have.ids, have.tree)
    if expected == have.emitted:
        return None if same else _TIE
    at = next(i for i, (a, b) in enumerate(zip([*expected, -1], [*have.emitted, -1], strict=False)) if a != b)
    best = oracle.run_target([*have.ids, *expected[:at]])[0][-1].topk(2).values
    if dtype == "float32" and float(best[0] - best[1]) < 1e-4 * max(1.0, abs(float(best[0]))):
        return _TIE
    return f"after {len(have.ids)} tokens: emitted {have.emitted}, plain decoding gives {expected}"


def sorted_by_score(tree: list[OracleNode]) -> list[OracleNode]:
    return sorted(tree, key=lambda node: -node.logprob)


def _ordered(order: str, pages: list[PageId]) -> list[PageId]:
    """Free pages in an order that no request would get by luck."""
    if order == "shuffled":
        return random.Random(0).sample(pages, len(pages))
    if order == "interleaved":
        return [*pages[::2], *pages[1::2]]
    return sorted(pages)  # handed out from the end: descending
