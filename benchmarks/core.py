"""Host time of a round: scheduler and engine core over an engine that answers at once.

    python benchmarks/core.py [--rows 64] [--tokens 3] [--rounds 1000] [--overlap] [--json]

Prints microseconds of processor time a round: median and middle half of the core alone, and the mean with its thread,
queues and a client that reads ids.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

from treetop.core.engine_core import EngineCore
from treetop.core.loop import CoreThread, SyncClient
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.messages import PrefillPlan, RowResult, StepPlan, StepResult
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams

CONTEXT = 65536


@dataclass(frozen=True, slots=True)
class InstantEngine:
    """Every round gives every row the same tokens."""

    tokens: tuple[int, ...]

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        tokens = self.tokens[:1] if isinstance(plan, PrefillPlan) else self.tokens
        return StepResult(tuple(RowResult(row, tokens, True) for row in plan.rows))

    def update_weights(self, model: str | None, draft: str | None) -> None:
        raise NotImplementedError


def make_core(rows: int, tokens: int, max_in_flight: int) -> EngineCore[StepPlan]:
    config = EngineConfig(max_running_requests=rows, chunked_prefill_size=rows, page_size=16)
    layout = Layout(
        shapes=(SpecShape(4, 5, 16),),
        page_size=16,
        max_requests=rows,
        max_context=CONTEXT,
        chunk=rows,
        groups=(KVGroup(FULL, 1, paired(1, 8)),),
        pool_tokens=rows * CONTEXT * 2,
        max_in_flight=max_in_flight,
    )
    return EngineCore(InstantEngine(tuple(range(3, 3 + tokens))), Scheduler(layout, config, [2]))


def asked(rows: int, rounds: int, tokens: int) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=min(rounds * tokens, CONTEXT // 2))
    return [EngineRequest(RequestId(i), (5,), params, 0) for i in range(rows)]


def alone(rows: int, tokens: int, rounds: int, max_in_flight: int) -> list[float]:
    """Processor time in microseconds of each round that all rows took part in, without thread or queues."""
    core, times = make_core(rows, tokens, max_in_flight), []
    for request in asked(rows, rounds, tokens):
        core.add(request)
    while core.busy:
        started = time.thread_time()
        updates = core.step()
        elapsed = time.thread_time() - started
        if len(updates) == rows and all(update.accept_len is not None for update in updates):
            times.append(elapsed * 1e6)
    return times[len(times) // 10 :]


def through_the_thread(rows: int, tokens: int, rounds: int, max_in_flight: int) -> float:
    """Processor time in microseconds a round, from the first update to the last, with one client that reads ids."""
    thread, num_updates = CoreThread(make_core(rows, tokens, max_in_flight)), 0
    with SyncClient(thread) as client:
        client.add(asked(rows, rounds, tokens))
        left, started = rows, time.process_time()
        while left:
            updates = client.get()
            num_updates += len(updates)
            left -= sum(update.finish_reason is not None for update in updates)
        elapsed = time.process_time() - started
    thread.close()
    return elapsed / (num_updates / rows) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=3, help="tokens that a round gives a row")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    max_in_flight = 2 if args.overlap else 1
    times = alone(args.rows, args.tokens, args.rounds, max_in_flight)
    low, middle, high = statistics.quantiles(times, n=4)
    report = {
        "rows": args.rows,
        "tokens": args.tokens,
        "rounds": len(times),
        "us_median": round(middle, 1),
        "us_quartiles": [round(low, 1), round(high, 1)],
        "us_with_thread_and_queue": round(through_the_thread(args.rows, args.tokens, args.rounds, max_in_flight), 1),
    }
    print(json.dumps(report) if args.json else "\n".join(f"{name:26} {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
