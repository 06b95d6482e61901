"""An engine core whose engine counts up: for tests of the host's side alone. One engine has pages, as a device has."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace

from treetop import SamplingParams
from treetop.core.engine_core import EngineCore
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, NULL_PAGE, RequestId
from treetop.types.kv import paired
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.messages import OffloadPlan, PrefillPlan, RowResult, StepResult
from treetop.types.requests import EngineRequest


class CountingEngine:
    """Each token of a request is one more than the one before; a round gives one to four of them."""

    def __init__(self):
        self.last, self.random = {}, random.Random(7)

    def launch(self, plan):
        return plan

    def collect(self, plan):
        if isinstance(plan, OffloadPlan):
            return StepResult()
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


class PagedEngine(CountingEngine):
    """The same, and each token is kept where the page tables say, and read from there: a wrong page is a wrong token.

    As on a device, a step has done its work when `launch` returns, and page tables know no more than edits have told.
    """

    def __init__(self, layout):
        super().__init__()
        self.layout, self.page_size = layout, layout.page_size
        self.tables, self.memory, self.ids = {}, {}, {}
        self.host, self.fetched = {}, {}

    def launch(self, plan):
        if isinstance(plan, OffloadPlan):
            return plan, StepResult(intact=self._offload(plan))
        for edit in plan.edits:
            for column, page in zip(edit.columns, edit.pages, strict=True):
                self.tables[edit.group, edit.row, column] = page
        if isinstance(plan, PrefillPlan):
            for setup in plan.setups:
                self.ids[setup.row] = [*setup.prefix_ids]
            for chunk in plan.chunks:
                assert len(self.ids[chunk.row]) == chunk.start
                self._keep(chunk.row, chunk.token_ids)
        results = [self._row(plan, i, row) for i, row in enumerate(plan.rows)]
        return plan, StepResult(tuple(results))

    def _offload(self, plan):
        """Whole pages go there and come back, and are what they were once they are put together."""
        for each in plan.unpacks:
            assert self.fetched.pop(each) == self.host[each.group, each.host_page], "it changed on its way"
            self._write(each, self.host[each.group, each.host_page])
        for each in plan.saves:
            places = [(each.group, each.page, i) for i in range(self.page_size)]
            self.host[each.group, each.host_page] = [self.memory[place] for place in places]
        for each in plan.fetches:
            self.fetched[each] = self.host[each.group, each.host_page]
        return True

    def _write(self, copy, tokens):
        for i, token in enumerate(tokens):
            self.memory[copy.group, copy.page, i] = token

    def collect(self, launched):
        return launched[1]

    def _row(self, plan, i, row):
        if not isinstance(plan, PrefillPlan):  # the root and what is accepted; the last is the new root
            root, count = self._last(row) + 1, self.random.randint(1, 4)
            self._keep(row, range(root, root + count))
        elif plan.chunks[i].next_token is None:
            count = 1
        else:
            return RowResult(row, (), True)
        new = self._last(row) + 1
        return RowResult(row, tuple(range(new - count + 1, new + 1)), True)

    def _keep(self, row, ids):
        """Write tokens behind those that a row has."""
        start = len(self.ids[row])
        self.ids[row] += ids
        for group in self.layout.groups:
            for position in range(start, start + len(ids)):
                place = self._place(group.name, row, position)
                assert place[1] != NULL_PAGE, f"{group.name}: a token is written to the null page"
                self.memory[place] = self.ids[row][position]

    def _last(self, row):
        """The last token that a row has in its pages, after all that a query sees has been compared."""
        ids = self.ids[row]
        for group in self.layout.groups:
            first = 0 if group.window is None else max(len(ids) - group.window + 1, 0)
            seen = [self.memory.get(self._place(group.name, row, i)) for i in range(first, len(ids))]
            assert seen == ids[first:], f"{group.name}: row {row} reads {seen}, not {ids[first:]}"
        return ids[-1]

    def _place(self, group, row, position):
        column, offset = divmod(position, self.page_size)
        return group, self.tables[group, row, column], offset


def make_core(
    engine=None,
    rows=4,
    max_in_flight=1,
    chunk=64,
    context=512,
    pages=256,
    clock=time.monotonic,
    *,
    prefill_costs=None,
    groups=None,
    host_pages=0,
    **options,
) -> EngineCore:
    """engine: or what makes one for a layout. host_pages: of a tier on the host, if there are any."""
    layout = Layout(
        shapes=(SpecShape(2, 3, 6),),
        page_size=4,
        max_requests=rows,
        max_context=context,
        chunk=chunk,
        groups=groups or (KVGroup(FULL, 1, paired(1, 8)),),
        pool_tokens=4 * pages,
        max_in_flight=max_in_flight,
    )
    if host_pages:
        host = replace(layout, pool_tokens=4 * host_pages, max_requests=host_pages // 8)
        layout = replace(layout, host=host, copied_pages=2)
    config = EngineConfig(max_running_requests=rows, page_size=4, **options)
    engine = engine(layout) if isinstance(engine, type) else engine or CountingEngine()
    return EngineCore(engine, Scheduler(layout, config, [10**6], clock, prefill_costs=prefill_costs))


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
