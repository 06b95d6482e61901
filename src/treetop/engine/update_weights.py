"""Other weights for an engine that runs: a target and its draft head of the same architecture, in place of the old."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import Placement
from treetop.drafts.protocol import Drafter
from treetop.engine.startup.build import kv_scales
from treetop.engine.startup.kept_calibration import KeptCalibration, kept_calibration
from treetop.engine.startup.plan import EnginePlan, read_draft_spec
from treetop.engine.startup.products import Products
from treetop.models.registry import target_spec
from treetop.models.target import Target
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import GroupName
from treetop.weights.adapted import Adapters

Loaded = TypeVar("Loaded")
ELSEWHERE = "another rank cannot take its part of the weights"
"""What a rank says of a folder that it could take."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Models that were read, to be put in the old ones' place.

    plan: with their folders.
    kept: what was learned of the pair before, where that is kept.
    kv_scales: of K/V in FP8.
    """

    plan: EnginePlan
    target: Target
    drafter: Drafter | None
    kept: KeptCalibration | None
    kv_scales: dict[GroupName, Tensor]


def read_weights(engine_plan: EnginePlan, model: str | None, draft: str | None, products: Products) -> NewWeights:
    """Read a target and a draft head from folders; None for those of the plan, read again.

    Products are taken as they were, so that bits depend on the numbers alone. Raises ConfigError for another
    architecture and where captured rounds or other ranks hold the old weights, CheckpointError as a start does.
    """
    config, place = engine_plan.config, engine_plan.place
    if place.device.type != "cpu" or config.ep_size > 1 or config.disaggregation_slots:
        raise ConfigError(
            "update_weights: built for a CPU, no --ep-size and no --disaggregation-slots; start another engine"
        )
    if config.has_loras:
        raise ConfigError("update_weights: adapters are of the weights in force; start without --lora-modules")
    if place.dummy:
        raise ConfigError("update_weights: --load-format dummy reads no weights; start with a folder's")
    if draft is not None and config.draft is None:
        raise ConfigError(f"update_weights: draft {draft}: this engine has no draft head of its own folder")
    config = replace(
        config, model=config.model if model is None else model, draft=config.draft if draft is None else draft
    )
    spec, old = target_spec(resolve_folder(config.model)), engine_plan.target
    if spec.config != old.config:
        alike = replace(spec.config, tied_embeddings=old.config.tied_embeddings) == old.config
        what = "output matrices, of which one is the embedding," if alike else "config.json"
        raise ConfigError(f"update_weights: {config.model} is not the model of {old.folder}: their {what} differ")
    drafter_spec = read_draft_spec(config, spec) if config.speculates else None
    if drafter_spec != engine_plan.draft:
        raise ConfigError(f"update_weights: {config.draft} is another draft head: its config or its tensors differ")
    first = place.parallel.rank == 0
    new_plan = replace(engine_plan, config=config, target=spec, draft=drafter_spec)
    target, drafter = load_models(new_plan, products, None)
    kept = None if drafter_spec is None else kept_calibration(config, spec.folder, drafter_spec, first)
    return NewWeights(new_plan, target, drafter, kept, kv_scales(new_plan))


def load_models(
    engine_plan: EnginePlan, products: Products, adapters: Adapters | None
) -> tuple[Target, Drafter | None]:
    """Target and draft head of a plan's folders, beside which adapters are. Raises as a start does, on all ranks that
    share a model where it does on one.
    """
    spec, draft, place = engine_plan.target, engine_plan.draft, replace(engine_plan.place, adapters=adapters)
    aux = draft.aux_inputs if draft is not None else ()
    target = _on_all_ranks(spec.folder, place, lambda: spec.load(aux, products.of_target(place)))
    if draft is None:
        return target, None
    beside = products.of_draft(engine_plan.place)
    return target, _on_all_ranks(draft.folder or spec.folder, place, lambda: draft.load(target, beside))


def _on_all_ranks(folder: Path, place: Placement, load: Callable[[], Loaded]) -> Loaded:
    """What is loaded. Raises CheckpointError for a folder whose part another rank could not take."""
    try:
        loaded = load()
    except Exception:
        place.parallel.minimum(0)
        raise
    if not place.parallel.minimum(1):
        raise CheckpointError(f"{folder}: {ELSEWHERE}")
    return loaded
