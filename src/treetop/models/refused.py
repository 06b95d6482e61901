"""What people have and treetop does not run, by name, with the reason."""

import re
from pathlib import Path

from treetop.models.config import Config
from treetop.types.errors import CheckpointError

_MLA = "its attention is compressed (MLA)"
_LINEAR = "it has layers of linear attention or state space"
_IMAGES = "it reads images or sound, and its language model is none of those that load without them"
_ENCODER = "it is no decoder that generates text"

_CHUNKED = "its attention is chunked: a token sees its own part of the text alone"
_SOFTCAPPED = "its scores or logits are capped (softcap)"
_LATE_NORMS = "its queries and keys have norms after the rotation"
_CORRECTED_SOFTMAX = "its router corrects the choices of a softmax"
_PARALLEL = "its attention and feed-forward are added side by side"
_UNGATED = "its feed-forward has no gate"
_GATED_SHARED = "its shared experts have a gate of their own"

_BY_NAME = {
    _CHUNKED: "Llama4",
    _SOFTCAPPED: "Gemma2 VaultGemma",
    _LATE_NORMS: "HunYuanDenseV1 HunYuanMoEV1",
    _CORRECTED_SOFTMAX: "Ernie4_5_Moe",
    _PARALLEL: "Cohere Cohere2 Falcon GPTNeoX GPTJ Phi",
    _UNGATED: "Apertus Arcee GPT2 GPTBigCode Nemotron OPT Starcoder2",
    _GATED_SHARED: "Qwen2Moe",
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
    stem = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
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
