"""The one place where a configuration becomes what serves it: a core of this process, or a client of one.

`open_core` starts an engine here, alone, as the first of ranks that share its model, or as a rank that shares experts;
`open_client` starts what a front end speaks to. What needs an extra is imported where it is asked for.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from treetop.checkpoints.folder import extra_eos_ids, resolve_folder
from treetop.checkpoints.loader import LoadContext, compute_device
from treetop.core.clients import InProcessClient
from treetop.core.engine_core import EngineCore, StepEngine
from treetop.core.loop import CoreThread
from treetop.engine.engine import Engine
from treetop.engine.offloading.disk_pages import open_disk
from treetop.engine.routed_experts import expert_layers
from treetop.engine.startup.default_policy import with_policy
from treetop.engine.startup.exactness_table import settled
from treetop.engine.startup.round_costs import work_clock
from treetop.engine.startup.weight_copies import packing
from treetop.exact.machine import cpu_model
from treetop.models.registry import target_spec
from treetop.scheduler.scheduler import Scheduler
from treetop.structured.grammars import GrammarCompiler
from treetop.structured.structured_output import StructuredOutputManager
from treetop.types.config import EngineConfig
from treetop.types.constraint import StructureLimits
from treetop.types.errors import ConfigError
from treetop.types.layout import SpecShape
from treetop.types.parallel import SINGLE_RANK, PlaceholderRank
from treetop.types.requests import CoreInfo, PrefixPages
from treetop.types.sampling import MAX_LOGPROBS
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:  # needs an extra
    import zmq

    from treetop.distributed.background import BackgroundClient
    from treetop.distributed.lockstep import Lockstep
    from treetop.distributed.rank_groups import ExpertEngines
    from treetop.distributed.tp_executor import TpExecutor

log = logging.getLogger("treetop")
Step = TypeVar("Step")


class OpenCore(NamedTuple):
    """A core of this process.

    next_logits: see `Engine`.
    close: when the core is done with; any number of times.
    executor: of the other ranks that share the model, if there are any.
    lockstep: with the ranks that share experts, if there are any.
    """

    core: EngineCore[Any]
    info: CoreInfo
    engine: Engine
    next_logits: Callable[[list[int]], Tensor]
    close: Callable[[], object]
    executor: "TpExecutor | None" = None
    lockstep: "Lockstep[Any] | None" = None

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler


class Opened(NamedTuple):
    """What serves requests. local: the core of this process, None if all of them are in others."""

    client: "InProcessClient | BackgroundClient"
    local: OpenCore | None
    draft_path: Path | None


def open_core(
    config: EngineConfig,
    reached: bool = False,
    engines: "ExpertEngines | None" = None,
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
) -> OpenCore:
    """Start an engine in this process, alone or as a rank.

    reached: other workers reach the staging slots of all ranks. engines: that share its experts, whom it meets; their
    steps are kept in step through the context. Raises UserError for what cannot work, before anything is started where
    it can, and EngineError for a rank that fails.
    """
    told = settled(with_policy(config))
    if config.exactness != told.config.exactness:
        log.info("exactness auto is %s: %s", told.config.exactness, told.why)
    config = told.config
    with ExitStack() as stack:
        if engines is not None:
            check_experts(config)
        executor = None if config.tp_size == 1 else _executor_of(config, reached, engines)
        if executor is not None:
            stack.callback(executor.close)
            engine = executor.engine
        else:
            engine = Engine(config) if engines is None else _rank_of_experts(config, engines, stack)
        if engines is None and executor is None:
            stack.callback(engine.let_go)
        runs: Any = executor or engine
        next_logits, lockstep = runs.next_logits, None
        if engines is not None:
            from treetop.distributed.lockstep import Lockstep, StepSync  # noqa: PLC0415  # needs an extra

            assert context is not None
            step_sync = StepSync(engines.folder, engines.rank, engines.size, context)
            stack.callback(step_sync.close)
            runs = lockstep = Lockstep(runs, step_sync, config.step_timeout)
        agree_on_shape = (lambda wanted: wanted) if lockstep is None else lockstep.agree_on_shape
        core = core_of(runs, engine, agree_on_shape)
        return OpenCore(core, info_of(engine, told.by), engine, next_logits, stack.pop_all().close, executor, lockstep)


def _executor_of(config: EngineConfig, reached: bool, engines: "ExpertEngines | None") -> "TpExecutor":
    try:
        from treetop.distributed.tp_executor import TpExecutor  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tp-size {config.tp_size} needs {error.name}: install {DISTRIBUTION}[serve]") from None
    if engines is not None:
        from treetop.distributed.rank_groups import use_gpu_of  # noqa: PLC0415  # too

        use_gpu_of(config, 0, compute_device(config.device), engines)
    return TpExecutor(config, reached, engines)


def _rank_of_experts(config: EngineConfig, engines: "ExpertEngines", stack: ExitStack) -> Engine:
    from treetop.distributed.rank_groups import RankGroups  # noqa: PLC0415  # needs an extra

    groups = RankGroups(config, 0, compute_device(config.device), engines.folder, engines)
    stack.callback(groups.close)
    engine = Engine(config, expert_ranks=groups.expert_ranks)
    stack.callback(engine.release)
    groups.set_deadline(config.step_timeout)
    return engine


def open_client(config: EngineConfig) -> Opened:
    """Start what a configuration asks for, and a thread that serves it. Raises as `open_core`."""
    if config.ep_size == 1:
        opened = open_core(config)
        client = InProcessClient(CoreThread(opened.core), opened.info, opened.close)
        return Opened(client, opened, opened.engine.draft_path)
    try:
        from treetop.core.wire import ProcessOptions  # noqa: PLC0415  # needs an extra
        from treetop.distributed.background import BackgroundClient  # noqa: PLC0415  # too
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {config.ep_size} needs {error.name}: install {DISTRIBUTION}[serve]") from None
    check_experts(config)  # before any process is started
    others = BackgroundClient(ProcessOptions("", config, log_level=20))
    own = Path(others.info.model_path) if config.algorithm == "MTP" else None
    return Opened(others, None, own if config.draft is None else resolve_folder(config.draft, "draft"))


def check_experts(config: EngineConfig) -> None:
    """Raises ConfigError for a model whose experts the ranks cannot share, and for more ranks than GPUs."""
    target = target_spec(resolve_folder(config.model))
    if not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    parallel = SINGLE_RANK if config.tp_size == 1 else PlaceholderRank(config.tp_size)
    ranks = PlaceholderRank(config.ep_size)
    place = LoadContext(torch.float32, torch.device("meta"), 1, parallel=parallel, expert_ranks=ranks)
    replace(place, packed=packing(config), activations=config.quantize_activations).own(target.params)
    if compute_device(config.device).type == "cuda" and torch.cuda.device_count() < config.tp_size * config.ep_size:
        raise ConfigError(
            f"--tp-size {config.tp_size} --ep-size {config.ep_size}: this machine shows"
            f" {torch.cuda.device_count()} GPUs"
        )


def core_of(
    runs: StepEngine[Step], engine: Engine, agree_on_shape: Callable[[SpecShape], SpecShape] = lambda wanted: wanted
) -> EngineCore[Step]:
    """A core with a scheduler for the engine. runs: what its steps are launched on. agree_on_shape: see `Scheduler`."""
    info, experience = info_of(engine), engine.experience
    # Not the engine: it has the scheduler, and whoever closes one wants its memory at once.
    digests = {} if engine.adapters is None else engine.adapters.digests
    vocab_size = info.vocab_size if info.can_constrain else None
    grammars = GrammarCompiler(engine.model_path, info.vocab_size, info.eos_ids, info.structure_limits.whitespace)
    structures = StructuredOutputManager(grammars, info.structure_limits.timeout_s)
    scheduler = Scheduler(
        engine.layout,
        engine.config,
        info.eos_ids,
        vocab_size=vocab_size,
        prefill_costs=engine.prefill_costs,
        costs=engine.costs,
        head=lambda: experience.head.acceptance,
        keep_head=experience.keep_head,
        agree_on_shape=agree_on_shape,
        keep_lengths=experience.keep_lengths,
        work_clock=work_clock(engine.runner.buffers.rows.device),
        structures=structures,
        disk=open_disk(engine),
        digest_of=lambda number: digests.get(number, ""),
    )
    engine.set_tree_masks(scheduler.node_masks)
    return EngineCore(runs, scheduler)


def _device_words(engine: Engine) -> str:
    device = engine.runner.buffers.rows.device
    if device.type != "cuda":
        return cpu_model()
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def info_of(engine: Engine, exactness_by: str = "") -> CoreInfo:
    """exactness_by: see `CoreInfo`."""
    config, layout = engine.config, engine.layout
    return CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=layout.max_context,
        max_requests=layout.max_requests,
        shape=max(config.shapes, key=lambda shape: (shape.num_steps, shape.num_draft_tokens)),
        by_priority=config.schedule_policy == "priority",
        can_change_logits=not config.disable_logits_processors,
        max_logprobs=MAX_LOGPROBS,
        eos_ids=(*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path)),
        can_constrain=not config.disable_logits_processors and not config.simulates,
        prefix=None if config.disable_radix_cache else PrefixPages.of(layout),
        structure_limits=StructureLimits(
            config.structured_output_timeout, config.structured_output_memory, config.structured_output_whitespace
        ),
        exactness=config.exactness,
        exactness_by=exactness_by,
        device=_device_words(engine),
        can_withhold=not config.simulates,
        has_trees=any(shape.num_steps for shape in config.shapes),
        loras=tuple(config.adapters),
        lora_versions=(1,) * len(config.adapters),
        expert_layers=None if layout.experts is None else expert_layers(engine.spec),
        simulates=config.simulates,
    )
