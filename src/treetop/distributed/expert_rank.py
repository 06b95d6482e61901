"""A rank that shares experts with others: an engine like any other, whose steps are in lockstep with theirs."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq

from treetop.core.engine_core import EngineCore
from treetop.core.make import core_of, info_of
from treetop.core.wire import ProcessOptions
from treetop.distributed.lockstep import Agreement, Lockstep
from treetop.engine.engine import Engine
from treetop.models.folder import resolve_folder
from treetop.models.loader import compute_device
from treetop.models.params import of_rank
from treetop.models.registry import target_spec
from treetop.parallel.exchange import Group, Meeting
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.parallel import ALONE, Unmet
from treetop.types.requests import CoreInfo


class Rank(NamedTuple):
    """What this process has of a group of ranks."""

    core: "EngineCore[Any]"
    info: CoreInfo
    engine: Engine
    lockstep: "Lockstep[Any]"


def open_rank(options: ProcessOptions, context: "zmq.Context[zmq.Socket[bytes]]", stack: ExitStack) -> Rank:
    """Meet the others, and start this rank's engine. stack: ends both.

    Raises ConfigError for what cannot work, before anything is started where it can, and EngineError if a rank fails.
    """
    config, rank, folder = options.config, options.rank, options.folder
    check_experts(config)
    device = compute_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    group = Group(Meeting(Path(folder) / "meeting", rank, config.ep_size), device)
    stack.callback(group.close)
    engine = Engine(config, expert_ranks=group.parallel)
    stack.callback(engine.release)
    group.set_deadline(config.step_timeout)
    agreement = Agreement(folder, rank, config.ep_size, context)
    stack.callback(agreement.close)
    lockstep = Lockstep(engine, agreement, config.step_timeout)
    return Rank(core_of(lockstep, engine), info_of(engine), engine, lockstep)


def check_experts(config: EngineConfig) -> None:
    """Raises ConfigError for a model whose experts the ranks cannot share, and for more ranks than GPUs."""
    target = target_spec(resolve_folder(config.model))
    if not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    of_rank(target.params, ALONE, Unmet(config.ep_size))
    if compute_device(config.device).type == "cuda" and torch.cuda.device_count() < config.ep_size:
        raise ConfigError(f"--ep-size {config.ep_size}: this machine shows {torch.cuda.device_count()} GPUs")
