"""Whether the shape that the load allows is found: the policy against plain rounds and fixed shapes, in modelled time.

The policy that serves chooses each round's shape. Production growing, selecting, accepting and learning run on what a
profile draws (`treetop.speculative.profile`), without a model. Rounds take what `treetop.bench.modelled_costs` says of
an 8B model on a GPU, by rows and shape. `never` is a head of which nothing is ever accepted.

Prints for each profile and number of rows how fast the best fixed shape and the policy are, beside plain decoding
without a draft; then the least ratios. The policy's rounds after the first hundred count with the mean tokens of their
shapes, for a few hundred rounds of one row say little; `all` is what all of its rounds gave.

Run: python benchmarks/shape_policy.py [--profiles builtin:kimi-k2] [--rows 1 32] [--calibration off] [--json]
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace

import torch
from acceptance_profiles import Memory, new_calibration, one_round

from treetop.bench.modelled_costs import ROWS, costs_of_a_gpu
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.learn import Observed, learn_reference
from treetop.scheduler.policy import AdaptiveShape
from treetop.speculative.profile import BUILTIN, RANKS, profile_names, read_profile
from treetop.speculative.simulation import SimulatedAcceptance
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, SpecShape, shapes_beside
from treetop.types.messages import RoundPlan, RowResult, StepResult
from treetop.types.sampling import SamplingMode

SHAPES = shapes_beside(SpecShape(4, 5, 16))
CONTEXT, FIRST, VOCAB = 500, 100, 1 << 20
NEVER = "never"
_PROBED, _LEARNED, _MEASURED = 256, 16, 24
"""Rows and rounds by which a fixed shape is measured."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Speeds beside plain decoding without a draft. shapes: of the policy's rounds, the most frequent first."""

    profile: str
    rows: int
    best: str
    best_speed: float
    auto_speed: float
    from_the_start: float
    shapes: dict[str, int]

    @property
    def over_best(self) -> float:
        return self.auto_speed / self.best_speed

    def line(self) -> str:
        shapes = "  ".join(f"{shape}: {count}" for shape, count in self.shapes.items())
        return (
            f"{self.profile:>24} {self.rows:5} {self.best:>9} {self.best_speed:7.2f} {self.auto_speed:7.2f}"
            f" {self.over_best:7.3f} {self.from_the_start:7.3f}  {shapes}"
        )


HEADER = f"{'profile':>24} {'rows':>5} {'best':>9} {'speed':>7} {'auto':>7} {'ratio':>7} {'all':>7}  rounds of auto"


def drawn(name: str) -> SimulatedAcceptance:
    """What a profile draws, or what one draws of which the target chooses nothing."""
    profile = read_profile(BUILTIN + "llama-3.1-8b" if name == NEVER else name)
    depths = max(shape.num_steps for shape in SHAPES)
    made = SimulatedAcceptance.make(profile, depths, VOCAB, torch.device("cpu"))
    if name != NEVER:
        return made
    return replace(made, drawn=replace(made.drawn, rank=torch.full_like(made.drawn.rank, RANKS)))


def mean_tokens(simulation: SimulatedAcceptance, shape: SpecShape, learns: bool) -> float:
    """Tokens of a round a row, of a shape that runs alone and has learned what it can."""
    if shape == PLAIN:
        return 1.0
    memory, total = Memory.make(shape, _PROBED), 0.0
    for index in range(_LEARNED + _MEASURED):
        one_round(simulation, index, memory)
        if index >= _LEARNED:
            total += 1 + float(memory.accepted.accept_len.double().mean())
        elif learns:
            _learn(memory)
    return total / _MEASURED


def _learn(memory: Memory) -> None:
    rows = len(memory.growth.tokens)
    learn_reference(memory.calibration, memory.growth, memory.accepted, Observed(torch.arange(rows), rows, None, True))


