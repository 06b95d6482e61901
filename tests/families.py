"""Tiny random models of every family, made by `transformers`, which is also what they are compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tiny_models import EOS, LLAMA3_ROPE, Pair, copy_folder, save_random, save_random_head

WINDOW = 12
SIZES = {
    "vocab_size": 13,  # a tree holds much of what can come, so a head that knows nothing is often right
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
WINDOWED = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
SCALED_FULL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _as_is(target: Path, folder: Path) -> Path:
    return target


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model. name: of the class in `transformers`, without the ending. finish: makes the folder that
    treetop reads of the one that `transformers` wrote. by_token: the reference runs one token after the other.
    vision: of a family that reads images too, the other keys of its config; `config` is then its language model's.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Path, Path], Path] = _as_is
    by_token: bool = False
    vision: dict[str, Any] | None = None

    @property
    def architecture(self) -> str:
        return f"{self.name}For{'CausalLM' if self.vision is None else 'ConditionalGeneration'}"

    def save(self, folder: Path, seed: int = 0) -> "Saved":
        config = {**SIZES, **self.config}
        if self.vision is None:
            config = getattr(transformers, f"{self.name.replace('Gemma3', 'Gemma3Text')}Config")(**config)
        else:
            config = getattr(transformers, f"{self.name}Config")(text_config=config, **self.vision)
        model = getattr(transformers, self.architecture)
        theirs = save_random(model, config, folder / "transformers", seed)
        ours = self.finish(theirs, folder / "target")
        head = save_random_head(folder / "head", theirs, draft_vocab=None, seed=seed + 1)
        return Saved(Pair(ours, head), theirs, self.architecture, self.by_token)


@dataclass(frozen=True)
class Saved:
    """pair: what treetop loads. theirs: the target as `transformers` loads it, by a class of this name."""

    pair: Pair
    theirs: Path
    architecture: str
    by_token: bool

    def reference(self, dtype: torch.dtype) -> Any:
        model = (
            getattr(transformers, self.architecture)
            .from_pretrained(self.theirs, dtype=dtype, experts_implementation="eager")
            .eval()
        )
        model.generation_config.eos_token_id = None
        return model

    @torch.no_grad()
    def logits(self, model: Any, ids: list[int], more: int = 0) -> torch.Tensor:
        """[len(ids), vocab]; and of `more` tokens that follow greedily, [len(ids) + more, vocab]."""
        if not self.by_token:
            given = torch.tensor([ids])
            if more:
                mask = torch.ones_like(given)
                given = model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=more, pad_token_id=0)
            return model(given).logits[0]
        rows, cache = [], None
        while len(rows) < len(ids) + more:
            token = ids[len(rows)] if len(rows) < len(ids) else int(rows[-1].argmax())
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0])
        return torch.cat(rows)


def _with_mtp(target: Path, folder: Path) -> Path:
    """MiMo: Qwen2 under its own name, with a layer for further tokens that a target does not use."""
    tensors = load_file(target / "model.safetensors")
    layer = {
        name.replace("model.layers.0.", ""): t for name, t in tensors.items() if name.startswith("model.layers.0.")
    }
    added = {f"model.mtp_layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    added["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 64)
    copy_folder(target, folder, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    save_file({**tensors, **added}, folder / "model.safetensors")
    return folder


SEEING = {
    "Gemma3": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 12,
    },
    "Mistral3": {
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 16,
            "patch_size": 8,
        },
        "image_token_index": 12,
        "tie_word_embeddings": False,
    },
    "Qwen2_5_VL": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
        "image_token_id": 12,
        "video_token_id": 11,
        "vision_start_token_id": 10,
        "vision_end_token_id": 9,
    },
}
SEEING["Qwen2VL"] = {
    **SEEING["Qwen2_5_VL"],
    "vision_config": {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 1},
}
SEEING["Qwen3VL"] = SEEING["Qwen3VLMoe"] = {
    **SEEING["Qwen2_5_VL"],
    "vision_config": {**SEEING["Qwen2_5_VL"]["vision_config"], "deepstack_visual_indexes": [0]},
}
"""What reads images in a family, as small as it can be."""


def _mrope(*section: int, **keys: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **keys}


def _as_first_released(target: Path, folder: Path) -> Path:
    """A folder with the language model's tensors in the layout of the first releases, without a stated tie."""
    tensors = load_file(target / "model.safetensors")
    turned = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if name.startswith("model.language_model."):
            plain = name.replace("model.language_model.", "language_model.model.")
        turned["language_model.lm_head.weight" if name == "lm_head.weight" else plain] = tensor
    copy_folder(target, folder)
    save_file(turned, folder / "model.safetensors")
    return folder


