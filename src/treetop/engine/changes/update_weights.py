"""Other weights for an engine that runs: a target and its draft head of the same architecture, in place of the old."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.protocol import Drafter
from treetop.engine.changes.in_place import Copies, copies_between, copy_all
from treetop.engine.changes.reached import storages_of
from treetop.engine.model_runner import ModelRunner
from treetop.engine.startup.build import kv_scales
from treetop.engine.startup.kept_calibration import KeptCalibration, kept_calibration
from treetop.engine.startup.plan import EnginePlan, read_draft_spec
from treetop.engine.startup.products import Products
from treetop.models.registry import target_spec
from treetop.models.target import Target
from treetop.types.changes import UpdateWeights
from treetop.types.errors import CheckpointError, ConfigError, InputError
from treetop.types.ids import GroupName
from treetop.weights.adapted import Adapters

Loaded = TypeVar("Loaded")
ELSEWHERE = "another rank cannot take its part of the weights"
"""What a rank says of a folder that it could take."""


Received = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a trainer, by name, of "model" and "draft"."""


@dataclass(slots=True)
class NewWeights:
    """Models that were read, to be put in the old ones' place once.

    plan: with their folders.
    models: target and draft head. copies: into the old ones' memory; None if the new ones take their place.
    kept: what was learned of the pair before, where that is kept.
    kv_scales: of K/V in FP8.
    sent: which of "model" and "draft" no folder has.
    """

    plan: EnginePlan
    models: tuple[Target, Drafter | None] | None
    copies: Copies | None
    kept: KeptCalibration | None
    kv_scales: dict[GroupName, Tensor]
    sent: frozenset[str]

    @property
    def in_place(self) -> bool:
        """Whether captured rounds will read the new numbers, where they read the old ones."""
        return self.copies is not None

    def put(self, runner: ModelRunner) -> ModelRunner:
        """What runs from now on. Nothing of the models is held here afterwards."""
        models, copies, self.models, self.copies = self.models, self.copies, None, None
        assert models is not None
        if copies is None:
            return replace(runner, target=models[0], drafter=models[1])
        copy_all(copies)
        return runner


def check_update(engine_plan: EnginePlan, asked: UpdateWeights) -> None:
    """Raises ConfigError and InputError where weights cannot be replaced, before anything is read."""
    config, place = engine_plan.config, engine_plan.place
    if asked.more and (asked.model is not None or asked.draft is not None):
        raise InputError("more: of tensors that are sent alone; a folder is whole")
    if config.ep_size > 1 or config.disaggregation_slots:
        raise ConfigError("update_weights: not with --ep-size and --disaggregation-slots; start another engine")
    if place.dummy and not asked.is_sent:
        raise ConfigError("update_weights: --load-format dummy reads no weights; start with a folder's")
    if (asked.draft is not None or asked.draft_tensors is not None) and config.draft is None:
        raise ConfigError(f"update_weights: draft {asked.draft}: this engine has no draft head of its own folder")
    if config.kv_offloading_folder is not None:
        raise ConfigError(
            "update_weights: not with --kv-offloading-folder, whose pages are of the weights of the start; start again"
            " with the others"
        )
    if asked.makes_room and (config.kv_offloading_size is not None or config.check_level >= 3):
        raise ConfigError(
            "update_weights: too little memory for new weights beside those in force, and K/V cannot make room with"
            " --kv-offloading-size or --check-level 3; lower --mem-fraction-static"
        )


def plan_of_update(engine_plan: EnginePlan, asked: UpdateWeights) -> EnginePlan:
    """Of the folders that are asked for, where they are of the same model and head; no weight is read.

    Raises ConfigError for others, CheckpointError as a start does.
    """
    config, old, draft = engine_plan.config, engine_plan.target, asked.draft
    model = config.model if asked.model is None else asked.model
    config = replace(config, model=model, draft=config.draft if draft is None else draft)
    spec = target_spec(resolve_folder(config.model))
    if spec.config != old.config:
        alike = replace(spec.config, tied_embeddings=old.config.tied_embeddings) == old.config
        what = "output matrices, of which one is the embedding," if alike else "config.json"
        raise ConfigError(f"update_weights: {config.model} is not the model of {old.folder}: their {what} differ")
    drafter_spec = read_draft_spec(config, spec) if config.speculates else None
    if drafter_spec != engine_plan.draft:
        raise ConfigError(f"update_weights: {config.draft} is another draft head: its config or its tensors differ")
    return replace(engine_plan, config=config, target=spec, draft=drafter_spec)


def check_headers(new_plan: EnginePlan, asked: UpdateWeights, kept: Collection[str]) -> None:
    """Names, shapes and kinds of all tensors in the folders that would be read. kept: what has come in parts.

    Raises CheckpointError as a start does. What is sent cannot be looked at before it has come: its sender waits.
    """
    if asked.more:
        return
    sent = {"model": asked.model_tensors, "draft": asked.draft_tensors}
    named = {"model": asked.model, "draft": asked.draft}
    came = {kind for kind in sent if sent[kind] is not None or (kind in kept and named[kind] is None)}
    own_head = "draft" if new_plan.config.draft is not None else "model"
    if "model" not in came and (asked.model is not None or (not came and asked.draft is None)):
        new_plan.target.check()
    if new_plan.draft is not None and own_head not in came:
        new_plan.draft.check()


