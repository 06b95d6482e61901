"""The real scheduler under simulated load: a clock that is no clock, and an engine that only takes time.

    python benchmarks/simulated_load.py [--clients 1 8 32 64 128 256] [--input 1024] [--output 128] [--requests 20]
                                        [--options "" "prefill_tokens_per_round=2048" "target_gap_ms=0"] [--json]

A step takes what a `StepCost` says, and steps of one device follow each other. No GPU is needed, and ten minutes of
load take seconds, so policies are compared in it and adversarial loads are driven through it (`tests/scheduler`). The
scheduler's own time is real: `host_us` is the processor time of a step, the median.
"""

import argparse
import json
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

from treetop.bench.modelled_costs import mixed_seconds
from treetop.core.engine_core import EngineCore
from treetop.scheduler.scheduler import Scheduler
from treetop.types.changes import Change, Commit, UpdateWeights
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape
from treetop.types.messages import (
    MixedPlan,
    PrefillPlan,
    RoundPlan,
    RowResult,
    StepPlan,
    StepResult,
    prefill_of,
    round_of,
)
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams

_CONTEXT = 1024
"""Tokens that a row of a tree's round attends to, about."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step. prefill: (tokens, seconds) of measured prefill steps, padding counted, tokens rising; between
    them and beyond them it is linear. attended: as in `PrefillCosts`. round_s, row_s: of a plain round, and of each of
    its rows; of trees `bench.modelled_costs` says what rounds take, and of mixed steps. launch_s: host's, for a prefill
    step, whose launches the device follows one by one. mixed_s: of a mixed step, at least.
    """

    prefill: tuple[tuple[int, float], ...]
    attended: int | None
    round_s: float
    row_s: float
    launch_s: float = 0.0
    mixed_s: float = 0.0

    def of(self, plan: StepPlan, layout: Layout) -> float:
        if isinstance(plan, MixedPlan):
            return self._mixed_s(plan, layout)
        rows = layout.bucket_for(len(plan.rows))
        if isinstance(plan, RoundPlan):
            plain = plan.shape == PLAIN
            return self.round_s + rows * self.row_s if plain else mixed_seconds(rows, plan.shape, _CONTEXT, 0)
        assert isinstance(plan, PrefillPlan)
        tokens, behind = self._work_of(plan, layout)
        return self._prefill_s(tokens) * (1 + behind)

    def _mixed_s(self, plan: MixedPlan, layout: Layout) -> float:
        rows = layout.bucket_for(max(len(plan.round.rows), plan.round.min_rows))
        tokens, behind = self._work_of(plan.prefill, layout)
        attended = mixed_seconds(0, PLAIN, 0, tokens) - mixed_seconds(0, PLAIN, 0, 0)
        least_s = 0.0 if plan.prefill.packed else self.mixed_s  # a captured one waits for no launches
        return max(least_s, mixed_seconds(rows, plan.round.shape, _CONTEXT, tokens)) + behind * attended

    def _work_of(self, plan: PrefillPlan, layout: Layout) -> tuple[int, float]:
        """Tokens with their padding, and what they cost more for those before them."""
        padded = layout.bucket_for(len(plan.chunks)) * max(len(chunk.token_ids) for chunk in plan.chunks)
        tokens = plan.packed or padded
        attended = sum(len(chunk.token_ids) * chunk.start for chunk in plan.chunks) / tokens
        behind = 0.0 if self.attended is None else attended / self.attended
        return tokens, behind

    def _prefill_s(self, tokens: int) -> float:
        at = min(max(bisect_right(self.prefill, (tokens, 0.0)), 1), len(self.prefill) - 1)
        (low, low_s), (high, high_s) = self.prefill[at - 1], self.prefill[at]
        return low_s + (tokens - low) * (high_s - low_s) / (high - low)


H200_8B = StepCost(((0, 0.016), (512, 0.0177), (1024, 0.0240), (2048, 0.0500), (8192, 0.2200)), 26_600, 0.0035, 45e-6)
"""Llama-3.1-8B's shape, plain, one H200: `docs/gpu.md`, and the default server's steps of 512 and 2,048 under load."""
AFFINE_8B = StepCost(((0, 0.0035), (36_000, 1.0035)), 26_600, 0.0035, 45e-6)
"""The same, simplified: 36,000 tokens/s and 3.5 ms a step."""
LATE_HOST_8B = StepCost(((0, 0.0015), (42_000, 1.0015)), 26_600, 0.0035, 45e-6, launch_s=0.015)
"""A device without a floor, and a host that takes 15 ms to launch a prefill step, and so learns late that the round
before it has ended."""
FLOOR_8B = replace(H200_8B, mixed_s=0.016)
"""As the first, with mixed steps whose launches the device follows one by one, as it does those of prefill steps."""
CAPTURED_8B = replace(
    H200_8B, prefill=((0, 0.0035), *((n, mixed_seconds(0, PLAIN, 0, n)) for n in (64, 128, 256, 512, 8192)))
)
"""As the first, were small prefill steps captured too."""
COSTS = {
    "h200-8b": H200_8B,
    "floor-8b": FLOOR_8B,
    "affine-8b": AFFINE_8B,
    "late-host-8b": LATE_HOST_8B,
}


