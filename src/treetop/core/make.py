"""A core around what runs a model: an engine of this process, alone or as a group's first rank, or other processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from treetop.core.engine_core import EngineCore, StepEngine
from treetop.core.grammars import Grammars
from treetop.core.loop import Core
from treetop.engine.engine import Engine
from treetop.models.folder import extra_eos_ids, resolve_folder
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.requests import CoreInfo, PrefixPages
from treetop.types.roles import NO_ROLE, HandoverOptions
from treetop.types.sampling import MOST_LOGPROBS

Step = TypeVar("Step")


class OpenCore(NamedTuple):
    """local: what runs in this process, None if all of it is in others. close: when the core is done with; any number
    of times."""

    core: Core
    info: CoreInfo
    local: "LocalEngine | None"
    draft_path: Path | None
    close: Callable[[], object]


class LocalEngine(NamedTuple):
    """An engine of this process, and what plans for it. next_logits: see `Engine`."""

    engine: Engine
    scheduler: Scheduler
    next_logits: Callable[[list[int]], Tensor]


def open_core(config: EngineConfig, handover: HandoverOptions = NO_ROLE) -> OpenCore:
    """Start what a configuration asks for. Raises UserError for what cannot work, EngineError for a rank that fails.

    handover: of ranks that have a scheduler each, and so a part each in handing requests over.
    """
    if config.ep_size > 1:
        return _open_expert_ranks(config, handover)
    if config.tp_size == 1:
        engine = Engine(config)
        return _around(engine, engine, engine.next_logits, _nothing)
    try:
        from treetop.core.worker_group import WorkerGroup  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tp-size {config.tp_size} needs {error.name}: install treetop[serve]") from None
    group = WorkerGroup(config)
    return _around(group, group.engine, group.next_logits, group.close)


def _open_expert_ranks(config: EngineConfig, handover: HandoverOptions) -> OpenCore:
    try:
        from treetop.core.expert_group import DispatchCore, ExpertGroup  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {config.ep_size} needs {error.name}: install treetop[serve]") from None
    group = ExpertGroup(config, handover)
    core = DispatchCore(group)
    own = Path(core.info.model_path) if config.algorithm == "MTP" else None
    draft = own if config.draft is None else resolve_folder(config.draft, "draft")
    return OpenCore(core, core.info, None, draft, group.close)


def _around(
    runs: StepEngine[Any], engine: Engine, next_logits: Callable[[list[int]], Tensor], close: Callable[[], object]
) -> OpenCore:
    core = core_of(runs, engine)
    local = LocalEngine(engine, core.scheduler, next_logits)
    return OpenCore(core, info_of(engine), local, engine.draft_path, close)


def core_of(runs: StepEngine[Step], engine: Engine) -> EngineCore[Step]:
    """A core with a scheduler for the engine. runs: what its steps are launched on."""
    info = info_of(engine)
    vocab_size = info.vocab_size if info.can_constrain else None
    scheduler = Scheduler(engine.layout, engine.config, info.eos_ids, vocab_size=vocab_size, pace=engine.pace)
    return EngineCore(runs, scheduler, Grammars(engine.model_path, info.vocab_size, info.eos_ids).constraint)


def info_of(engine: Engine) -> CoreInfo:
    config, layout = engine.config, engine.layout
    return CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=layout.max_context,
        max_requests=layout.max_requests,
        shape=config.shape,
        by_priority=config.schedule_policy == "priority",
        can_change_logits=not config.disable_logits_processors,
        max_logprobs=MOST_LOGPROBS,
        eos_ids=(*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path)),
        can_constrain=not config.disable_logits_processors and config.simulate_accept_length is None,
        prefix=None if config.disable_radix_cache else PrefixPages.of(layout),
    )


def _nothing() -> None:
    """One engine ends with whoever holds it."""
