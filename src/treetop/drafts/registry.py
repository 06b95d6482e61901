"""Drafters by algorithm, which the tensors of a folder tell."""

from collections.abc import Callable
from pathlib import Path

from treetop.drafts.eagle3 import eagle3_spec
from treetop.drafts.protocol import DrafterSpec
from treetop.models.checkpoint import tensor_files
from treetop.models.config import ModelConfig
from treetop.types.errors import CheckpointError, ConfigError

DRAFTERS: dict[str, Callable[[Path, ModelConfig, bool], DrafterSpec]] = {"EAGLE3": eagle3_spec}
"""Algorithm -> the reader of a folder, for a target, and whether the folder has no tensors to look at."""
_ASSUMED = "EAGLE3"
"""What a folder without tensors holds."""


def drafter_spec(folder: Path, target: ModelConfig, algorithm: str | None = None, dummy: bool = False) -> DrafterSpec:
    """The drafter in a folder. algorithm: what it must be; None for what it is. dummy: its weights will be random.

    Raises CheckpointError for a folder without a drafter that runs, ConfigError if it is of another algorithm.
    """
    if dummy:
        return DRAFTERS[_ASSUMED](folder, target, True)
    _refuse_target(folder)
    found = _algorithm_of(set(tensor_files(folder)))
    if algorithm not in (None, found):
        raise ConfigError(f"--speculative-algorithm {algorithm}, but {folder} holds an {found} head")
    if found not in DRAFTERS:
        raise CheckpointError(f"{folder}: holds an {found} head; only {', '.join(DRAFTERS)} heads are supported")
    return DRAFTERS[found](folder, target, False)


def _refuse_target(folder: Path) -> None:
    """Raise CheckpointError if the folder holds a target: layers of a model, and no `fc` that fuses features."""
    names = tensor_files(folder)
    layers = [name for name in names if name.startswith("model.layers.")]
    if layers and "fc.weight" not in names:
        raise CheckpointError(
            f"{folder}: a target, not a draft head: it holds {layers[0]} and no fc.weight; give a head's folder to"
            " --speculative-draft-model-path"
        )


def _algorithm_of(names: set[str]) -> str:
    """An EAGLE-3 head norms the feature beside the embedding; EAGLE-1 and -2 heads have no such norm."""
    eagle3 = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "d2t"}
    return "EAGLE3" if eagle3 & names or "fc.weight" not in names else "EAGLE"