class SimulatedEngine:
    """Takes the time of a step and gives each row a token, or in rounds of a tree so many in the mean. `now_s` is the
    clock of all who take part."""

    def __init__(self, cost: StepCost, layout: Layout, accept_length: float = 1.0) -> None:
        self.now_s = self.busy_s = self._free_s = 0.0
        self._cost, self._layout, self._accept_length, self._dice = cost, layout, accept_length, random.Random(0)

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        cost_s, begun_s = self._cost.of(plan, self._layout), max(self._free_s, self.now_s)
        self.now_s += 0.0 if prefill_of(plan) is None else self._cost.launch_s
        self._free_s = max(begun_s + cost_s, self.now_s)
        self.busy_s += cost_s
        return plan, self._free_s

    def collect(self, in_flight: tuple[StepPlan, float]) -> StepResult:
        plan, end_s = in_flight
        self.now_s = max(self.now_s, end_s)
        prefill, round = prefill_of(plan), round_of(plan)
        chunks = () if prefill is None else prefill.chunks
        results = [RowResult(each.row, (1,) if each.next_token is None else (), True) for each in chunks]
        for row in () if round is None else round.rows:
            count = int(self._accept_length + self._dice.random()) if round is not None and round.shape != PLAIN else 1
            results.append(RowResult(row, (1,) * count, True, ranks=(0,) * (count - 1)))
        return StepResult(tuple(results))

    def prepare(self, change: Change) -> Commit:
        raise NotImplementedError

    def drop(self, change: Change) -> None:
        raise NotImplementedError

    def lacks_room(self, change: UpdateWeights) -> bool:
        raise NotImplementedError


class Arrival(NamedTuple):
    """A request: when it comes, its prompt's tokens, the tokens that it gets, and whose it is."""

    at_s: float
    prompt: int
    output: int
    kind: str = ""


