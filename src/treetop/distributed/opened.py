"""From a configuration to what serves it: a core of this process, whose engine may have other ranks, or a client."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from treetop.checkpoints.folder import resolve_folder
from treetop.core.clients import InProcessClient
from treetop.core.engine_core import EngineCore, StepEngine
from treetop.core.loop import CoreThread
from treetop.core.make import core_of, info_of
from treetop.engine.engine import Engine
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.requests import CoreInfo
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:  # needs an extra
    from treetop.distributed.background import BackgroundClient
    from treetop.distributed.tp_executor import TpExecutor


class LocalEngine(NamedTuple):
    """An engine of this process, and what plans for it.

    next_logits: see `Engine`.
    executor: of its other ranks.
    """

    engine: Engine
    scheduler: Scheduler
    next_logits: Callable[[list[int]], Tensor]
    executor: "TpExecutor | None"


class OpenCore(NamedTuple):
    """close: when the core is done with; any number of times."""

    core: EngineCore[Any]
    info: CoreInfo
    local: LocalEngine
    close: Callable[[], object]


class Opened(NamedTuple):
    """What serves requests. local: the engine of this process, None if all of them are in others."""

    client: "InProcessClient | BackgroundClient"
    local: LocalEngine | None
    draft_path: Path | None


def open_core(config: EngineConfig, reached: bool = False) -> OpenCore:
    """Start an engine in this process, alone or as the first of ranks that share a model.

    reached: other workers reach the staging slots of all ranks. Raises UserError for what cannot work, EngineError for
    a rank that fails.
    """
    if config.tp_size == 1:
        engine = Engine(config)
        return _around(engine, engine, engine.next_logits, _nothing, None)
    try:
        from treetop.distributed.tp_executor import TpExecutor  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tp-size {config.tp_size} needs {error.name}: install {DISTRIBUTION}[serve]") from None
    executor = TpExecutor(config, reached)
    return _around(executor, executor.engine, executor.next_logits, executor.close, executor)


def open_client(config: EngineConfig) -> Opened:
    """Start what a configuration asks for, and a thread that serves it. Raises as `open_core`."""
    if config.ep_size == 1:
        core, info, local, close = open_core(config)
        return Opened(InProcessClient(CoreThread(core), info, close), local, local.engine.draft_path)
    try:
        from treetop.core.wire import ProcessOptions  # noqa: PLC0415  # needs an extra
        from treetop.distributed.background import BackgroundClient  # noqa: PLC0415  # too
        from treetop.distributed.expert_rank import check_experts  # noqa: PLC0415  # too
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {config.ep_size} needs {error.name}: install {DISTRIBUTION}[serve]") from None
    check_experts(config)  # before any process is started
    client = BackgroundClient(ProcessOptions("", config, log_level=20))
    own = Path(client.info.model_path) if config.algorithm == "MTP" else None
    draft = own if config.draft is None else resolve_folder(config.draft, "draft")
    return Opened(client, None, draft)


def _around(
    runs: StepEngine[Any],
    engine: Engine,
    next_logits: Callable[[list[int]], Tensor],
    close: Callable[[], object],
    executor: "TpExecutor | None",
) -> OpenCore:
    core = core_of(runs, engine)
    return OpenCore(core, info_of(engine), LocalEngine(engine, core.scheduler, next_logits, executor), close)


def _nothing() -> None:
    """One engine ends with whoever holds it."""
