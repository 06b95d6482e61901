"""What people have and treetop does not run, by name, with the reason."""

import re
from pathlib import Path

from treetop.models.config import Config
from treetop.types.errors import CheckpointError

_MLA = "its attention is compressed (MLA)"
_LINEAR = "it has layers of linear attention or state space"
_IMAGES = "it reads images or sound; only models of text alone are"
_ENCODER = "it is no decoder that generates text"

_BY_NAME = {
    _MLA: "AXK1 AXK2 DeepseekV2 DeepseekV3 DeepseekV32 Dots3Note Glm4MoeLite GlmMoeDsa HYV4 LongcatFlash MiniCPM3"
    " Youtu",
    _LINEAR: "BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Lfm3 Mamba Mamba2"
    " MiniMax NemotronH OlmoHybrid Qwen3_5 Qwen3_5Moe Qwen3Next Qwen4Exp RecurrentGemma Rwkv Zamba Zamba2",
}
"""Of `transformers` 5.23: those whose configuration has a `kv_lora_rank`, and those with such layers."""
_BY_ENDING = {
    _IMAGES: "ForConditionalGeneration ForImageTextToText",
    _ENCODER: "ForMaskedLM ForSequenceClassification ForTokenClassification ForQuestionAnswering EncoderModel",
}
_BY_KEY = {
    "kv_lora_rank": _MLA,
    "linear_num_key_heads": _LINEAR,
    "mamba_d_state": _LINEAR,
    "vision_config": _IMAGES,
    "audio_config": _IMAGES,
    "is_encoder_decoder": _ENCODER,
}
_DRAFT = re.compile(r"eagle|speculator", re.IGNORECASE)
"""What SafeAILab, SpecForge and `speculators` call a draft head's architecture."""


def refuse_adapter(folder: Path) -> None:
    """Raises CheckpointError for a folder of a LoRA adapter."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: adapter_config.json: LoRA adapters are not supported; merge the adapter into its model"
        )


def refuse_by_name(name: str, where: Path) -> None:
    """Raises CheckpointError, with the reason, for an architecture that is known and not supported."""
    stem = name.removesuffix("ForCausalLM")
    reasons = [why for why, names in _BY_NAME.items() if stem in names.split()]
    reasons += [why for why, endings in _BY_ENDING.items() if name.endswith(tuple(endings.split()))]
    if reasons:
        raise CheckpointError(f"{where}: architecture {name} is not supported: {reasons[0]}")
    if _DRAFT.search(name):
        raise CheckpointError(
            f"{where}: architecture {name} is that of a draft head, not of a target; give the target's folder as the"
            " model and this one to --speculative-draft-model-path"
        )


def refuse_by_key(config: Config, where: Path) -> None:
    """Raises CheckpointError for a key that says so, whatever the architecture is called."""
    for key, why in _BY_KEY.items():
        if config.get(key):
            raise CheckpointError(f"{where}: {key}: this model is not supported: {why}")
