"""GPT-OSS, as llama.cpp has it: gates and ups of all experts of a layer in a tensor each. Needs no PyTorch.

The hub has both in one tensor, in turn, and MXFP4 in two, of codes and of scales.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import MXFP4, Header, TensorInfo
from treetop.checkpoints.gguf.metadata import windows
from treetop.types.errors import CheckpointError

KEYS = {
    "expert_count": ("num_local_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
    "expert_feed_forward_length": ("intermediate_size", int),
}
NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_PERIOD = 2
_JOINED = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_EXPERTS = re.compile(r"blk\.(\d{1,5})\.ffn_(?:gate|up|down)_exps\.(weight|bias)")


@dataclass(frozen=True)
class Stacked:
    """A tensor of the hub, of all experts of a layer.

    name: without what codes and scales add.
    parts: the file's tensors that lie in it, row by row in turn.
    packed: all experts of the layer are in MXFP4, and stay so.
    """

    name: str
    parts: tuple[str, ...]
    packed: bool


def stacked_experts(header: Header, path: Path) -> list[Stacked]:
    """Of all layers, weights and biases. Raises CheckpointError where a part is missing or has another shape."""
    layers: dict[str, list[TensorInfo]] = {}
    for name, stored in header.tensors.items():
        if (match := _EXPERTS.fullmatch(name)) is not None:
            layers.setdefault(match[1], []).extend([stored] if match[2] == "weight" else [])
    made = []
    for layer, weights in layers.items():
        packed = all(each.type == MXFP4 for each in weights)
        for joined, stems in _JOINED.items():
            for end, ours, dimensions in (("weight", "", 3), ("bias", "_bias", 2)):
                parts = tuple(f"blk.{layer}.{stem}.{end}" for stem in stems)
                _check(header, parts, dimensions, path)
                name = f"model.layers.{layer}.mlp.experts.{joined}{ours}"
                made.append(Stacked(name, parts, packed and end == "weight"))
    return made


def _check(header: Header, parts: tuple[str, ...], dimensions: int, path: Path) -> None:
    missing = [part for part in parts if part not in header.tensors]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing")
    shapes = {header.tensors[part].shape for part in parts}
    if len(shapes) > 1 or any(len(shape) != dimensions for shape in shapes):
        found = " and ".join(str(shape) for shape in sorted(shapes))
        raise CheckpointError(f"{path}: tensor {' and '.join(parts)} of experts: shape {found}")


def is_experts(name: str) -> bool:
    """Whether a tensor of the file is all or a part of such a tensor."""
    return _EXPERTS.fullmatch(name) is not None


def more(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The rest of a `gpt_oss` config. Its YaRN does not round the ends of its ramp, which files do not say."""
    rope = config.get("rope_scaling")
    local = f"{prefix}rope.freq_base_swa"
    if header.metadata.get(local, config["rope_theta"]) != config["rope_theta"]:
        raise CheckpointError(f"{path}: {local} other than {prefix}rope.freq_base is not supported")
    weights = [each for each in stacked_experts(header, path) if not each.name.endswith("_bias")]
    plain = sorted({each.name.rpartition(".")[0] for each in weights if not each.packed})
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    return {
        "attention_bias": True,
        **windows(header, prefix, config, path, _PERIOD),
        **({} if rope is None else {"rope_scaling": {**rope, "truncate": False}}),
        **({"quantization_config": quantized} if any(each.packed for each in weights) else {}),
    }
