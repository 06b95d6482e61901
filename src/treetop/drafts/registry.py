"""Drafters by algorithm, and which of them a folder holds."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import Config
from treetop.drafts.assistant import AssistantSpec, assistant_sign, assistant_spec
from treetop.drafts.block import BlockHeadSpec
from treetop.drafts.block_config import block_spec, find_block
from treetop.drafts.draft_model import DraftModelSpec, draft_model_spec
from treetop.drafts.eagle import EagleSpec, eagle_spec
from treetop.drafts.eagle3 import Eagle3Spec
from treetop.drafts.eagle3_config import eagle3_spec
from treetop.drafts.head_files import head_config
from treetop.drafts.mtp import MtpSpec, find_mtp, mtp_spec
from treetop.drafts.ngram import ngram_spec
from treetop.drafts.peagle import PEagleSpec, peagle_sign, peagle_spec
from treetop.drafts.protocol import DrafterSpec
from treetop.drafts.refused import refuse_draft
from treetop.drafts.shared_words import shared_words
from treetop.drafts.with_lookup import lookup_beside
from treetop.models.config import ModelConfig, read_config
from treetop.models.registry import target_spec
from treetop.types.config import Recurrence
from treetop.types.errors import CheckpointError, ConfigError

__all__ = ["DRAFTERS", "ONLY_FOR", "FoundDraft", "drafter_spec", "find_draft", "lookup_beside", "ngram_spec"]

HeadSpec = AssistantSpec | EagleSpec | Eagle3Spec | PEagleSpec | BlockHeadSpec | DraftModelSpec
DRAFTERS: dict[str, Callable[[Path, ModelConfig, bool], HeadSpec]] = {
    "EAGLE": eagle_spec,
    "EAGLE3": eagle3_spec,
    "PEAGLE": peagle_spec,
    "DFLASH": block_spec,
    "DFLASH2": block_spec,
    "DSPARK": block_spec,
    "DOMINO": block_spec,
    "GEMMA4": assistant_spec,
    "STANDALONE": draft_model_spec,
}
"""Algorithm -> the reader of a folder, for a target, and whether the folder has no tensors to look at."""
ONLY_FOR = {"GEMMA4": "Gemma4"}
"""Algorithms whose targets are of one family, and how the names of its architectures begin."""
_ALGORITHMS = {"DFlash 2": "DFLASH2", "DSpark": "DSPARK", "Domino": "DOMINO"}
"""Of block heads, by their kind; of others DFLASH."""
_ASSUMED = "EAGLE3"
"""What a folder without tensors holds, if nobody says."""


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """What a folder can draft with.

    algorithm: as `--speculative-algorithm` takes it.
    layout: who writes such files.

    reasons: what says so, each a sentence that names a tensor or a key.
    """

    algorithm: str
    layout: str
    reasons: tuple[str, ...]


def drafter_spec(
    folder: Path,
    target: ModelConfig,
    algorithm: str | None = None,
    dummy: bool = False,
    recurrence: Recurrence = "auto",
    window: int | None = None,
    eagle3: Recurrence = "auto",
    *,
    num_steps: int | None = None,
    target_folder: Path | None = None,
) -> DrafterSpec:
    """The drafter in a folder. algorithm: what it must be; None for what it is. dummy: its weights will be random.
    recurrence: of MTP layers, eagle3: of an EAGLE-3 head. window: most tokens that its layers see. num_steps: of the
    deepest tree, for a head that runs as many placeholders as it is asked for. target_folder: with the tokenizer that
    tells which words a language model shares.

    Raises CheckpointError for a folder without a drafter that runs, ConfigError if it is of another algorithm.
    """
    spec = _any_spec(folder, target, algorithm, dummy, recurrence)
    if eagle3 != "auto":
        if not isinstance(spec, Eagle3Spec | PEagleSpec):
            raise ConfigError(f"--speculative-eagle-recurrence {eagle3}: {folder} holds no EAGLE-3 head; drop it")
        spec = spec.with_recurrence(eagle3)
    if num_steps is not None and isinstance(spec, PEagleSpec):
        spec = spec.with_steps(num_steps)
    if target_folder is not None and isinstance(spec, DraftModelSpec):
        words = shared_words(folder, spec.config.vocab_size, target_folder, target.vocab_size)
        spec = spec if words is None else spec.with_words(words)
    return spec if window is None else spec.with_window(window)


def _any_spec(
    folder: Path, target: ModelConfig, algorithm: str | None, dummy: bool, recurrence: Recurrence
) -> HeadSpec | MtpSpec:
    if algorithm == "MTP" and (dummy or not _is_head(tensor_files(folder))):
        return mtp_spec(folder, target, dummy, recurrence)
    if algorithm == "STANDALONE":
        return draft_model_spec(folder, target, dummy)
    if dummy:
        said = _found_by_config(folder, ())
        return DRAFTERS[algorithm or (_ASSUMED if said is None else said.algorithm)](folder, target, True)
    found = find_draft(folder)
    if algorithm not in (None, found.algorithm):
        raise ConfigError(
            f"--speculative-algorithm {algorithm}, but {folder} holds what {found.algorithm} needs:"
            f" {'; '.join(found.reasons)}"
        )
    if found.algorithm == "MTP":
        return mtp_spec(folder, target, False, recurrence)
    return DRAFTERS[found.algorithm](folder, target, False)


def find_draft(folder: Path, algorithm: str | None = None) -> FoundDraft:
    """Which drafter a folder holds, by the names of its tensors, and in which layout, by its config.

    Assistants and heads that propose in parallel are told first, by the config, or by P-EAGLE's `mask_hidden`. Then the
    first of these that is there decides: an MTP layer's tensor (`MtpNames.shown_by`), `midlayer.`,
    `layers.0.hidden_norm.weight` or `d2t` of EAGLE-3, `fc.weight` of EAGLE.

    algorithm: what is asked for. A language model drafts only where STANDALONE is, for every target is one.

    Raises CheckpointError for a folder that holds none, or one that is not supported.
    """
    names = tensor_files(folder)
    if algorithm == "STANDALONE":
        target_spec(folder)
        architecture = read_config(folder)["architectures"][0]
        return FoundDraft(algorithm, architecture, (f"config.json has architectures {architecture}",))
    by_config = _found_by_config(folder, names)
    if by_config is not None:
        return by_config
    layers = [name for name in names if name.startswith("model.layers.")]
    mtp = find_mtp(names)
    if mtp is not None:
        return FoundDraft(
            "MTP", mtp.layout, (f"it holds {mtp.names.of(mtp.names.projection, mtp.root, mtp.numbers[0])}.weight",)
        )
    if layers and "fc.weight" not in names:
        raise CheckpointError(
            f"{folder}: a target, not a draft head: it holds {layers[0]} and no fc.weight; give a head's folder to"
            " --speculative-draft-model-path, or draft with a whole model by --speculative-algorithm STANDALONE"
        )
    config, nested = head_config(folder)
    signs = _signs_of_eagle3(names)
    if signs:
        layout, why = _eagle3_layout(config, nested, names)
        return FoundDraft("EAGLE3", layout, (f"it holds {signs[0]}", *why))
    if "fc.weight" in names:
        return FoundDraft("EAGLE", "SafeAILab", ("it holds fc.weight, and no hidden_norm of an EAGLE-3 head",))
    raise CheckpointError(
        f"{folder}: no draft head: it holds {next(iter(names), 'nothing')}, but neither fc.weight (EAGLE) nor"
        " midlayer.hidden_norm.weight (EAGLE3)"
    )


def _found_by_config(folder: Path, names: Collection[str]) -> FoundDraft | None:
    """A head that proposes in parallel, by the folder's config, if there is any. names: of its tensors, if it has any.

    Raises CheckpointError for a head of a kind that is not supported.
    """
    where = folder / "config.json"
    if not where.exists():
        return None
    config = read_config(folder)
    sign = peagle_sign(config, names)
    if sign is not None:
        nested = config.get("speculators_model_type") is not None
        return FoundDraft("PEAGLE", f"P-EAGLE of {'speculators' if nested else 'amazon'}", (sign,))
    sign = assistant_sign(config)
    if sign is not None:
        return FoundDraft("GEMMA4", "transformers", (sign,))
    refuse_draft(config, where, names)
    layout = find_block(config)
    if layout is None:
        return None
    algorithm = _ALGORITHMS.get(layout.kind, "DFLASH")
    return FoundDraft(algorithm, f"{layout.kind} of {layout.writer}", (layout.sign,))


def _is_head(names: Collection[str]) -> bool:
    """Whether these are an EAGLE head's tensors, of any kind."""
    return bool(_signs_of_eagle3(names)) or "fc.weight" in names


def _signs_of_eagle3(names: Collection[str]) -> list[str]:
    return [name for name in names if name in _OF_EAGLE3 or name.startswith("midlayer.")]


_OF_EAGLE3 = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "d2t")


def _eagle3_layout(config: Config, nested: bool, names: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Who writes such files, and the key or the tensor that says so; none for the original layout."""
    if nested:
        return "speculators", ("config.json has speculators_model_type",)
    norms = [name for name in names if name.startswith(("fc_norm.", "aux_norm_"))]
    if norms:
        return "EAGLE-3.1", (f"it holds {norms[0]}",)
    if config.get("eagle_config"):
        return "SpecForge", ("config.json has eagle_config",)
    return "SafeAILab", ()
