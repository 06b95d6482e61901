"""What people have and treetop does not run, by name, with the reason."""

import re
from collections.abc import Collection
from pathlib import Path

from treetop.checkpoints.config_fields import Config
from treetop.types.errors import CheckpointError

_MLA = "its attention is compressed (MLA) in another way than those that load"
_SPARSE = "its attention is sparse in another way than those that load"
_DEEPSEEK_4 = "it has attention to compressed blocks of keys, hyper-connections and routers by hash"
_BLOCKS = "its attention reads blocks of keys that an indexer chooses"
_DOTS_3 = "the rotary part of its compressed keys has a norm, and layers with windows stand among sparse ones"
_INKLING = "it has convolutions behind keys, values and halves of layers, scores by distance, weighted shared experts"
_LINEAR = "it has layers of linear attention or state space of another kind than those that load"
_QWEN4 = "it has indexed attention, hyper-connections and n-gram embeddings with a convolution of their own"
_KIMI_3 = "beside Kimi delta attention it has residuals across layers, latent experts, SiTU and gated MLA"
_IMAGES = "it reads images or sound, and its language model is none of those that load without them"
_ENCODER = "it is no decoder that generates text"

_SOFTCAPPED = "its scores or logits are capped (softcap)"
_LEARNED = "its positions are learned or biases of scores"

_BY_NAME = {
    _SOFTCAPPED: "VaultGemma",
    _LEARNED: "Bloom GPT2 GPTBigCode MPT OPT",
    _MLA: "AXK1 AXK2 HYV4",
    _SPARSE: "Glm5Next",
    _DEEPSEEK_4: "DeepseekV4",
    _BLOCKS: "MiniMaxM3Sparse MiniMaxM3VL",
    _DOTS_3: "Dots3Note",
    _INKLING: "Inkling",
    _QWEN4: "Qwen4Exp",
    _KIMI_3: "KimiK3",
    _LINEAR: "FalconMamba Jamba Lfm3 Mamba Mamba2 RecurrentGemma Rwkv Zamba Zamba2",
}
"""Of `transformers` 5.24: those whose configuration has a `kv_lora_rank`, those with such layers, and what recipes of
vLLM serve with a draft; and Kimi-K3."""
_INSTEAD = "`treetop models` lists those that load"
_BY_ENDING = {
    _IMAGES: "ForConditionalGeneration ForImageTextToText",
    _ENCODER: "ForMaskedLM ForSequenceClassification ForTokenClassification ForQuestionAnswering EncoderModel",
}
_BY_KEY = {
    "index_topk": _SPARSE,
    "kv_lora_rank": _MLA,
    "linear_num_key_heads": _LINEAR,
    "mamba_d_state": _LINEAR,
    "vision_config": _IMAGES,
    "audio_config": _IMAGES,
    "is_encoder_decoder": _ENCODER,
}
_ATTENTION = ("attention", "full_attention", "sliding_attention")
"""Types of layers that any family may have, whatever other keys its config has: Granite 4's smallest lack Mamba."""
_DRAFT = re.compile(r"eagle|speculator|assistant", re.IGNORECASE)
"""What SafeAILab, SpecForge, `speculators` and Gemma 4 call a draft head's architecture."""


def known_refused() -> dict[str, tuple[str, ...]]:
    """What a model needs that treetop lacks, and the families of `transformers` that do, without their ending."""
    return {why: tuple(sorted(names.split())) for why, names in _BY_NAME.items()}


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
        raise CheckpointError(f"{where}: architecture {name} is not supported: {reasons[0]}; {_INSTEAD}")
    if _DRAFT.search(name):
        raise CheckpointError(
            f"{where}: architecture {name} is that of a draft head, not of a target; give the target's folder as the"
            " model and this one to --speculative-draft-model-path"
        )


def refuse_by_key(config: Config, where: Path, known: Collection[str] = ()) -> None:
    """Raises CheckpointError for a key that says so, whatever the architecture is called, but for those `known`."""
    kinds = config.get("layer_types")
    attends = isinstance(kinds, list) and bool(kinds) and all(kind in _ATTENTION for kind in kinds)
    for key, why in _BY_KEY.items():
        if key not in known and config.get(key) and not (why == _LINEAR and attends):
            raise CheckpointError(f"{where}: {key}: this model is not supported: {why}; {_INSTEAD}")
