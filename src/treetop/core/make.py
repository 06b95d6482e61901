"""A core around what runs a model: an engine of this process, alone or as the first rank of a group."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from treetop.core.engine_core import EngineCore, StepEngine
from treetop.engine.engine import Engine
from treetop.models.folder import extra_eos_ids
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.requests import CoreInfo, PrefixPages
from treetop.types.sampling import MOST_LOGPROBS


class OpenCore(NamedTuple):
    """engine: of this process. next_logits: see `Engine`. close: when the core is done with; any number of times."""

    core: EngineCore[Any]
    info: CoreInfo
    engine: Engine
    next_logits: Callable[[list[int]], Tensor]
    close: Callable[[], object]


def open_core(config: EngineConfig) -> OpenCore:
    """Start what a configuration asks for. Raises UserError for what cannot work, EngineError for a rank that fails."""
    if config.tp_size == 1:
        engine = Engine(config)
        return _around(engine, engine, engine.next_logits, _nothing)
    try:
        from treetop.core.worker_group import WorkerGroup  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tp-size {config.tp_size} needs {error.name}: install treetop[serve]") from None
    group = WorkerGroup(config)
    return _around(group, group.engine, group.next_logits, group.close)


def _around(
    runs: StepEngine[Any], engine: Engine, next_logits: Callable[[list[int]], Tensor], close: Callable[[], object]
) -> OpenCore:
    config, layout = engine.config, engine.layout
    eos_ids = (*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path))
    info = CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=layout.max_context,
        max_requests=layout.max_requests,
        shape=config.shape,
        by_priority=config.schedule_policy == "priority",
        can_change_logits=not config.disable_logits_processors,
        max_logprobs=MOST_LOGPROBS,
        eos_ids=eos_ids,
        prefix=None if config.disable_radix_cache else PrefixPages.of(layout),
    )
    return OpenCore(EngineCore(runs, Scheduler(layout, config, eos_ids)), info, engine, next_logits, close)


def _nothing() -> None:
    """One engine ends with whoever holds it."""