def read_weights(
    engine_plan: EnginePlan,
    asked: UpdateWeights,
    products: Products,
    runner: ModelRunner,
    received: Received,
    sent_before: frozenset[str] = frozenset(),
) -> NewWeights:
    """Read target and draft head, as far as they are asked for, from folders or from what was received.

    Products are taken as they were, so that bits depend on the numbers alone. sent_before: whose numbers no folder has.
    Raises ConfigError for another architecture, CheckpointError as a start does; on all ranks where it does on one.
    """
    check_update(engine_plan, asked)
    new_plan = plan_of_update(engine_plan, asked)
    config, place, drafter_spec = new_plan.config, new_plan.place, new_plan.draft
    given = {kind: received.get(kind) for kind in ("model", "draft")}
    named = {"model": asked.model, "draft": asked.draft}
    new = {kind for kind, folder in named.items() if folder is not None or given[kind]}
    new = new or {"model", "draft"}  # those in force, read again
    if place.dummy:  # a shape alone was there
        new_plan = replace(new_plan, place=replace(place, dummy=False))
    own_head = config.draft is not None
    if place.dummy and drafter_spec is not None and not (given["model"] and (given["draft"] or not own_head)):
        raise ConfigError("update_weights: with --load-format dummy send model and draft; no folder has either")
    if drafter_spec is not None and own_head and "draft" not in new and "draft" in sent_before:
        raise ConfigError("update_weights: the draft head is made for a target, and no folder has it: send it, too")
    old_models = target, drafter = runner.target, runner.drafter
    if "model" in new:
        target = load_target(new_plan, products, runner.adapters, given["model"])
    if drafter_spec is not None:
        of_head = given["draft"] if own_head else given["model"]
        drafter = load_drafter(new_plan, products, target, runner.draft_adapters, of_head)
    copies = copies_between(old_models, (target, drafter))
    if not place.parallel.minimum(int(copies is not None)):
        copies = None  # of one rank's shard: ranks capture together, or none does
    if received and place.device.type == "cuda":
        torch.cuda.synchronize()  # whoever sent it may change it now
    first = place.parallel.rank == 0
    sent = frozenset(kind for kind in ("model", "draft") if (given[kind] if kind in new else kind in sent_before))
    kept = None if drafter_spec is None else kept_calibration(config, new_plan.target.folder, drafter_spec, first)
    scales = {} if given["model"] else kv_scales(new_plan)
    return NewWeights(new_plan, (target, drafter), copies, kept, scales, sent)


def weight_bytes(runner: ModelRunner) -> int:
    """What target and draft head take, copies of weights included."""
    return sum(storage.nbytes() for storage in storages_of(runner.target, runner.drafter))


def load_models(engine_plan: EnginePlan, products: Products, runner: ModelRunner) -> tuple[Target, Drafter | None]:
    """Target and draft head of a plan's folders, beside which the runner's adapters are. Raises as a start does, on all
    ranks that share a model where it does on one.
    """
    target = load_target(engine_plan, products, runner.adapters, None)
    if engine_plan.draft is None:
        return target, None
    return target, load_drafter(engine_plan, products, target, runner.draft_adapters, None)


def load_target(
    engine_plan: EnginePlan, products: Products, adapters: Adapters | None, sent: Mapping[str, Tensor] | None
) -> Target:
    """As `load_models`. sent: tensors in the place of the folder's."""
    spec, draft = engine_plan.target, engine_plan.draft
    place = replace(engine_plan.place, adapters=adapters, sent=sent)
    aux = draft.aux_inputs if draft is not None else ()
    return on_all_ranks(spec.folder, place, lambda: spec.load(aux, products.of_target(place)))


def load_drafter(
    engine_plan: EnginePlan,
    products: Products,
    target: Target,
    adapters: Adapters | None,
    sent: Mapping[str, Tensor] | None,
) -> Drafter:
    """Beside a target that is there. adapters, sent: as of `load_target`, the drafter's."""
    draft, place = engine_plan.draft, replace(engine_plan.place, adapters=adapters, sent=sent)
    assert draft is not None
    folder = draft.folder or engine_plan.target.folder
    return on_all_ranks(folder, place, lambda: draft.load(target, products.of_draft(place)))


def on_all_ranks(folder: Path, place: LoadContext, load: Callable[[], Loaded]) -> Loaded:
    """What is loaded. Raises CheckpointError for a folder whose part another rank could not take."""
    try:
        loaded = load()
    except Exception:
        place.parallel.minimum(0)
        raise
    if not place.parallel.minimum(1):
        raise CheckpointError(f"{folder}: {ELSEWHERE}")
    return loaded