class Load:
    """Rounds of `rows` rows whose shapes a policy chooses."""

    def __init__(self, simulation: SimulatedAcceptance, rows: int, learns: bool) -> None:
        self._simulation, self._rows, self._learns = simulation, rows, learns
        layout = Layout(SHAPES, 16, ROWS[-1], 1000, 512, (KVGroup(FULL, 1, paired(1, 8)),), 256 * 1024, max_deferred=16)
        self._table, self._layout = costs_of_a_gpu(SHAPES), layout
        self._policy = AdaptiveShape(self._table, layout)
        trees = [shape for shape in SHAPES if shape != PLAIN]
        calibration = new_calibration(max(shape.num_steps for shape in trees), max(shape.topk for shape in trees))
        self._memory = {shape: Memory.make(shape, rows, calibration) for shape in trees}
        self._calibration: Calibration = calibration
        self._deferred = 0
        self.rounds: list[tuple[SpecShape, float, float]] = []  # shape, seconds, tokens a row

    def cost(self, shape: SpecShape) -> float:
        return self._table.seconds(self._rows, shape, CONTEXT)

    def round(self) -> None:
        most = self._layout.max_deferred
        shape = self._policy.choose([CONTEXT] * self._rows, [self._rows, 0, 0], self._deferred)
        behind = self._deferred > 0 if shape != PLAIN else self._deferred == most
        self._deferred = 0 if shape != PLAIN else 1 + (0 if behind else self._deferred)
        seconds = self.cost(shape) + behind * self._table.catch_up_seconds(self._rows, most)
        lengths = [0] * self._rows
        if shape != PLAIN:
            memory = self._memory[shape]
            one_round(self._simulation, len(self.rounds), memory)
            lengths = memory.accepted.accept_len.tolist()
            if self._learns:
                _learn(memory)
        counts = tuple(self._calibration.acceptance.tolist()) if self._learns else None
        rows = tuple(Row(row) for row in range(self._rows))
        plan = RoundPlan((), (), rows, shape, CONTEXT, SamplingMode.GREEDY, catches_up=behind)
        results = [RowResult(row, (0,) * (length + 1), True) for row, length in zip(rows, lengths, strict=True)]
        self._policy.note(plan, StepResult(tuple(results), proposals=counts), seconds)
        self.rounds.append((shape, seconds, 1 + sum(lengths) / self._rows))

    def speed(self, first: int, tokens: dict[SpecShape, float] | None = None) -> float:
        """tokens: the mean of each shape's rounds, in the place of what they gave."""
        part = self.rounds[first:]
        given = sum(gave if tokens is None else tokens[shape] for shape, _, gave in part)
        return self.cost(PLAIN) * given / sum(seconds for _, seconds, _ in part)


def name_of(shape: SpecShape) -> str:
    return shape.text


def figures(name: str, batches: list[int], rounds: int, learns: bool) -> list[Figure]:
    simulation, found = drawn(name), []
    tokens = {shape: mean_tokens(simulation, shape, learns) for shape in SHAPES}
    for rows in batches:
        load = Load(simulation, rows, learns)
        for _ in range(rounds):
            load.round()
        speeds = {shape: tokens[shape] * load.cost(PLAIN) / load.cost(shape) for shape in SHAPES}
        best = max(speeds, key=speeds.__getitem__)
        counts = Counter(name_of(shape) for shape, *_ in load.rounds[FIRST:])
        found.append(
            Figure(
                *(name.removeprefix(BUILTIN), rows, name_of(best), speeds[best]),
                *(load.speed(FIRST, tokens), load.speed(0), dict(counts.most_common())),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=[NEVER, *(BUILTIN + name for name in profile_names())])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=500, help=f"of each load, the first {FIRST} not counted")
    parser.add_argument("--calibration", choices=("learn", "off"), default="learn")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: list[Figure] = []
    if not args.json:
        print(HEADER)
    for name in args.profiles:
        for each in figures(name, args.rows, args.rounds, args.calibration == "learn"):
            found.append(each)
            if not args.json:
                print(each.line(), flush=True)
    least, over_plain = min(found, key=lambda each: each.over_best), min(found, key=lambda each: each.auto_speed)
    if args.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return
    print(f"least against the best fixed shape: {least.over_best:.3f}x, {least.profile}, {least.rows} rows")
    print(f"least against plain decoding: {over_plain.auto_speed:.3f}x, {over_plain.profile}, {over_plain.rows} rows")


if __name__ == "__main__":
    main()
