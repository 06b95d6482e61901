"""A core around what runs a model: an engine of this process, alone or as a group's first rank, or other processes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from treetop.core.engine_core import StepEngine
from treetop.core.local_core import core_of, info_of
from treetop.core.loop import Core
from treetop.disaggregation.options import NULL, DisaggregationOptions
from treetop.engine.engine import Engine
from treetop.models.folder import resolve_folder
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.requests import CoreInfo

if TYPE_CHECKING:  # needs an extra
    from treetop.core.ranks.worker_group import WorkerGroup


class OpenCore(NamedTuple):
    """local: what runs in this process, None if all of it is in others. close: when the core is done with; any number
    of times."""

    core: Core
    info: CoreInfo
    local: "LocalEngine | None"
    draft_path: Path | None
    close: Callable[[], object]


class LocalEngine(NamedTuple):
    """An engine of this process, and what plans for it. next_logits: see `Engine`. others: the ranks but the first."""

    engine: Engine
    scheduler: Scheduler
    next_logits: Callable[[list[int]], Tensor]
    others: "WorkerGroup | None"


def open_core(config: EngineConfig, handover: DisaggregationOptions = NULL) -> OpenCore:
    """Start what a configuration asks for. Raises UserError for what cannot work, EngineError for a rank that fails.

    handover: what its ranks do for other workers. Those that have a scheduler each have a part each.
    """
    if config.ep_size > 1:
        return _open_expert_ranks(config, handover)
    if config.tp_size == 1:
        engine = Engine(config)
        return _around(engine, engine, engine.next_logits, _nothing, None)
    try:
        from treetop.core.ranks.worker_group import WorkerGroup  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tp-size {config.tp_size} needs {error.name}: install treetop[serve]") from None
    group = WorkerGroup(config, handover.mode != "null")
    return _around(group, group.engine, group.next_logits, group.close, group)


def _open_expert_ranks(config: EngineConfig, handover: DisaggregationOptions) -> OpenCore:
    try:
        from treetop.core.ranks.expert_group import DispatchCore, ExpertGroup  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {config.ep_size} needs {error.name}: install treetop[serve]") from None
    group = ExpertGroup(config, handover)
    core = DispatchCore(group)
    own = Path(core.info.model_path) if config.algorithm == "MTP" else None
    draft = own if config.draft is None else resolve_folder(config.draft, "draft")
    return OpenCore(core, core.info, None, draft, group.close)


def _around(
    runs: StepEngine[Any],
    engine: Engine,
    next_logits: Callable[[list[int]], Tensor],
    close: Callable[[], object],
    others: "WorkerGroup | None",
) -> OpenCore:
    core = core_of(runs, engine)
    local = LocalEngine(engine, core.scheduler, next_logits, others)
    return OpenCore(core, info_of(engine), local, engine.draft_path, close)


def _nothing() -> None:
    """One engine ends with whoever holds it."""
