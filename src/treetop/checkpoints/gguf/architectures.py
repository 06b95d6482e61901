"""What GGUF metadata and tensors are called in a folder of the hub. One row an architecture; needs no PyTorch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf import gemma, gpt_oss, llama_like
from treetop.checkpoints.gguf.header import TYPES, Header
from treetop.checkpoints.gguf.metadata import entry
from treetop.checkpoints.gguf.rope_factors import rope_scaling
from treetop.types.errors import CheckpointError, shown

_SILU = {"hidden_act": "silu"}
_EXPERTS = {f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")}
Keys = Mapping[str, tuple[str, type]]
"""A number of the metadata: its key in the config, and its type."""
More = Callable[[Header, str, Mapping[str, Any], Path], dict[str, Any]]
"""The rest of a config, from the header, the prefix of its keys, and the config so far."""


def _nothing(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """name, model_type: of `config.json`.

    interleaved: llama.cpp interleaves the rows of q and k.
    keys, fixed, more: of its config, beyond what all have. yarn: keys of its scaled RoPE, likewise.
    names: of what a layer has, where they are not Llama's; of a tensor with its end, where the hub's has none.
    experts: what the hub calls one of those that lie in one tensor, with a place for its number.
    norm_offset: what is added to its norms in the file.
    stacked: the hub too has all experts of a layer in one tensor, as GPT-OSS does.
    """

    name: str
    model_type: str
    interleaved: bool = False
    keys: Keys = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    more: More = _nothing
    yarn: Keys = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=lambda: _EXPERTS)
    norm_offset: float = 0.0
    stacked: bool = False


_EXPERT_KEYS: Keys = {
    "expert_count": ("num_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
    "expert_feed_forward_length": ("moe_intermediate_size", int),
}
_WITH_EXPERTS = " with experts"
"""Of a file that says how many, where the hub has a class of its own for it."""
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
    f"llama{_WITH_EXPERTS}": Architecture(
        "MixtralForCausalLM",
        "mixtral",
        interleaved=True,
        keys=llama_like.MIXTRAL_KEYS,
        names=llama_like.MIXTRAL_NAMES,
        experts=llama_like.MIXTRAL_EXPERTS,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", "granite", interleaved=True, keys=llama_like.GRANITE_KEYS, more=llama_like.granite
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        interleaved=True,
        more=llama_like.ministral3,
        yarn=llama_like.MINISTRAL3_YARN,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", more=llama_like.phi3, names=llama_like.PHI3_NAMES),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", "smollm3", interleaved=True, fixed={**_SILU, "no_rope_layer_interval": 4}
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", keys=_EXPERT_KEYS, fixed={**_SILU, "norm_topk_prob": True}
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        "gemma",
        fixed=dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        more=gemma.more,
        names=gemma.NAMES,
        norm_offset=1.0,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        keys=gpt_oss.KEYS,
        more=gpt_oss.more,
        names=gpt_oss.NAMES,
        stacked=True,
    ),
}
_KEYS: Keys = {
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "block_count": ("num_hidden_layers", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "context_length": ("max_position_embeddings", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "rope.freq_base": ("rope_theta", float),
}
_DEFAULTS: dict[str, float] = {"rope.freq_base": 10000.0}
_MAX_EXPERTS = 2**12
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNREAD = ("rope_freqs.weight",)
"""Tensors that the config says."""
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


def architecture(header: Header, path: Path) -> Architecture:
    """Raises CheckpointError, which names it, for one that is not read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES or name.endswith(_WITH_EXPERTS):
        known = ", ".join(each for each in ARCHITECTURES if not each.endswith(_WITH_EXPERTS))
        raise CheckpointError(f"{path}: general.architecture {shown(name)} is not supported, only {known}")
    own = f"{name}{_WITH_EXPERTS}" if header.metadata.get(f"{name}.expert_count") else name
    return ARCHITECTURES.get(own, ARCHITECTURES[name])


def names_of(architecture: str) -> tuple[str, ...]:
    """What GGUF files call a class of `config.json`."""
    return tuple(name for name, kind in ARCHITECTURES.items() if kind.name == architecture)


KEEP_CODES = ("Q4_0", "Q4_1")
"""Types whose codes and scales products may take as they are (`weights.ggml`)."""
_ONE_PRODUCT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def config_of(header: Header, path: Path) -> dict[str, Any]:
    """What `config.json` would say. Raises CheckpointError for what is missing, of another type, or not supported."""
    kind, metadata = architecture(header, path), header.metadata
    prefix = metadata["general.architecture"] + "."
    config: dict[str, Any] = {"architectures": [kind.name], "model_type": kind.model_type, **kind.fixed}
    for key, (ours, type_) in (*_KEYS.items(), *kind.keys.items()):
        config[ours] = entry(header, prefix + key, type_, path, _DEFAULTS.get(key))
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config |= _head_dim(metadata, prefix, path)
    config |= rope_scaling(header, prefix, config, path, kind.yarn)
    config |= kind.more(header, prefix, config, path)
    kept = {} if "quantization_config" in config else _keep_codes(header, kind, path)
    return {**config, **({"quantization_config": {"quant_method": "gguf", **kept}} if kept else {})}


def _keep_codes(header: Header, kind: Architecture, path: Path) -> dict[str, list[str]]:
    """Modules of layers by type, of the types that keep their codes; what is one product is of one type."""
    types: dict[str, str] = {}
    for name, stored in header.tensors.items():
        if _LAYER.fullmatch(name) and len(stored.shape) == 2 and name.endswith(".weight") and name not in UNREAD:
            types[hub_name(name, kind, path).removesuffix(".weight")] = TYPES[stored.type][0]
    kept: dict[str, list[str]] = {}
    for module, type_ in types.items():
        parent, _, own = module.rpartition(".")
        beside = next((each for each in _ONE_PRODUCT if own in each), (own,))
        if type_ in KEEP_CODES and all(types.get(f"{parent}.{each}", type_) == type_ for each in beside):
            kept.setdefault(type_, []).append(module)
    return kept


def _head_dim(metadata: Mapping[str, Any], prefix: str, path: Path) -> dict[str, Any]:
    found = {metadata.get(f"{prefix}attention.{key}_length") for key in ("key", "value")} - {None}
    if len(found) > 1 or not all(type(each) is int and 0 < each <= 2**16 for each in found):
        raise CheckpointError(f"{path}: {prefix}attention.key_length and value_length {shown(found)} are not supported")
    return {"head_dim": found.pop()} if found else {}


def hub_name(name: str, kind: Architecture, path: Path) -> str:
    """A tensor's name in a folder of the hub. Raises CheckpointError for one that no architecture here has."""
    stem, _, part = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{part}"
    found, names = _LAYER.fullmatch(name), {**_OF_LAYER, **kind.names}
    if found is not None and (whole := names.get(f"{found[2]}.{found[3]}")) is not None:
        return f"model.layers.{found[1]}.{whole}"
    if found is None or found[2] not in names:
        raise CheckpointError(f"{path}: tensor {shown(name)} is not known")
    return f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"


def expert_names(name: str, shape: tuple[int, ...], kind: Architecture, path: Path) -> list[str]:
    """The hub's names of what a tensor holds, one an expert; [] of a tensor that is no experts'."""
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in kind.experts:
        return []
    if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
        raise CheckpointError(f"{path}: tensor {name} has shape {shape}, not that of at most {_MAX_EXPERTS} experts")
    of_layer = kind.experts[found[2]]
    return [f"model.layers.{found[1]}.{of_layer.format(expert)}.{found[3]}" for expert in range(shape[0])]