def _by_columns(target: Path, folder: Path) -> Path:
    """A folder with experts [experts, in, out], as published; `transformers` saves new ones as [experts, out, in]."""
    tensors = load_file(target / "model.safetensors")
    turned = {name: t.transpose(1, 2) for name, t in tensors.items() if ".experts." in name}
    return copy_folder(target, folder, tensors=turned)


FAMILIES: dict[str, Tiny] = {
    "llama 2": Tiny("Llama", {"num_key_value_heads": 4}),
    "llama 3": Tiny("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama yarn": Tiny("Llama", {"rope_parameters": YARN}),
    "llama dynamic": Tiny(
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            "max_position_embeddings": 42,
        },
        by_token=True,
    ),
    "mistral": Tiny("Mistral", {"sliding_window": WINDOW}),
    "qwen2": Tiny("Qwen2", {"head_dim": 8}),
    "qwen2 windows": Tiny("Qwen2", {**WINDOWED, "head_dim": 8}),
    "qwen3": Tiny("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 windows": Tiny("Qwen3", WINDOWED),
    "gemma3": Tiny(
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": SCALED_FULL,
        },
    ),
    "glm4": Tiny("Glm4", {}),
    "mimo": Tiny("Qwen2", {"head_dim": 8, "num_hidden_layers": 4}, finish=_with_mtp),
    "gemma3 of images": Tiny(
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": SCALED_FULL,
        },
        vision=SEEING["Gemma3"],
    ),
    "mistral3": Tiny(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        finish=_as_first_released,
        vision=SEEING["Mistral3"],
    ),
    "qwen2 vl": Tiny("Qwen2VL", {"rope_parameters": _mrope(1, 1, 2), "head_dim": 8}, vision=SEEING["Qwen2VL"]),
    "qwen2.5 vl": Tiny("Qwen2_5_VL", {"rope_parameters": _mrope(1, 1, 2), "head_dim": 8}, vision=SEEING["Qwen2_5_VL"]),
    "qwen3 vl": Tiny("Qwen3VL", {"rope_parameters": _mrope(2, 2, 2, mrope_interleaved=True)}, vision=SEEING["Qwen3VL"]),
    "qwen3 vl moe": Tiny(
        "Qwen3VLMoe",
        {
            "rope_parameters": _mrope(2, 2, 2, mrope_interleaved=True),
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        finish=_by_columns,
        vision=SEEING["Qwen3VLMoe"],
    ),
    "seed oss": Tiny("SeedOss", {"attention_bias": True, "attention_out_bias": True}),
    "olmo2": Tiny("Olmo2", {"head_dim": 8, "attention_bias": True}),
    "olmo3": Tiny(
        "Olmo3",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": SCALED_FULL["sliding_attention"]},
        },
    ),
    "granite": Tiny(
        "Granite",
        {
            "head_dim": 8,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi3": Tiny("Phi3", {"head_dim": 8, "sliding_window": WINDOW}),
    "phi4 mini": Tiny("Phi3", {"head_dim": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "ernie": Tiny("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "smollm3": Tiny("SmolLM3", {"head_dim": 8, "no_rope_layers": [1, 0, 1, 0]}),
    "smollm3 windows": Tiny(
        "SmolLM3", {"head_dim": 8, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "minimax m2": Tiny("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 6}),
    "hy3": Tiny(
        "HYV3",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
}
