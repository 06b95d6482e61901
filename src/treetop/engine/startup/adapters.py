"""Adapters of `--lora-modules`: read and checked before any weight, and laid beside the target's products."""

from pathlib import Path

from treetop.checkpoints.adapters import Zeros, make_adapters
from treetop.checkpoints.loader import Placement
from treetop.checkpoints.lora_folder import LoraFolder, read_lora
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.weights.adapted import Adapters


def read_adapters(config: EngineConfig, target: TargetSpec) -> tuple[LoraFolder, ...]:
    """Those that a configuration names, in its order. Raises CheckpointError."""
    return tuple(read_lora(Path(folder), target.params) for folder in config.adapters.values())


def adapters_of(
    folders: tuple[LoraFolder, ...], target: TargetSpec, place: Placement, rows: int, zeros: Zeros
) -> Adapters | None:
    """Tables for these, not yet filled; None without any."""
    return make_adapters(folders, place.own(target.params), rows, place.dtype, zeros) if folders else None
