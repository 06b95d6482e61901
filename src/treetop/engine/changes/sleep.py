"""An engine without its memory: pools of K/V, and weights, on the host or nowhere; and how it has them again.

On a CPU weights lie on the host anyway: level 1 gives back the pools alone. On a GPU what weights lie in is emptied and
filled again, wherever it comes to lie: whoever holds the tensors reads the new places, but for captured rounds, which
are captured anew.
"""

import gc
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from treetop.cache.pool import make_pools
from treetop.drafts.protocol import Drafter
from treetop.engine.changes.host_copies import copy_storages
from treetop.engine.changes.reached import Storage, storages_of
from treetop.engine.changes.update_weights import load_models
from treetop.engine.model_runner import ModelRunner
from treetop.engine.startup.build import kv_scales, with_pools, zeros_on
from treetop.engine.startup.plan import EnginePlan
from treetop.engine.startup.products import Products
from treetop.models.target import Target
from treetop.types.changes import TAGS
from treetop.types.errors import ConfigError, InputError, shown
from treetop.types.layout import Layout

_DROPPED: Any = None
"""Stands for a target whose weights sleep."""
Models = tuple[Target, Drafter | None]


@dataclass(frozen=True, slots=True)
class SleepState:
    """tags: of `TAGS`, what sleeps. kept: weights that a GPU gave back."""

    tags: tuple[str, ...] = ()
    level: int = 0
    kept: "WeightsOnHost | None" = None


def check_sleep(engine_plan: EnginePlan, level: int, sent: Collection[str]) -> None:
    """Raises InputError, and ConfigError where memory is not only this engine's. sent: whose weights no folder has."""
    config = engine_plan.config
    if level not in (1, 2):
        raise InputError(f"level: 1 keeps weights on the host, 2 drops them, got {shown(level)}")
    if config.disaggregation_slots or config.check_level >= 3:
        raise ConfigError("sleep: not with --disaggregation-slots or --check-level 3")
    if config.kv_offloading_size is not None:
        raise ConfigError("sleep: not with --kv-offloading-size, whose copies are of pages that sleep; drop it")
    if level == 2 and engine_plan.place.dummy:
        raise ConfigError("sleep: level 2 drops weights, and --load-format dummy has none to read; use level 1")
    if level == 2 and sent:
        raise ConfigError("sleep: level 2 drops weights, and those in force were sent: no folder has them; use level 1")


def fall_asleep(runner: ModelRunner, level: int) -> tuple[ModelRunner, SleepState]:
    """The runner without pools, and without weights or with such as are on the host."""
    asleep, kept = without_kv(runner), None
    if level == 2:
        asleep = replace(asleep, target=_DROPPED, drafter=None)
    elif runner.buffers.rows.device.type == "cuda":
        torch.cuda.synchronize()
        kept = WeightsOnHost(runner.target, runner.drafter)
    return asleep, SleepState(TAGS, level, kept)


def without_kv(runner: ModelRunner) -> ModelRunner:
    """Room for what is about to come, once captured rounds that read pools are gone."""
    return replace(runner, pools={}, target_layers={}, draft_layers={})


def with_kv(engine_plan: EnginePlan, layout: Layout, runner: ModelRunner) -> ModelRunner:
    """With empty pools. layout: theirs."""
    zeros = partial(zeros_on, runner.buffers.rows.device)
    pools = make_pools(layout, engine_plan.place.dtype, zeros, kv_scales(engine_plan))
    return with_pools(runner, engine_plan.draft, layout, pools)


def give_back(runner: ModelRunner) -> None:
    """What nobody holds any more, to the system."""
    gc.collect()  # layers and their products know each other
    if runner.buffers.rows.device.type == "cuda":
        torch.cuda.empty_cache()


def asked_to_wake(asleep: SleepState, tags: tuple[str, ...] | None) -> set[str]:
    """Of what sleeps, that which is to wake. Raises InputError."""
    asked = set(TAGS if tags is None else tags)
    if asked - set(TAGS):
        raise InputError(f"tags: there are {' and '.join(TAGS)}, got {shown(sorted(asked - set(TAGS))[0])}")
    return asked & set(asleep.tags)


def dropped_models(
    engine_plan: EnginePlan, products: Products, runner: ModelRunner, asleep: SleepState, asked: Collection[str]
) -> Models | None:
    """The models of an engine's folders, where they are to wake and had been dropped. Raises as a start does."""
    return load_models(engine_plan, products, runner) if asleep.level == 2 and "weights" in asked else None


def wake(
    engine_plan: EnginePlan, layout: Layout, runner: ModelRunner, asleep: SleepState, asked: Collection[str],
    models: Models | None,
) -> tuple[ModelRunner, SleepState]:  # fmt: skip
    """The runner with what was asked for, and what sleeps on. layout: that of the pools."""
    kept = asleep.kept
    if "weights" in asked and kept is not None:
        kept.restore()
        kept = None
    if models is not None:
        runner = replace(runner, target=models[0], drafter=models[1])
    if "kv_cache" in asked:
        zeros = partial(zeros_on, runner.buffers.rows.device)
        pools = make_pools(layout, engine_plan.place.dtype, zeros, kv_scales(engine_plan))
        runner = replace(runner, pools=pools)
    left = tuple(tag for tag in asleep.tags if tag not in asked)
    if not left:  # layers are laid out by the target's
        runner = with_pools(runner, engine_plan.draft, layout, runner.pools)
    return runner, SleepState(left, asleep.level, kept)


def held_bytes(runner: ModelRunner) -> int:
    """On a GPU, of all that lives there; on a CPU of pools and weights."""
    if runner.buffers.rows.device.type == "cuda":
        return torch.cuda.memory_allocated()
    pools = sum(pool.data.nbytes for pool in runner.pools.values())
    return pools if runner.target is _DROPPED else pools + sum(each.read_bytes(1) for each in runner.target.products)


class WeightsOnHost:
    """The numbers of models' tensors on a GPU, which give their memory back until `restore`."""

    def __init__(self, *models: Any) -> None:
        every = storages_of(*models)
        self._kept = [(storage, Storage(storage.nbytes(), device="cpu")) for storage in every]
        copy_storages([(copy, storage) for storage, copy in self._kept])
        for storage, copy in self._kept:
            assert storage.nbytes() == copy.nbytes()
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._kept)

    def restore(self) -> None:
        """Memory and numbers are there again."""
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
        copy_storages(self._kept)
        self._kept = []
