"""What the host does before a device begins: processor time of admitting requests that are in the prefix cache.

    python benchmarks/admission.py [--rows 128] [--input 1024] [--repeats 9]

No GPU is needed: the real scheduler, and of the engine what comes before the first launch of a step. So many requests
come at once, again and again, with prompts that the cache has; with a draft and `auto`, and plain without, in turns.
Medians of milliseconds of a pass: planning its prefill steps, checking their plans (level 1), and sending them.
"""

import argparse
import json
import random
import time
from statistics import median

import torch

from treetop.bench.modelled_costs import costs_of_a_gpu
from treetop.checks.host import PlanChecker
from treetop.engine.prefill import chunk_columns
from treetop.engine.staging import StagingBuffers
from treetop.engine.state import make_state
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.ids import DRAFT, FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape, shapes_beside
from treetop.types.messages import RowResult, StepPlan, StepResult, prefill_of, round_of
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class Host:
    """A scheduler, and what an engine does with its plans on the host. spent: seconds of prefill steps by part."""

    def __init__(self, rows: int, context: int, auto: bool) -> None:
        shapes = shapes_beside(SpecShape(4, 5, 16)) if auto else (PLAIN,)
        groups = [KVGroup(FULL, 1, paired(1, 8))] + [KVGroup(DRAFT, 1, paired(1, 8))] * auto
        layout = Layout(
            shapes, 16, rows, context, 8192, tuple(groups), 2 * rows * context, 2, max_deferred=32 if auto else 0
        )
        config = EngineConfig(draft="a head" if auto else None)
        costs, prefill_costs = costs_of_a_gpu(shapes) if auto else None, PrefillCosts(512, 2048, 26_600, 1024)
        self.scheduler = Scheduler(layout, config, (), prefill_costs=prefill_costs, costs=costs)
        self._state = make_state(layout, None, 8, None, torch.float32, zeros)
        widths = self._state.setup_widths(layout)
        self._checker, self._staging = (
            PlanChecker(layout),
            StagingBuffers(layout, torch.device("cpu"), zeros, 1, widths),
        )
        self.spent = [0.0, 0.0, 0.0]

    def run(self, prompts: list[tuple[int, ...]], first: int) -> list[float]:
        """A pass: requests of four tokens each, until all have ended."""
        self.spent, out = [0.0, 0.0, 0.0], list[StepPlan]()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.8 * (i % 2))
            self.scheduler.add(EngineRequest(RequestId(first + i), prompt, params, i))
        while self.scheduler.has_work or out:
            while (plan := self._planned()) is not None:
                out.append(plan)
            plan = out.pop(0)
            self.scheduler.commit(plan, _result(plan))
        return self.spent

    def _planned(self) -> StepPlan | None:
        times = [time.process_time()]
        plan = self.scheduler.plan()
        times.append(time.process_time())
        prefill = None if plan is None else prefill_of(plan)
        if plan is None or prefill is None:
            return plan
        self._checker.check(plan)
        times.append(time.process_time())
        setups, chunks = self._state.setup_columns(prefill.setups), chunk_columns(prefill, len(plan.rows))
        edits = self._state.edit_columns(plan.edits)
        self._staging.send(self._staging.take(), rows=[plan.rows], edits=edits, setups=setups, chunks=chunks)
        times.append(time.process_time())
        self.spent = [each + times[i + 1] - times[i] for i, each in enumerate(self.spent)]
        return plan


def _result(plan: StepPlan) -> StepResult:
    prefill, round = prefill_of(plan), round_of(plan)
    rows = [] if prefill is None else [(each.row, each.next_token is None) for each in prefill.chunks]
    rows += [] if round is None else [(row, True) for row in round.rows]
    return StepResult(tuple(RowResult(row, (1,) if ends else (), True) for row, ends in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dice = random.Random(0)
    prompts = [tuple(dice.randrange(1000, 100_000) for _ in range(args.input)) for _ in range(args.rows)]
    hosts = {name: Host(args.rows, 2 * args.input, name == "auto") for name in ("plain", "auto")}
    spent: dict[str, list[list[float]]] = {name: [] for name in hosts}
    for turn in range(args.repeats + 1):
        for name, host in hosts.items():
            spent[name].append(host.run(prompts, turn * args.rows))
    for name, passes in spent.items():
        plan, check, send = (round(1e3 * median(each), 1) for each in zip(*passes[1:], strict=True))
        print(json.dumps({"way": name, "plan_ms": plan, "check_ms": check, "send_ms": send}))


if __name__ == "__main__":
    main()
