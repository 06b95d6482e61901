"""A mock of an engine: replays tokens at a fixed rate, needs no weights and no PyTorch.

The scheduler, the process and the messages around it are the real ones.
"""

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.json_file import MAX_TOKENS, read_object
from treetop.core.engine_core import EngineCore
from treetop.core.wire import MockOptions
from treetop.scheduler.scheduler import Scheduler
from treetop.types.changes import Change, Commit, UpdateWeights, asked_as
from treetop.types.config import PAGE_SIZE, EngineConfig
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import KVGroup, Layout
from treetop.types.messages import PrefillPlan, RowResult, StepPlan, StepResult, WholePlan, parts_of_plan
from treetop.types.requests import CoreInfo, PrefixPages

_CHUNK, _ROWS = 2048, 64


@dataclass(frozen=True, slots=True)
class _Due:
    plan: StepPlan
    at_s: float


class MockEngine:
    """The token at position p of any request is `options.stream[p % len]`, so a retracted request goes on as it was.

    Steps take `options.step_s` seconds each, one after the other. How many tokens a round gives a row is drawn at
    random, the same in every run.
    """

    def __init__(self, options: MockOptions) -> None:
        self._options, self._random = options, random.Random(0)
        self._position: dict[Row, int] = {}
        self._free_s = 0.0

    def launch(self, plan: StepPlan) -> _Due:
        self._free_s = max(self._free_s, time.monotonic()) + self._options.step_s
        return _Due(plan, self._free_s)

    def collect(self, in_flight: _Due) -> StepResult:
        left_s = in_flight.at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return StepResult(tuple(row for part in parts_of_plan(in_flight.plan) for row in self._of(part)))

    def prepare(self, change: Change) -> Commit:
        raise ConfigError(f"{asked_as(change)}: --mock has no weights; leave it out")

    def drop(self, change: Change) -> None:
        return

    def lacks_room(self, change: UpdateWeights) -> bool:
        return False

    def _of(self, plan: WholePlan) -> list[RowResult]:
        if isinstance(plan, PrefillPlan):
            for chunk in plan.chunks:
                self._position[chunk.row] = chunk.start + len(chunk.token_ids)
            return [self._next(chunk.row, int(chunk.next_token is None)) for chunk in plan.chunks]
        minimum, maximum = self._options.minimum, self._options.maximum
        return [self._next(row, self._random.randint(minimum, maximum)) for row in plan.rows]

    def _next(self, row: Row, count: int) -> RowResult:
        stream, start = self._options.stream, self._position[row]
        self._position[row] = start + count
        tokens = tuple(stream[i % len(stream)] for i in range(start, start + count))
        return RowResult(row, tokens, True, ranks=(0,) * (count - 1))


def make_mock(config: EngineConfig, mock: MockOptions) -> tuple[EngineCore[_Due], CoreInfo]:
    """A core whose engine is a `MockEngine`. Of the model only two numbers of `config.json` are read.

    Its tree is a chain of `mock.maximum` tokens, whatever the configuration's is. Raises UserError.
    """
    folder = resolve_folder(config.model)
    vocab_size, positions = (_positive(folder, key) for key in ("vocab_size", "max_position_embeddings"))
    context = config.context_length or positions
    if context > positions:
        raise ConfigError(f"--context-length {context} exceeds the model's {positions} positions")
    config = replace(
        config,
        draft="mock" if mock.maximum > 1 else None,
        speculative_algorithm=None,
        speculative_eagle_topk=1,
        speculative_num_steps=max(mock.maximum - 1, 1),
        speculative_num_draft_tokens=max(mock.maximum, 2),
        speculative_policy="fixed",
        speculative_shapes=None,
        simulate_accept_length=None,
        simulate_acceptance=None,
    )
    layout = Layout(
        shapes=(config.shape,),
        page_size=config.page_size or PAGE_SIZE,
        max_requests=config.max_running_requests or _ROWS,
        max_context=context,
        chunk=config.chunked_prefill_size or _CHUNK,
        groups=(KVGroup(FULL, 1, paired(1, 8)),),
        pool_tokens=config.max_total_tokens or 0,
        max_in_flight=1 if config.overlap is False else 2,
    )
    if config.max_total_tokens is None:
        layout = replace(layout, pool_tokens=layout.tokens_for_all)
    layout.validate()
    info = CoreInfo(
        str(folder),
        vocab_size,
        context,
        layout.max_requests,
        config.shape,
        by_priority=config.schedule_policy == "priority",
        prefix=None if config.disable_radix_cache else PrefixPages.of(layout),
        exactness="ties" if config.exactness == "auto" else config.exactness,
        loras=tuple(config.adapters),
        lora_versions=(1,) * len(config.adapters),
    )
    return EngineCore(MockEngine(mock), Scheduler(layout, config, ())), info


def _positive(folder: Path, key: str) -> int:
    value = read_object(folder / "config.json").get(key)
    if not isinstance(value, int) or not 0 < value <= MAX_TOKENS:
        raise CheckpointError(
            f"{folder}/config.json: {key} must be an integer from 1 to {MAX_TOKENS}, got {value!r:.200}"
        )
    return value
