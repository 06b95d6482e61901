"""A rank that shares experts with others: an engine like any other, whose steps are in lockstep with theirs.

With `--tp-size` it is the first of ranks that share its model, and each of these shares experts with its likes.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import zmq

from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import Placement, compute_device
from treetop.core.engine_core import EngineCore
from treetop.core.make import core_of, info_of
from treetop.core.wire import ProcessOptions
from treetop.distributed.lockstep import Lockstep, RankEngine, StepSync
from treetop.distributed.rank_groups import ExpertEngines, RankGroups, use_gpu_of
from treetop.distributed.tp_executor import TpExecutor
from treetop.engine.engine import Engine
from treetop.engine.startup.plan import packing
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.parallel import SINGLE_RANK, PlaceholderRank
from treetop.types.requests import CoreInfo


class Rank(NamedTuple):
    """What this process has of a group of ranks. executor: of those that share its model, if there are any."""

    core: "EngineCore[Any]"
    info: CoreInfo
    engine: Engine
    lockstep: "Lockstep[Any]"
    executor: TpExecutor | None


def open_rank(options: ProcessOptions, context: "zmq.Context[zmq.Socket[bytes]]", stack: ExitStack) -> Rank:
    """Meet the others, and start this rank's engine. stack: ends both.

    Raises ConfigError for what cannot work, before anything is started where it can, and EngineError if a rank fails.
    """
    config, rank, folder = options.config, options.rank, options.folder
    check_experts(config)
    engines = ExpertEngines(folder, rank, config.ep_size)
    runs, engine, executor = _open_engine(options, engines, stack)
    step_sync = StepSync(folder, rank, config.ep_size, context)
    stack.callback(step_sync.close)
    lockstep = Lockstep(runs, step_sync, config.step_timeout)
    return Rank(core_of(lockstep, engine), info_of(engine), engine, lockstep, executor)


def _open_engine(
    options: ProcessOptions, engines: ExpertEngines, stack: ExitStack
) -> tuple[RankEngine[Any], Engine, TpExecutor | None]:
    """What runs steps, this process's engine, and the ranks that share its model, if there are any."""
    config, device = options.config, compute_device(options.config.device)
    use_gpu_of(config, 0, device, engines)
    if config.tp_size > 1:
        executor = TpExecutor(config, options.disaggregation.mode != "null", engines)
        stack.callback(executor.close)
        return executor, executor.engine, executor
    groups = RankGroups(config, 0, device, options.folder, engines)
    stack.callback(groups.close)
    engine = Engine(config, expert_ranks=groups.expert_ranks)
    stack.callback(engine.release)
    groups.set_deadline(config.step_timeout)
    return engine, engine, None


def check_experts(config: EngineConfig) -> None:
    """Raises ConfigError for a model whose experts the ranks cannot share, and for more ranks than GPUs."""
    target = target_spec(resolve_folder(config.model))
    if not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    parallel = SINGLE_RANK if config.tp_size == 1 else PlaceholderRank(config.tp_size)
    ranks = PlaceholderRank(config.ep_size)
    place = Placement(torch.float32, torch.device("meta"), 1, parallel=parallel, expert_ranks=ranks)
    replace(place, packed=packing(config), activations=config.quantize_activations).own(target.params)
    if compute_device(config.device).type == "cuda" and torch.cuda.device_count() < config.tp_size * config.ep_size:
        raise ConfigError(
            f"--tp-size {config.tp_size} --ep-size {config.ep_size}: this machine shows"
            f" {torch.cuda.device_count()} GPUs"
        )
