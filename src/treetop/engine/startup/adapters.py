"""Adapters of `--lora-modules`: read and checked before any weight, and laid beside the target's products."""

from pathlib import Path

from treetop.checkpoints.adapters import Zeros, make_adapters, modules_for
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.lora_folder import LoraFolder, read_lora
from treetop.kernels.gemm.adapter_rows import RANKS
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.layout import Layout
from treetop.weights.adapted import Adapters


def read_adapters(config: EngineConfig, target: TargetSpec) -> tuple[LoraFolder, ...]:
    """Those that a configuration names, in its order. Raises CheckpointError."""
    return tuple(read_lora(Path(folder), target.params) for folder in config.adapters.values())


def adapters_of(
    config: EngineConfig,
    folders: tuple[LoraFolder, ...],
    target: TargetSpec,
    place: LoadContext,
    layout: Layout,
    zeros: Zeros,
) -> Adapters | None:
    """Tables for a configuration's adapters and for those that may come later, of zeros; None without any.

    Raises ConfigError for mixed steps on a GPU.
    """
    if not config.has_loras:
        return None
    if layout.mixed and place.device.type == "cuda":
        raise ConfigError(
            "--lora-modules, --enable-lora: on a GPU kernels group the rows of a batch, and in a mixed step each token"
            " is a row; use --mixed-chunk off"
        )
    modules, rank = (
        modules_for(folders, target.params, config.enable_lora),
        rank_of_tables(config, folders, place.profile.batch_invariant),
    )
    params, rows = place.own(target.params), layout.most_batch_rows
    return make_adapters(modules, rank, config.num_lora_slots, params, rows, place.dtype, zeros)


def rank_of_tables(config: EngineConfig, folders: tuple[LoraFolder, ...], batch_invariant: bool) -> int:
    """That every adapter has at most; 0 without any. batch_invariant: of a `Profile`."""
    if not config.has_loras:
        return 0
    rank = max([config.max_lora_rank if config.enable_lora else 1, *(folder.rank for folder in folders)])
    return -(-rank // RANKS) * RANKS if batch_invariant else rank
