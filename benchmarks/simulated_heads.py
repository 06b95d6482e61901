"""Shapes by load with prompts counted in: `auto`, fixed shapes and plain decoding under the same simulated clients.

    python benchmarks/simulated_heads.py [--profiles builtin:llama-3.1-8b benchmarks/profiles/mediocre.json ..]
                                         [--clients 1 8 32 64 128 64 32 8 1] [--known] [--shapes 2,1,3 5,4,16]
    python benchmarks/simulated_heads.py --clients 64 128 32 8 64 128 32 8 64 --requests 1 --within 0.1 --noise 0.03

The real scheduler and policy run on a clock of their own, as in `simulated_load.py`. Rounds cost what
`bench.modelled_costs` says by rows, shape and the context that rows have in the mean; prefill steps what an H200 took;
the draft `--draft-us` more for each prompt token that it reads and `--draft-ms` for each step in which it reads any.
What is accepted is drawn from the profile's chances. One engine serves all loads of `--clients` one after another.
Clients come at once, or as over HTTP `--within` some seconds; times vary by `--noise`.

Prints tokens/s of plain decoding, and each way beside it.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulated_load import H200_8B, Arrival, Seen, SimulatedEngine, Simulation

from treetop.bench.drawn_head import DrawnHead
from treetop.bench.modelled_costs import costs_of_a_gpu
from treetop.core.engine_core import EngineCore
from treetop.scheduler.scheduler import Scheduler
from treetop.speculative.profile import read_profile
from treetop.types.config import EngineConfig
from treetop.types.costs import HeadAcceptance
from treetop.types.ids import DRAFT, FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape, shapes_beside
from treetop.types.messages import PrefillPlan, RoundPlan, RowResult, StepPlan, StepResult, prefill_of, round_of

SHAPES = shapes_beside(SpecShape(4, 5, 16))
TABLE = costs_of_a_gpu(SHAPES)
PROFILES = ("builtin:llama-3.1-8b", "benchmarks/profiles/mediocre.json", "benchmarks/profiles/useless.json")
REQUESTS = {1: 12, 8: 6, 32: 6, 64: 5, 128: 4, 256: 3}
"""Of each of so many clients."""
_MAX_CONTEXT, _MAX_DEFERRED = 2048, 32


class HeadEngine(SimulatedEngine):
    """Its trees get what a head's get. reads: seconds for each prompt token that the draft reads, and for a step in
    which it reads any; None without a draft. read_s: what that took."""

    def __init__(
        self, layout: Layout, head: DrawnHead, reads: tuple[float, float] | None, noise: float = 0.0, seed: int = 0
    ) -> None:
        """noise: standard deviation of the logarithm of what steps take."""
        super().__init__(H200_8B, layout)
        self._head, self._reads, self.read_s = head, reads, 0.0
        self._noise, self._dice = noise, random.Random(seed)
        self._context, self._deferred = dict[Row, int](), dict[Row, int]()

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self._free_s = max(self._free_s, self.now_s) + self._seconds(plan) * self._dice.lognormvariate(0.0, self._noise)
        return plan, self._free_s

    def collect(self, in_flight: tuple[StepPlan, float]) -> StepResult:
        plan, end_s = in_flight
        self.now_s, prefill, round = max(self.now_s, end_s), prefill_of(plan), round_of(plan)
        chunks = () if prefill is None else prefill.chunks
        results = [RowResult(each.row, (1,) if each.next_token is None else (), True) for each in chunks]
        if round is None:
            return StepResult(tuple(results))
        for row in round.rows:
            path = self._head.path(round.shape) if row not in round.no_draft else ()
            results.append(RowResult(row, (1,) * (1 + len(path)), True, ranks=path))
            self._context[row] += 1 + len(path)
        return StepResult(tuple(results), proposals=None if round.shape == PLAIN else self._head.counts())

    def _seconds(self, plan: StepPlan) -> float:
        if isinstance(plan, RoundPlan):
            return self._round_seconds(plan)
        assert isinstance(plan, PrefillPlan)
        read = 0
        for each in plan.chunks:
            self._context[each.row], self._deferred[each.row] = each.start + len(each.token_ids), 0
            read += len(each.token_ids) if each.row not in plan.no_draft else 0
        read_s = read * self._reads[0] + self._reads[1] if self._reads is not None and read else 0.0
        self.read_s += read_s
        return H200_8B.of(plan, self._layout) + read_s

    def _round_seconds(self, plan: RoundPlan) -> float:
        rows = self._layout.bucket_for(max(len(plan.rows), plan.min_rows))
        seconds = TABLE.seconds(rows, plan.shape, statistics.mean(self._context[row] for row in plan.rows))
        drafting = [row for row in plan.rows if row not in plan.no_draft] if self._layout.max_deferred else []
        late = max((self._deferred[row] for row in drafting), default=0)
        if late and (plan.catches_up or plan.shape != PLAIN):
            seconds += TABLE.catch_up_seconds(self._layout.bucket_for(len(drafting)), late)
            self._deferred.update(dict.fromkeys(drafting, 0))
        for row in drafting:
            self._deferred[row] = self._deferred[row] + 1 if plan.shape == PLAIN else 0
        return seconds


class HeadSimulation(Simulation):
    """way: plain, auto, or a shape of all rounds. known: what `auto` thinks of the head at first. noise: see
    `HeadEngine`.
    """

    def __init__(
        self,
        way: str,
        head: HeadAcceptance,
        known: HeadAcceptance,
        reads: tuple[float, float],
        rows: int = 256,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        fixed = PLAIN if way == "plain" else SpecShape.parse(way, "--shapes") if way != "auto" else SHAPES[-1]
        groups = [KVGroup(name, 1, paired(1, 8)) for name in (FULL, *([DRAFT] if way != "plain" else []))]
        self._layout = Layout(
            shapes=SHAPES if way == "auto" else (fixed,),
            page_size=16,
            max_requests=rows,
            max_context=_MAX_CONTEXT,
            chunk=8192,
            groups=tuple(groups),
            pool_tokens=rows * (_MAX_CONTEXT + 256),
            max_in_flight=2,
            max_deferred=_MAX_DEFERRED if way == "auto" else 0,
        )
        self.engine = HeadEngine(self._layout, DrawnHead(head, seed), None if way == "plain" else reads, noise, seed)
        k, s, t = fixed.topk, fixed.num_steps, fixed.num_draft_tokens
        shape = {"speculative_eagle_topk": k, "speculative_num_steps": s, "speculative_num_draft_tokens": t}
        options: dict[str, Any] = {} if way == "plain" else {"draft": "a head", **shape}
        self.scheduler = Scheduler(
            self._layout,
            EngineConfig(disable_radix_cache=True, check_level=0, **options),
            (),
            clock=lambda: self.engine.now_s,
            prefill_costs=PrefillCosts(512, 2048, H200_8B.attended, 1024),
            costs=TABLE if way == "auto" else None,
            head=lambda: known,
        )
        self.begin(EngineCore(self.engine, self.scheduler))

    def rate(
        self,
        clients: int,
        requests: int,
        prompt: Sequence[int],
        output: Sequence[int],
        seed: int,
        within_s: float = 0.0,
    ) -> float:
        """Tokens a second of as many clients, each of which asks so often, at once when it has its answer. prompt,
        output: least and most tokens. within_s: in which 64 clients begin, and others in proportion.
        """
        left, began_s = {str(each): requests for each in range(clients)}, self.now_s
        dice = {client: random.Random(f"{seed} {client}") for client in left}  # so that all ways get the same requests

        def next_of(client: str, now_s: float) -> Arrival | None:
            left[client] -= 1
            sizes = dice[client].randint(*prompt), dice[client].randint(*output)
            return Arrival(now_s, *sizes, client) if left[client] >= 0 else None

        order = random.Random(f"{seed} order")
        come_s = {client: began_s + order.random() * within_s * clients / 64 for client in left}
        self.come(filter(None, [next_of(client, come_s[client]) for client in left]))

        def again(seen: Seen, now_s: float) -> Arrival | None:
            return next_of(seen.arrival.kind, now_s)

        return sum(len(each.token_s) for each in self.run(1e9, again)) / (self.now_s - began_s)


def head_of_profile(name: str) -> HeadAcceptance:
    profile = read_profile(name)
    return HeadAcceptance(profile.chances, profile.share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=PROFILES)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64, 128, 64, 32, 8, 1])
    parser.add_argument("--shapes", nargs="*", default=["2,1,3", "3,1,4", "5,4,16"])
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 1024))
    parser.add_argument("--max-tokens", type=int, nargs=2, default=(64, 160))
    parser.add_argument("--draft-us", type=float, default=1.0, help="of each prompt token that the draft reads")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="of each prefill step in which it reads any")
    parser.add_argument("--requests", type=int, help="of each client")
    parser.add_argument("--within", type=float, default=0.0, help="seconds in which 64 clients begin")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of what steps take")
    parser.add_argument("--known", action="store_true", help="auto begins with the head's chances, not a default's")
    args = parser.parse_args()
    reads, plain = (args.draft_us / 1e6, args.draft_ms / 1e3), list[float]()
    for name in args.profiles:
        head = head_of_profile(Path(name).as_posix())
        print(f"{name}: clients, plain tokens/s, and over it: auto, {', '.join(args.shapes)}", flush=True)
        ways = {way: list[float]() for way in ("auto", *args.shapes)}
        for way in [*([] if plain else ["plain"]), *ways]:
            simulation = HeadSimulation(way, head, head if args.known else HeadAcceptance(), reads, noise=args.noise)
            for step, clients in enumerate(args.clients):
                asks = args.requests or REQUESTS.get(clients, 4)
                rate = simulation.rate(clients, asks, args.prompt_tokens, args.max_tokens, step, args.within)
                (plain if way == "plain" else ways[way]).append(rate)
        for step, clients in enumerate(args.clients):
            beside = "  ".join(f"{rates[step] / plain[step]:.3f}" for rates in ways.values())
            print(f"{clients:5} {plain[step]:7.0f}  {beside}", flush=True)


if __name__ == "__main__":
    main()
