"""An engine core whose engine counts up: for tests of the host's side alone."""

import random
import time
from collections.abc import Iterator

from treetop import SamplingParams
from treetop.core.engine_core import EngineCore
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.messages import PrefillPlan, RowResult, StepResult
from treetop.types.requests import EngineRequest


class CountingEngine:
    """Each token of a request is one more than the one before; a round gives one to four of them."""

    def __init__(self):
        self.last, self.random = {}, random.Random(7)

    def launch(self, plan):
        return plan

    def collect(self, plan):
        return StepResult(tuple(self._row(plan, i, row) for i, row in enumerate(plan.rows)))

    def _row(self, plan, i, row):
        if isinstance(plan, PrefillPlan):
            chunk = plan.chunks[i]
            self.last[row] = chunk.token_ids[-1]
            count = int(chunk.next_token is None)
        else:
            count = self.random.randint(1, 4)
        new = tuple(range(self.last[row] + 1, self.last[row] + 1 + count))
        self.last[row] += count
        return RowResult(row, new, True)


def make_core(
    engine=None,
    rows=4,
    max_in_flight=1,
    chunk=64,
    context=512,
    pages=256,
    clock=time.monotonic,
    *,
    pace=None,
    **options,
) -> EngineCore:
    layout = Layout(
        shapes=(SpecShape(2, 3, 6),),
        page_size=4,
        max_requests=rows,
        max_context=context,
        chunk=chunk,
        groups=(KVGroup(FULL, 1, paired(1, 8)),),
        pool_tokens=4 * pages,
        max_in_flight=max_in_flight,
    )
    config = EngineConfig(max_running_requests=rows, page_size=4, **options)
    return EngineCore(engine or CountingEngine(), Scheduler(layout, config, [10**6], clock, pace=pace))


def ask(number, prompt, max_tokens=20, priority=0, timeout_s=None, **params) -> EngineRequest:
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    return EngineRequest(RequestId(number), tuple(prompt), chosen, 0, priority, timeout_s)


def drained(core, limit=10_000) -> Iterator:
    for _ in range(limit):
        if not core.busy:
            return
        yield from core.step()
    raise AssertionError("the core did not come to an end")


def collected(updates) -> tuple[dict, dict]:
    """Ids and last update of each request."""
    ids, last = {}, {}
    for update in updates:
        assert update.request_id not in last or last[update.request_id].finish_reason is None
        ids.setdefault(update.request_id, []).extend(update.new_ids)
        last[update.request_id] = update
    return ids, last
