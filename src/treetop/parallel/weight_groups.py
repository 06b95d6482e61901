"""Groups of processes in which a trainer's rank 0 broadcasts weights to engines' ranks.

A group is made as trainers make theirs for SGLang and vLLM: a store at the trainer's address, the group's name before
every key, and PyTorch's own helper, for a process may be in a default group of its own. Source:
`torch.distributed.distributed_c10d`.
"""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from treetop.types.changes import InitWeightsUpdateGroup
from treetop.types.errors import ConfigError, EngineError, InputError, shown

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # is there, and not said to be handed on
MEET_S = 60.0
"""Seconds within which all ranks of a group have to come; requests wait meanwhile."""
BROADCAST_S = 300.0
"""Seconds that one tensor may take, the trainer's gathering of it included."""


class WeightGroup:
    """One rank of a group. rank: 0 is the trainer's. Waits until all have come. Raises EngineError if they do not."""

    def __init__(
        self,
        name: str,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float = MEET_S,
    ) -> None:
        limit, named = timedelta(seconds=timeout_s), cast("Any", name)
        try:
            store = _TCPStore(master_address, master_port, world_size, rank == 0, limit)
            made: Any = c10d._new_process_group_helper(  # what trainers use, and no public name does this
                world_size, rank, [], dist.Backend(backend), c10d.PrefixStore(name, store),
                group_name=named, timeout=timedelta(seconds=BROADCAST_S),
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                f"group {shown(name)}: rank {rank} of {world_size} met nobody at {master_address}:{master_port} within"
                f" {timeout_s:g} s: {error}"
            ) from None
        self._group: dist.ProcessGroup | None = made[0] if isinstance(made, tuple) else made
        c10d._world.pg_group_ranks[self._group] = {
            each: each for each in range(world_size)
        }  # else it cannot be destroyed
        self.name, self.rank, self._options = name, rank, dist.BroadcastOptions()

    def broadcast(self, tensor: Tensor) -> None:
        """Send it from rank 0, or receive it there. It is contiguous. Raises EngineError if rank 0 has gone."""
        if self._group is None:
            raise EngineError(f"group {shown(self.name)} has been closed")
        try:
            self._group.broadcast([tensor], self._options).wait(timedelta(seconds=BROADCAST_S))
        except RuntimeError as error:
            raise EngineError(f"group {shown(self.name)}: the broadcast failed: {error}") from None

    def close(self) -> None:
        """Any number of times; before the process ends, whose end threads of a library would disturb."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class WeightGroups:
    """Those of an engine's rank, by name."""

    def __init__(self) -> None:
        self._groups = dict[str, WeightGroup]()
        self._met: WeightGroup | None = None  # which is not in force yet

    def meet(self, asked: InitWeightsUpdateGroup, rank: int, size: int, device: torch.device) -> WeightGroup:
        """To be added, or dropped. rank: of `size` that share the model. Raises ConfigError and EngineError."""
        self.drop()
        own = asked.rank_offset + asked.engine * size + rank
        if asked.name in self._groups or not asked.name:
            raise ConfigError(f"group_name: {shown(asked.name)} is there already, or no name; destroy it first")
        if not 0 < own < asked.world_size:
            raise ConfigError(
                f"world_size: {asked.world_size}: this rank would be {own} = rank_offset {asked.rank_offset} + engine"
                f" {asked.engine} * {size} + {rank}; rank 0 is the trainer's"
            )
        able = ("nccl",) if device.type == "cuda" else ("gloo",)
        if asked.backend not in able:
            raise ConfigError(f"backend: {shown(asked.backend)}: on this device it is {able[0]}")
        self._met = WeightGroup(
            asked.name, asked.master_address, asked.master_port, own, asked.world_size, asked.backend
        )
        return self._met

    def add(self, group: WeightGroup) -> None:
        self._groups[group.name], self._met = group, None

    def drop(self) -> None:
        """What was met last and has not been added is closed, so that its name is free."""
        group, self._met = self._met, None
        if group is not None:
            group.close()

    def remove(self, name: str) -> None:
        """None of this name is as good: an engine that was started again has none, and another beside it has."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def named(self, name: str) -> WeightGroup:
        """Raises InputError."""
        if name not in self._groups:
            raise InputError(f"group_name: {shown(name)}: no such group; init_weights_update_group makes it")
        return self._groups[name]

    def close(self) -> None:
        self.drop()
        for name in tuple(self._groups):
            self.remove(name)
