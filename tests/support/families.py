"""Tiny random models of every family, made by `transformers`, which is also what they are compared with."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.tiny_models import EOS, LLAMA3_ROPE, Pair, copy_folder, save_random, save_random_head

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


TEXT_CONFIGS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Whose configuration of text alone has another name."""


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model. name: of the class in `transformers`, without the ending. finish: makes the folder that
    treetop reads of the one that `transformers` wrote. by_token: the reference runs one token after the other.
    vision: of a family that reads images too, the other keys of its config; `config` is then its language model's.
    without: keys of `SIZES` that its config has not got.
    slow: compared in the long run alone, for another one of its kind is in the short one.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Path, Path], Path] = _as_is
    by_token: bool = False
    vision: dict[str, Any] | None = None
    without: tuple[str, ...] = ()
    slow: bool = False

    @property
    def architecture(self) -> str:
        return f"{self.name}For{'CausalLM' if self.vision is None else 'ConditionalGeneration'}"

    def save(self, folder: Path, seed: int = 0) -> "Saved":
        config = {key: value for key, value in {**SIZES, **self.config}.items() if key not in self.without}
        if self.vision is None:
            kind = self.name + ("Text" if self.name in TEXT_CONFIGS else "")
            config = getattr(transformers, f"{kind}Config")(**config)
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
        if self.architecture == "Llama4ForConditionalGeneration":
            model = model.language_model  # the whole fails on text alone: `image_outputs` (transformers 5.24)
        for module in model.modules():
            if hasattr(module, "slope_rate"):
                _with_whole_slopes(module)
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
        named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before 5.24
        while len(rows) < len(ids) + more:
            token = ids[len(rows)] if len(rows) < len(ids) else int(rows[-1].argmax())
            output = model(torch.tensor([[token]]), use_cache=True, **{named: cache})
            cache = output[named]
            rows.append(output.logits[0])
        return torch.cat(rows)


def _with_whole_slopes(module: Any) -> None:
    """MiniMax's decays in float64: `transformers` has them in float32, and in the model's dtype of what it has read."""
    heads, layers = module.num_attention_heads, module.num_hidden_layers
    head = torch.arange(1, heads + 1, dtype=torch.float64)
    factor = 1 - module.layer_idx / (layers - 1 + 1e-5) + 1e-5
    whole = (2.0 ** (-8 * head / heads) * factor)[:, None, None]
    dtype = module.slope_rate.dtype
    made = (whole, *module.decay_factors(whole))
    for name, value in zip(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), made, strict=True):
        setattr(module, name, torch.nn.Buffer(value.to(dtype)))


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
SEEING["Glm4v"] = SEEING["Glm46V"] = SEEING["Glm4vMoe"] = SEEING["GlmOcr"] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "image_size": 28,
    },
    **{f"{name}_token_id": number for number, name in enumerate(("image", "video", "image_start", "image_end"), 9)},
}
SEEING["Step3p7"] = {
    "vision_config": {
        "hidden_size": 16,
        "mlp_ratio": 1.0,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "max_position_embeddings": 4,
    },
    "image_token_id": 12,
}
SEEING["Kimi_K25"] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "image_token_id": 99,
    "tie_word_embeddings": False,
}
SEEING["MuseGlimmer"] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
    },
    "out_hidden_size": 16,
    "projector_hidden_size": 16,
}
SEEING["Gemma4"] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
    "image_token_id": 99,
}
SEEING["Llama4"] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    },
    "image_token_index": 99,
    "tie_word_embeddings": False,
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


