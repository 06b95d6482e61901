"""Gemma 4 assistants with random weights, and a target for them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.families import GEMMA4, Tiny

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
DIMS = {"sliding_attention": 16, "full_attention": 32}
WIDTH, INNER, HEADS = 24, 40, 4


def save_assisted(folder: Path) -> Path:
    """A Gemma 4 target whose K/V the assistants' heads fit; where it lies."""
    sizes = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "head_dim": 16, "global_head_dim": 32}
    return Tiny("Gemma4", {**GEMMA4, **sizes}).save(folder).pair.target


def save_assistant(folder: Path, target: Path, clusters: int = 0, kept: int = 0) -> Path:
    """For a target's folder, with random weights."""
    theirs = json.loads((target / "config.json").read_text())
    vocab, wide = theirs["vocab_size"], theirs["hidden_size"]
    body = {
        "model_type": "gemma4_text", "vocab_size": vocab, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": len(KINDS), "num_kv_shared_layers": len(KINDS), "layer_types": KINDS,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": DIMS["sliding_attention"],
        "global_head_dim": DIMS["full_attention"], "hidden_size_per_layer_input": 0,
        "sliding_window": GEMMA4["sliding_window"], "rope_parameters": ROPE, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": body,
        "backbone_hidden_size": wide, "use_ordered_embeddings": bool(clusters),
    }  # fmt: skip
    shapes = {
        "pre_projection.weight": (WIDTH, 2 * wide), "post_projection.weight": (wide, WIDTH),
        "model.embed_tokens.weight": (vocab, WIDTH), "model.norm.weight": (WIDTH,),
    }  # fmt: skip
    for i, kind in enumerate(KINDS):
        at, dim = f"model.layers.{i}.", DIMS[kind]
        shapes |= {at + "self_attn.q_proj.weight": (HEADS * dim, WIDTH), at + "self_attn.q_norm.weight": (dim,)}
        shapes |= {at + "self_attn.o_proj.weight": (WIDTH, HEADS * dim), at + "layer_scalar": (1,)}
        shapes |= {at + f"mlp.{half}_proj.weight": (INNER, WIDTH) for half in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (WIDTH, INNER)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[at + norm + "_layernorm.weight"] = (WIDTH,)
    if clusters:
        config |= {"num_centroids": clusters, "centroid_intermediate_top_k": kept}
        shapes["masked_embedding.centroids.weight"] = (clusters, WIDTH)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    if clusters:
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
