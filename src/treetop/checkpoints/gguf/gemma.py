"""Gemma 3, as llama.cpp has it: norms with 1 added, windows in five layers of six, two thetas. Needs no PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import Header
from treetop.checkpoints.gguf.metadata import entry, windows

NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PERIOD = 6
_LOCAL_THETA = 10000.0
_LAYERS_OF_27B = 62
"""The one whose scores are scaled by the hidden size: no file says so, llama.cpp tells it by its layers."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def more(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The rest of a `gemma3_text` config. Caps are handed on, and refused where the config is read."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim", hidden // heads)
    of_27b = config["num_hidden_layers"] == _LAYERS_OF_27B
    caps = {key: entry(header, prefix + key, float, path) for key in _CAPS if prefix + key in header.metadata}
    return {
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if of_27b else head_dim,
        "rope_local_base_freq": entry(header, f"{prefix}rope.freq_base_swa", float, path, _LOCAL_THETA),
        **windows(header, prefix, config, path, _PERIOD, needed=False),
        **caps,
    }