def _as_step_35(target: Path, folder: Path) -> Path:
    """Step 3.7's text alone, its config in the spelling of Step 3.5's: lists by layer that go on with an MTP layer."""
    text = json.loads((target / "config.json").read_text())["text_config"]
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    config = {key: text[key] for key in (*kept, "sliding_window", "moe_intermediate_size", "share_expert_dim")}
    sliding = {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": text["head_dim"]}
    config |= {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": 2,
        "moe_num_experts": 6,
        "moe_top_k": 3,
        "moe_router_scaling_factor": 1.5,
        "moe_router_activation": "sigmoid",
        "moe_layers_enum": "1,2,3",
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": text["rms_norm_eps"],
        "layer_types": [*text["layer_types"], "sliding_attention"],
        "attention_other_setting": sliding,
        "rope_theta": [LLAMA3_ROPE["rope_theta"], 1e4, 1e4, LLAMA3_ROPE["rope_theta"], 1e4],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
        "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
        "swiglu_limits": [*(each or 0.0 for each in STEP["swiglu_limits"]), 0.0],
        "swiglu_limits_shared": [*(each or 0.0 for each in STEP["swiglu_limits_shared"]), 0.0],
        "num_nextn_predict_layers": 1,
        "eos_token_id": EOS,
        "bos_token_id": 1,
        "tie_word_embeddings": False,
    }
    tensors = load_file(target / "model.safetensors")
    copy_folder(target, folder)
    (folder / "config.json").write_text(json.dumps(config))
    text_alone = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    save_file({name: t for name, t in tensors.items() if name.startswith(text_alone)}, folder / "model.safetensors")
    return folder


DEEPSEEK = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
GROWING = {"llama_4_scaling_beta": 0.3}
HALF_MROPE = {**_mrope(1, 1), "partial_rotary_factor": 0.5}
GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 13,
    "final_logit_softcapping": 2.0,
}
GEMMA4_EXPERTS = {
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
GEMMA4_UNIFIED = {key: GEMMA4[key] for key in list(GEMMA4)[:5]} | {"final_logit_softcapping": 2.0}
LLAMA4 = {
    "attention_chunk_size": WINDOW,
    "no_rope_layer_interval": 3,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "floor_scale": 9,
    "attn_scale": 0.4,
    "pad_token_id": 0,
    "rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
GRANITE = {
    "head_dim": 8,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
GRANITE_4 = {
    "layer_types": ["full_attention"] * 4,
    "shared_intermediate_size": 40,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}
LAGUNA = {
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
    "num_attention_heads_per_layer": [4, 6, 6, 4],
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {**YARN, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "moe_routed_scaling_factor": 1.5,
}
STEP = {
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
    "num_sliding_attention_heads": 6,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 1.5,
    "pad_token_id": 0,
    "swiglu_limits": [0.0, None, 0.3, 0.2],
    "swiglu_limits_shared": [0.4, 0.0, None, 0.3],
}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 6,  # `transformers` turns so much
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
GROUPED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
INDEXED = {"index_topk": 9, "index_n_heads": 24, "index_head_dim": 10}
"""So many heads that no score is 0, as that of a few may be: of equal scores `transformers` takes any."""
SCALED_ALL = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
"""YaRN of DeepSeek: of the rotation 0.8 counts over 0.6, of scores 0.6."""
SMALL_4 = {**SCALED_ALL, "llama_4_scaling_beta": 0.3}


def _as_kimi(target: Path, folder: Path) -> Path:
    """Kimi-K2: DeepSeek-V3 under its own type, with code of its own, and older keys of the rotation."""
    rope = {"type": "yarn", **{key: value for key, value in KIMI.items() if key not in ("rope_type", "rope_theta")}}
    return copy_folder(
        target,
        folder,
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_parameters=None,
        rope_scaling=rope,
        rope_theta=KIMI["rope_theta"],
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        ep_size=1,
    )


def _as_kimi_25(target: Path, folder: Path) -> Path:
    """Kimi-K2.5 as published, its text of its own type; `transformers` 5.24 saves its layers as the tower's blocks."""
    _as_first_released(target, folder)
    path = folder / "model.safetensors"
    save_file({name.replace("model.blocks.", "model.layers."): t for name, t in load_file(path).items()}, path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    path.write_text(json.dumps({**config, "architectures": ["KimiK25ForConditionalGeneration"]}))
    return folder


LINEAR = {
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
LINEAR_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def _as_kimi_linear(target: Path, folder: Path) -> Path:
    """The dense layer as published: `transformers` writes it under the name of experts."""
    tensors = load_file(target / "model.safetensors")
    named = {name.replace(".0.block_sparse_moe.", ".0.mlp."): tensor for name, tensor in tensors.items()}
    copied = copy_folder(target, folder)
    save_file(named, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


def _as_longcat(target: Path, folder: Path) -> Path:
    """As published, with the keys that `transformers` does not write."""
    said = {"attention_method": "MLA", "zero_expert_type": "identity", "router_bias": False}
    return copy_folder(target, folder, **said, mla_scale_q_lora=True, mla_scale_kv_lora=True)


def _as_ling(target: Path, folder: Path) -> Path:
    """As published: `transformers` writes what leaves KDA under MLA's name for it, and other widths."""
    config = json.loads((target / "config.json").read_text())
    linear = [f"layers.{index}." for index, kind in enumerate(config["layer_types"]) if kind[0] == "l"]
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        of_linear = any(each in name for each in linear)
        tensors[name.replace(".attention.dense.", ".attention.o_proj.") if of_linear else name] = tensor
    own = {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": config["linear_head_dim"], "layer_types": None}
    copied = copy_folder(target, folder, **own, linear_head_dim=None, partial_rotary_factor=0.5)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


def _as_olmo_hybrid(target: Path, folder: Path) -> Path:
    """As published: `transformers` writes norms of full layers as those of linear ones, and convolutions in thirds."""
    config = json.loads((target / "config.json").read_text())
    full = [f".{index}.feedforward_layer_norm." for index, kind in enumerate(config["layer_types"]) if kind[0] == "f"]
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        of_full = any(each in name for each in full)
        tensors[name.replace("feedforward_layer_norm", "post_attention_layernorm") if of_full else name] = tensor
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        whole = torch.cat([tensors[each] for each in names])
        tensors |= dict(zip(names, whole.split([keys, keys, len(whole) - 2 * keys]), strict=True))
    copied = copy_folder(target, folder)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


LING = {
    **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
    "head_dim": 10,
    "short_conv_kernel_size": 3,
    "layer_group_size": 4,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "pad_token_id": 0,
}
MIXED = {**MAMBA, "mamba_n_heads": 8, "head_dim": 8}
LFM2 = {
    "head_dim": 8,
    "conv_L_cache": 4,
    "norm_eps": 1e-4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "pad_token_id": 0,
}
QWEN_MROPE = _mrope(1, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)

KIMI = {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

FAMILIES: dict[str, Tiny] = {
    "qwen3 next": Tiny("Qwen3Next", {**LINEAR, **LINEAR_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": Tiny("Qwen3_5", {**LINEAR, "layer_types": None, "head_dim": 16, "rope_parameters": None}),
    "qwen3.5 moe": Tiny("Qwen3_5Moe", {**LINEAR, **LINEAR_EXPERTS, "linear_num_value_heads": 2}),
    "qwen3.5 of images": Tiny("Qwen3_5", {**LINEAR, "rope_parameters": QWEN_MROPE}, vision=SEEING["Qwen3VL"]),
    "qwen3.5 moe of images": Tiny(
        "Qwen3_5Moe", {**LINEAR, **LINEAR_EXPERTS, "rope_parameters": QWEN_MROPE}, vision=SEEING["Qwen3VL"]
    ),
    "deepseek v2": Tiny("DeepseekV2", {**LATENT, **GROUPED, "topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": Tiny(
        "DeepseekV2", {**LATENT, **GROUPED, "q_lora_rank": None, "n_group": 1, "rope_parameters": SCALED_ALL}
    ),
    "deepseek v3": Tiny("DeepseekV3", {**LATENT, **GROUPED, "rope_parameters": SCALED_ALL}),
    "deepseek v32": Tiny("DeepseekV32", {**LATENT, **GROUPED, **INDEXED, "rope_parameters": SCALED_ALL}),
    "glm 5": Tiny("GlmMoeDsa", {**LATENT, **GROUPED, **INDEXED, "n_group": 1, "topk_group": 1, "v_head_dim": 14}),
    "glm 5.2": Tiny(
        "GlmMoeDsa",
        {**LATENT, **GROUPED, **INDEXED, "n_group": 1, "topk_group": 1, "index_topk_freq": 2},
    ),
    "deepseek v3 in halves": Tiny(
        "DeepseekV3",
        {
            **LATENT,
            **GROUPED,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "glm4 moe lite": Tiny("Glm4MoeLite", {**LATENT, **GROUPED, "n_group": 1, "topk_group": 1, "v_head_dim": 14}),
    "kimi k2": Tiny(
        "DeepseekV3", {**LATENT, **GROUPED, "n_group": 1, "topk_group": 1, "rope_parameters": KIMI}, _as_kimi
    ),
    "mistral4": Tiny("Mistral4", {**LATENT, **GROUPED, "head_dim": 16, "rope_parameters": SMALL_4}),
    "kimi k2.5": Tiny(
        "Kimi_K25",
        {"model_type": "deepseek_v3", **LATENT, **GROUPED},
        _as_kimi_25,
        vision=SEEING["Kimi_K25"],
    ),
    "mistral small 4": Tiny(
        "Mistral3",
        {"model_type": "mistral4", **LATENT, **GROUPED, "head_dim": 16, "rope_parameters": SMALL_4},
        vision=SEEING["Mistral3"],
    ),
    "youtu": Tiny("Youtu", LATENT),
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
    "llama 4": Tiny("Llama4", LLAMA4),
    "llama 4 of images": Tiny(
        "Llama4",
        {**LLAMA4, "interleave_moe_layer_step": 1, "use_qk_norm": False, "num_experts_per_tok": 2},
        finish=_as_first_released,
        vision=SEEING["Llama4"],
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
    "gemma2": Tiny(
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "head_dim": 12,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": Tiny("Gemma4", GEMMA4),
    "gemma4 experts": Tiny("Gemma4", GEMMA4_EXPERTS),
    "gemma4 of images": Tiny("Gemma4", {**GEMMA4, "pad_token_id": 0}, vision=SEEING["Gemma4"]),
    "laguna": Tiny("Laguna", LAGUNA),
    "laguna per element": Tiny(
        "Laguna", {**LAGUNA, "gating": "per-element", "rope_parameters": None, "num_attention_heads_per_layer": None}
    ),
    "step": Tiny("Step3p7", STEP, vision=SEEING["Step3p7"]),
    "step 3.5": Tiny("Step3p7", STEP, finish=_as_step_35, vision=SEEING["Step3p7"]),
    "gemma4 unified": Tiny(
        "Gemma4Unified",
        {**GEMMA4_UNIFIED, "pad_token_id": 0},
        vision={
            "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 32},
            "audio_config": None,
            "image_token_id": 99,
        },
    ),
    "mimo v2": Tiny(
        "MiMoV2Flash",
        {
            "v_head_dim": 8,
            "sliding_window": WINDOW,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "ministral3": Tiny("Ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, **GROWING}}),
    "mistral3 of ministral3": Tiny(
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, **GROWING}},
        vision=SEEING["Mistral3"],
    ),
    "ernie moe": Tiny(
        "Ernie4_5_Moe",
        {
            "head_dim": 8,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "moe_layer_interval": 2,
        },
    ),
    "glm4v": Tiny("Glm4v", {"head_dim": 8, "rope_parameters": HALF_MROPE}, vision=SEEING["Glm4v"]),
    "glm4.6v": Tiny(
        "Glm46V", {"model_type": "glm4v_text", "head_dim": 8, "rope_parameters": HALF_MROPE}, vision=SEEING["Glm46V"]
    ),
    "glm ocr": Tiny("GlmOcr", {"rope_parameters": _mrope(2, 2, 2)}, vision=SEEING["GlmOcr"]),
    "glm4v moe": Tiny(
        "Glm4vMoe",
        {
            "head_dim": 8,
            "rope_parameters": HALF_MROPE,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
        },
        vision=SEEING["Glm4vMoe"],
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
    "hyperclova x": Tiny(
        "HyperCLOVAX",
        {
            "head_dim": 8,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "hyperclova x without norms behind": Tiny("HyperCLOVAX", {"use_post_norm": False, "head_dim": None}, slow=True),
    "granite moe": Tiny("GraniteMoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite 4": Tiny("GraniteMoeHybrid", {**GRANITE, **GRANITE_4, "num_local_experts": 0}),
    "granite 4 without rotation": Tiny(
        "GraniteMoeHybrid", {**GRANITE, **GRANITE_4, "num_local_experts": 0, "position_embedding_type": None}
    ),
    "phi3": Tiny("Phi3", {"head_dim": 8, "sliding_window": WINDOW}),
    "phi4 mini": Tiny("Phi3", {"head_dim": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "ernie": Tiny("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "smollm3": Tiny("SmolLM3", {"head_dim": 8, "no_rope_layers": [1, 0, 1, 0]}),
    "smollm3 windows": Tiny(
        "SmolLM3", {"head_dim": 8, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "cwm": Tiny("Cwm", {"sliding_window": WINDOW, "rope_parameters": LLAMA3_ROPE}),
    "dots": Tiny(
        "Dots1", {**DEEPSEEK, "sliding_window": WINDOW, "max_window_layers": 2, "n_group": 2, "topk_group": 1}
    ),
    "exaone 4": Tiny("Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "exaone 4 without windows": Tiny("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone moe": Tiny(
        "ExaoneMoe",
        {
            "sliding_window": WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        },
    ),
    "flex olmo": Tiny("FlexOlmo", {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}),
    "gemma": Tiny("Gemma", {}),
    "glm": Tiny("Glm", {}),
    "helium": Tiny("Helium", {"head_dim": 8}),
    "mellum": Tiny(
        "Mellum",
        {
            "sliding_window": WINDOW,
            "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": SCALED_FULL["sliding_attention"]},
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "ministral": Tiny(
        "Ministral",
        {
            "sliding_window": WINDOW,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
        },
    ),
    "olmoe": Tiny("Olmoe", {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "solar": Tiny("SolarOpen", {key: DEEPSEEK[key] for key in DEEPSEEK if key != "first_k_dense_replace"}),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "apertus": Tiny("Apertus", {"head_dim": 8}),
    "arcee": Tiny("Arcee", {"mlp_bias": True}, slow=True),
    "nemotron": Tiny("Nemotron", {"norm_eps": 1e-4}),
    "starcoder2": Tiny("Starcoder2", {"head_dim": 8, "sliding_window": WINDOW}, slow=True),
    "cohere": Tiny("Cohere", {"head_dim": 8, "logit_scale": 0.4}, slow=True),
    "cohere 2": Tiny("Cohere2", {"head_dim": 8, "logit_scale": 0.4, "sliding_window": WINDOW}),
    "falcon 7b": Tiny("Falcon", without=("head_dim",), slow=True),
    "falcon 40b": Tiny(
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40}, without=("head_dim",)
    ),
    "falcon 11b": Tiny(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
        without=("head_dim",),
        slow=True,
    ),
    "falcon in turn": Tiny("Falcon", {"parallel_attn": False, "multi_query": False}, without=("head_dim",), slow=True),
    "gpt neox": Tiny("GPTNeoX", {"num_key_value_heads": 4}, without=("head_dim",)),
    "gpt neox in turn": Tiny(
        "GPTNeoX",
        slow=True,
        config={
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "use_parallel_residual": False,
            "attention_bias": False,
        },
        without=("head_dim",),
    ),
    "phi": Tiny("Phi", {"head_dim": 8}),
    "qwen2 moe": Tiny(
        "Qwen2Moe",
        {
            **WINDOWED,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "lfm2": Tiny("Lfm2", {**LFM2, "conv_bias": True, "intermediate_size": 60, "block_multiple_of": 8}),
    "lfm2 moe": Tiny(
        "Lfm2Moe",
        {**LFM2, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        slow=True,
    ),
    "nemotron h": Tiny(
        "NemotronH",
        {
            "hybrid_override_pattern": "ME*-ME",
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 10,
            "time_step_min": 1e-12,  # `transformers` clamps steps of a prompt below it, not those of single tokens
            "layer_norm_epsilon": 1e-4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.5,
            "pad_token_id": 0,
        },
    ),
    "kimi linear": Tiny(
        "KimiLinear",
        {
            **{key: value for key, value in LATENT.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "linear_attn_config": {
                "head_dim": 10,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
            },
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "routed_scaling_factor": 1.5,
            "pad_token_id": 0,
        },
        _as_kimi_linear,
        without=("head_dim",),
    ),
    "ling 3": Tiny("BailingHybrid", LING, _as_ling),
    "ling 3 without groups or bounds": Tiny(
        "BailingHybrid",
        {**LING, "q_lora_rank": 24, "kda_safe_gate": False, "layer_group_size": 2, "n_group": 1, "topk_group": 1},
        _as_ling,
        slow=True,
    ),
    "minimax": Tiny(
        "MiniMax",
        {
            "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "block_size": 16,
            "linear_attn_alpha_factor": 1.25,
            "linear_attn_beta_factor": 0.75,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.5,
            "mlp_alpha_factor": 1.75,
            "mlp_beta_factor": 0.875,
        },
    ),
    "olmo hybrid": Tiny(
        "OlmoHybrid",
        {
            **{key: value for key, value in LINEAR.items() if key != "rope_parameters"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": 0,
        },
        _as_olmo_hybrid,
        without=("head_dim",),
    ),
    "olmo hybrid without rotation": Tiny(
        "OlmoHybrid",
        {
            **LINEAR,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            "pad_token_id": 0,
        },
        _as_olmo_hybrid,
        without=("head_dim",),
        slow=True,
    ),
    "muse": Tiny(
        "MuseGlimmer",
        {
            "sliding_window": WINDOW,
            "layer_rope_theta": [1e4, 0, 1e4, 0],
            "post_norm_eps": 0.25,
            "qk_scale_factor": 1.75,
            "output_multiplier": 1.5,
            "final_logit_softcapping": 3.0,
            "pad_token_id": 0,
        },
        vision=SEEING["MuseGlimmer"],
    ),
    "longcat": Tiny(
        "LongcatFlash",
        {
            **LATENT,
            "head_dim": LATENT["qk_rope_head_dim"],
            "num_key_value_heads": 4,
            "num_layers": 2,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 5,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "routed_scaling_factor": 1.5,
        },
        _as_longcat,
        without=("num_hidden_layers", "intermediate_size"),
    ),
    "minicpm 3": Tiny(
        "MiniCPM3",
        {
            **LATENT,
            "head_dim": LATENT["qk_rope_head_dim"],
            "scale_emb": 1.75,
            "scale_depth": 1.5,
            "dim_model_base": 10,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": Tiny("Bamba", {**MIXED, "attn_layer_indices": [2], "mamba_proj_bias": True, "rope_parameters": None}),
    "granite 4 hybrid": Tiny(
        "GraniteMoeHybrid",
        {
            **GRANITE,
            **GRANITE_4,
            **MIXED,
            "embedding_multiplier": 1.75,  # which float32 has, in which such a number is kept
            "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")],
            "position_embedding_type": None,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "falcon h1": Tiny(
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": 48,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "embedding_multiplier": 1.25,
            "lm_head_multiplier": 0.8,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.875, 1.125, 0.75, 1.25, 0.625],
            "mlp_multipliers": [1.3, 0.6],
        },
    ),
    "falcon h1 of norms": Tiny(
        "FalconH1", {**MAMBA, "mamba_d_ssm": 48, "head_dim": 8, "mamba_rms_norm": True}, slow=True
    ),
    "minimax m2": Tiny("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 6}),
    "hunyuan": Tiny("HunYuanDenseV1", {"tie_word_embeddings": True, "rope_parameters": ALPHA, "pad_token_id": 0}),
    "hunyuan moe": Tiny(
        "HunYuanMoEV1",
        {"num_experts": 6, "moe_topk": 3, "intermediate_size": 24, "rope_parameters": ALPHA, "pad_token_id": 0},
    ),
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
