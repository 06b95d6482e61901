"""Adapters of `--lora-modules`: read and checked before any weight, and laid beside target's and draft's products."""

from collections.abc import Sequence
from pathlib import Path

from treetop.checkpoints.adapters import Zeros, make_adapters, modules_for
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.lora_folder import LoraFolder, adaptable_modules, read_lora
from treetop.drafts.protocol import DrafterSpec
from treetop.kernels.gemm.adapter_rows import RANKS
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.layout import Layout
from treetop.weights.adapted import Adapters


def read_adapters(config: EngineConfig, target: TargetSpec, draft: DrafterSpec | None) -> tuple[LoraFolder, ...]:
    """Those that a configuration names, in its order. Raises CheckpointError."""
    of_draft = () if draft is None else draft.params
    return tuple(read_lora(Path(folder), target.params, of_draft) for folder in config.adapters.values())


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


def draft_adapters_of(
    config: EngineConfig,
    folders: tuple[LoraFolder, ...],
    draft: DrafterSpec | None,
    place: LoadContext,
    layout: Layout,
    zeros: Zeros,
) -> Adapters | None:
    """As `adapters_of`, of the draft head; None where none has one, and none may that comes later.

    Raises ConfigError for a draft that none can be beside.
    """
    own, later = [folder.draft for folder in folders if folder.draft is not None], config.enable_draft_lora
    if draft is None or not (own or later):
        return None
    if not adaptable_modules(draft.params):
        raise ConfigError("--enable-draft-lora: this draft has no weights that an adapter could be beside; drop it")
    modules, rank = modules_for(own, draft.params, later), _largest_rank(config, own, later)
    params, rows = place.own(draft.params), layout.most_batch_rows
    return make_adapters(modules, rank, config.num_lora_slots, params, rows, place.dtype, zeros)


def rank_of_tables(config: EngineConfig, folders: tuple[LoraFolder, ...], batch_invariant: bool) -> int:
    """That every adapter has at most; 0 without any. batch_invariant: of a `Profile`."""
    if not config.has_loras:
        return 0
    rank = _largest_rank(config, folders, config.enable_lora)
    return -(-rank // RANKS) * RANKS if batch_invariant else rank


def _largest_rank(config: EngineConfig, folders: Sequence[LoraFolder], any_later: bool) -> int:
    return max([config.max_lora_rank if any_later else 1, *(folder.rank for folder in folders)])
