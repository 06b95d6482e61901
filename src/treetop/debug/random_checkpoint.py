"""Small checkpoints of seeded random weights, made from the parameters that a model declares."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from treetop.checkpoints.params import Param, stored_tensors
from treetop.models.registry import target_spec

_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_expert_target(folder: Path, seed: int = 0) -> Path:
    """Write a target of two layers with four experts each into `folder`. The same seed gives the same bytes."""
    write_config(folder, _EXPERTS)
    write_tensors(folder, random_tensors(target_spec(folder).params, torch.Generator().manual_seed(seed)))
    return folder


def random_tensors(params: Sequence[Param], generator: torch.Generator) -> dict[str, Tensor]:
    """What the parameters are read from, by the names that files use."""
    return {name: _random(stored.shape, generator) for name, stored in stored_tensors(params).items()}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights near one, matrices scaled to keep their input's size."""
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * float(shape[-1] ** -0.5)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """`config.json`, and the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """`model.safetensors`."""
    save_file(tensors, folder / "model.safetensors")
