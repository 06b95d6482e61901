"""The language model of a folder that holds more, such as a vision tower: its part of `config.json`, and what its
tensors are called there. Of text alone it is the family that its part says; the rest of the folder is left out.

Source of the names: the weights of google/gemma-3-4b-it, mistralai/Mistral-Small-3.1-24B-Instruct-2503,
Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct, and `transformers`' conversion of each; of Intern-S2-Preview
vllm's `interns2_preview.py` and sglang's configuration, which make it Qwen3.5 with experts beside a tower more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, table
from treetop.checkpoints.params import Param
from treetop.types.errors import CheckpointError, shown


@dataclass(frozen=True, slots=True)
class StoredNames:
    """What a folder calls what is `model.` and `lm_head.` in one of text alone."""

    decoder: str = "model."
    head: str = "lm_head."

    def stored(self, name: str) -> str:
        """name: of a tensor, or the prefix of some, in a folder of text alone."""
        for plain, ours in (("model.", self.decoder), ("lm_head.", self.head)):
            if name.startswith(plain):
                return ours + name.removeprefix(plain)
        return name

    def of(self, param: Param) -> Param:
        return replace(param, sources=tuple(replace(each, name=self.stored(each.name)) for each in param.sources))


TEXT_ALONE = StoredNames()
_LAYOUTS = (
    StoredNames("language_model.model.", "language_model.lm_head."),
    StoredNames("model.language_model."),
    TEXT_ALONE,  # of Qwen2.5-VL, whose tower lies beside `model.`
)
_TOWERS = (
    *("visual", "vision_tower", "vision_model", "vision_embedder", "embed_vision"),
    *("audio_tower", "embed_audio", "multi_modal_projector", "mm_projector", "vit_large_projector"),
    *("audio_encoder", "audio_tokenizer", "speech_embeddings", "time_series", "vision_adapter", "vision_projection"),
)
TOWERS = tuple(f"{root}{tower}." for root in ("", "model.") for tower in _TOWERS)
"""Prefixes of tensors that text does not need."""
_TIED = "tie_word_embeddings"


def names_in(tensors: Collection[str]) -> StoredNames:
    """tensors: all names of a folder; without any, as `transformers` 5 writes them."""
    found = (each for each in _LAYOUTS if each.stored("model.embed_tokens.weight") in tensors)
    return next(found, _LAYOUTS[1])


def text_config(config: Config, where: Path, kinds: Collection[str], tensors: Collection[str]) -> dict[str, Any]:
    """The language model's part of a config: `text_config`, or in older files what is no other part's.

    kinds: the `model_type`s of the part that are supported. Ends of a text, formats and whether the output matrix is
    the embedding are said for the whole folder, or in the part; where nobody says the last, or both differ, the tensors
    do. Raises CheckpointError for another kind.
    """
    part = table(config, "text_config", where)
    if not part:
        return {key: value for key, value in config.items() if not key.endswith(("vision_config", "audio_config"))}
    kind = part.get("model_type")
    if kind is not None and kind not in kinds:
        raise CheckpointError(
            f"{where}: text_config: model_type {shown(kind)} is not supported, only {' or '.join(kinds)}"
        )
    tied = {flag(each, _TIED, where) for each in (config, part) if each.get(_TIED) is not None}
    if len(tied) != 1 and tensors:
        tied = {names_in(tensors).stored("lm_head.weight") not in tensors}
    said: Mapping[str, Any] = {
        "eos_token_id": config.get("eos_token_id"),
        "quantization_config": config.get("quantization_config"),
        _TIED: tied.pop() if len(tied) == 1 else config.get(_TIED),
    }
    return {**part, **{key: value for key, value in said.items() if value is not None}}
