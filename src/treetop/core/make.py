"""Makes cores: of a model, or a mock of one that replays tokens at a fixed rate and needs no weights."""

import random
import time
from dataclasses import dataclass
from typing import Any

from treetop.core.engine_core import EngineCore
from treetop.core.wire import CoreInfo, MockOptions
from treetop.engine.build import make_layout
from treetop.engine.engine import Engine
from treetop.models.loader import resolve_folder
from treetop.models.spec import target_spec
from treetop.scheduler.scheduler import Scheduler
from treetop.server.tokenizer import extra_eos_ids
from treetop.types.config import EngineConfig
from treetop.types.layout import Layout
from treetop.types.messages import PrefillPlan, RowResult, StepPlan, StepResult


def make_core(config: EngineConfig) -> tuple[EngineCore[Any], CoreInfo]:
    """A core of this configuration. Raises UserError for what cannot work, before any weight is read if it can."""
    engine = Engine(config)
    eos_ids = (*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path))
    info = CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=engine.layout.max_context,
        max_requests=engine.layout.max_requests,
        num_steps=config.shape.num_steps,
    )
    return EngineCore(engine, Scheduler(engine.layout, config, eos_ids)), info


def make_mock(config: EngineConfig, mock: MockOptions) -> tuple[EngineCore[Any], CoreInfo]:
    """A core whose engine is a `MockEngine`; of the model only the configuration is read. Raises UserError."""
    folder = resolve_folder(config.model)
    spec = target_spec(folder)
    layout = make_layout(config, spec, None, Layout)
    info = CoreInfo(
        model_path=str(folder),
        vocab_size=spec.vocab_size,
        max_context=layout.max_context,
        max_requests=layout.max_requests,
        num_steps=layout.commit_width - 1,
    )
    return EngineCore(MockEngine(mock), Scheduler(layout, config, ())), info


@dataclass(frozen=True, slots=True)
class _Due:
    plan: StepPlan
    at_s: float


class MockEngine:
    """Replays `options.stream` for every request, from its beginning, at most `options.tokens` tokens a round.

    Steps take `options.step_s` seconds each, one after the other. How many tokens a round gives a row is drawn at
    random, the same in every run.
    """

    def __init__(self, options: MockOptions) -> None:
        self._options, self._random = options, random.Random(0)
        self._emitted: dict[int, int] = {}  # by row
        self._free_s = 0.0

    def launch(self, plan: StepPlan) -> _Due:
        self._free_s = max(self._free_s, time.monotonic()) + self._options.step_s
        return _Due(plan, self._free_s)

    def collect(self, ticket: _Due) -> StepResult:
        left = ticket.at_s - time.monotonic()
        if left > 0:
            time.sleep(left)
        plan = ticket.plan
        if isinstance(plan, PrefillPlan):
            return StepResult(tuple(self._first(chunk.row, chunk.next_token is None) for chunk in plan.chunks))
        most = min(self._options.tokens, plan.shape.commit_width)
        return StepResult(tuple(self._next(row, self._random.randint(1, most)) for row in plan.rows))

    def _first(self, row: int, ends: bool) -> RowResult:
        self._emitted[row] = 0
        return self._next(row, int(ends))

    def _next(self, row: Any, count: int) -> RowResult:
        stream, start = self._options.stream, self._emitted[row]
        self._emitted[row] = start + count
        return RowResult(row, tuple(stream[i % len(stream)] for i in range(start, start + count)), True)