@dataclass(slots=True)
class Seen:
    """What a client saw of its request: when each token came."""

    arrival: Arrival
    token_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.token_s[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


class Simulation:
    """A scheduler, and clients that may come again when their requests end."""

    def __init__(
        self,
        cost: StepCost = H200_8B,
        rows: int = 256,
        chunk: int = 8192,
        context: int = 33_000,
        shape: SpecShape = PLAIN,
        accept_length: float = 1.0,
        prompt_sizes: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """prompt_sizes: of captured mixed steps; see `Layout`. options: of `EngineConfig`; a target for gaps of 50 ms
        where they name none.
        """
        self._layout = Layout(
            shapes=(shape,),
            page_size=16,
            max_requests=rows,
            max_context=context,
            chunk=chunk,
            groups=(KVGroup(FULL, 1, paired(1, 8)),),
            pool_tokens=rows * 4096 + 16 * context,
            max_in_flight=2,
            prompt_sizes=tuple(prompt_sizes),
            prefill_blocks=(64, 16),
        )
        self.engine: SimulatedEngine = SimulatedEngine(cost, self._layout, accept_length)
        if shape != PLAIN:
            k, s, t = shape.topk, shape.num_steps, shape.num_draft_tokens
            options |= {"draft": "a head", "speculative_eagle_topk": k, "speculative_num_steps": s}
            options["speculative_num_draft_tokens"] = t
        config = EngineConfig(disable_radix_cache=True, check_level=0, **{"target_gap_ms": 50.0, **options})
        prefill_costs = PrefillCosts(512, 2048, cost.attended, 1024)
        scheduler = Scheduler(self._layout, config, (), clock=lambda: self.engine.now_s, prefill_costs=prefill_costs)
        self.begin(EngineCore(self.engine, scheduler))

    def begin(self, core: EngineCore[Any]) -> None:
        """Nobody has come yet."""
        self.core, self.host_s = core, list[float]()
        self._coming: list[tuple[Arrival, int]] = []
        self._seen: dict[RequestId, Seen] = {}
        self._count = 0

    @property
    def now_s(self) -> float:
        return self.engine.now_s

    def come(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self._count += 1
            heappush(self._coming, (arrival, self._count))

    def run(self, until_s: float, again: Callable[[Seen, float], Arrival | None] | None = None) -> Iterator[Seen]:
        """Requests as they end, until then or until nothing is left. again: what comes when one has ended."""
        core, engine = self.core, self.engine
        while engine.now_s < until_s and (self._coming or core.busy):
            if not core.busy:
                engine.now_s = max(engine.now_s, self._coming[0][0].at_s)
            while self._coming and self._coming[0][0].at_s <= engine.now_s:
                self._add(*heappop(self._coming))
            began_s = time.thread_time()
            updates = core.step()
            self.host_s.append(time.thread_time() - began_s)
            for update in updates:
                seen = self._seen[update.request_id]
                assert update.error is None, update.error
                seen.token_s += [engine.now_s] * len(update.new_ids)
                if update.finish_reason is not None:
                    del self._seen[update.request_id]
                    yield seen
                    follows = None if again is None else again(seen, engine.now_s)
                    if follows is not None:
                        self.come([follows])

    def streams(self) -> list[Seen]:
        """Requests that have not ended."""
        return [*self._seen.values()]

    def _add(self, arrival: Arrival, number: int) -> None:
        asked = RequestId(number)
        self._seen[asked] = Seen(arrival)
        prompt = (2,) * arrival.prompt
        params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
        self.core.add(EngineRequest(asked, prompt, params, 0))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load: tokens a second, milliseconds; the first fifth and the last are left out of the rate."""

    tokens_per_s: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    mean_token: float


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def figures(all_seen: Sequence[Seen]) -> Figures:
    """Requests that began within the middle of the load."""
    ends = max(each.token_s[-1] for each in all_seen)
    seen = [each for each in all_seen if 0.2 * ends <= each.arrival.at_s <= 0.8 * ends] or all_seen
    tokens = sorted(at for each in all_seen for at in each.token_s)
    middle = [at for at in tokens if 0.2 * ends <= at <= 0.8 * ends]
    first, gaps = [each.first_s for each in seen], [gap for each in seen for gap in each.gaps_s]
    means = [(each.token_s[-1] - each.token_s[0]) / (len(each.token_s) - 1) for each in seen if len(each.token_s) > 1]
    gap_ms = [round(1000 * quantile(gaps, share), 1) for share in (0.5, 0.99, 1.0)]
    return Figures(
        tokens_per_s=len(middle) / (0.6 * ends),
        first_p50=round(1000 * quantile(first, 0.5), 1),
        first_p99=round(1000 * quantile(first, 0.99), 1),
        gap_p50=gap_ms[0],
        gap_p99=gap_ms[1],
        gap_max=gap_ms[2],
        mean_token=round(1000 * statistics.mean(means), 2) if means else 0.0,
    )


def closed_loop(
    simulation: Simulation, clients: int, prompt: int, output: int, requests: int, spread: float = 0.1, seed: int = 0
) -> list[Seen]:
    """Clients that ask again as soon as they have their answer, `requests` times each; they begin within a second.

    spread: prompts and outputs lie within this share of the means.
    """
    dice, left = random.Random(seed), {str(client): requests - 1 for client in range(clients)}

    def about(mean: int) -> int:
        return max(round(mean * dice.uniform(1 - spread, 1 + spread)), 1)

    def again(seen: Seen, now_s: float) -> Arrival | None:
        client = seen.arrival.kind
        left[client] -= 1
        return Arrival(now_s + 0.001, about(prompt), about(output), client) if left[client] >= 0 else None

    simulation.come(Arrival(dice.random(), about(prompt), about(output), client) for client in left)
    return list(simulation.run(1e9, again))


def _options_of(text: str) -> dict[str, Any]:
    pairs = (each.partition("=") for each in text.split(",") if each)
    return {name.strip(): json.loads(value) for name, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--requests", type=int, default=20, help="of each client")
    parser.add_argument("--spread", type=float, default=0.1, help="of lengths around their means")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--costs", choices=list(COSTS), default="h200-8b")
    parser.add_argument("--shape", default="0,1,1", help="of rounds, S,k,T")
    parser.add_argument("--accept-length", type=float, default=1.0, help="tokens of a row in a round, in the mean")
    parser.add_argument("--prompt-sizes", type=int, nargs="*", default=(), help="of captured mixed steps")
    parser.add_argument("--options", nargs="+", default=[""], help="options of the engine, name=value,name=value")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for options in args.options:
        for clients in args.clients:
            shape = SpecShape.parse(args.shape, "--shape")
            drafts = {"shape": shape, "accept_length": args.accept_length, "prompt_sizes": args.prompt_sizes}
            simulation = Simulation(COSTS[args.costs], args.rows, **{**drafts, **_options_of(options)})
            got = figures(closed_loop(simulation, clients, args.input, args.output, args.requests, args.spread))
            host_us = round(1e6 * statistics.median(simulation.host_s), 1)
            results.append({"options": options or "default", "clients": clients, **asdict(got), "host_us": host_us})
            if not args.json:
                if len(results) == 1:
                    print(f"{'options':>34} clients  tok/s  first p50    p99  gap p50    p99    max  ms/token  host us")
                print(
                    f"{options or 'default':>34} {clients:7} {got.tokens_per_s:6.0f} {got.first_p50:10.0f}"
                    f" {got.first_p99:6.0f} {got.gap_p50:8.1f} {got.gap_p99:6.1f} {got.gap_max:6.1f}"
                    f" {got.mean_token:9.2f} {host_us:8.1f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
