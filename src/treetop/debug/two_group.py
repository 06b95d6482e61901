"""A small random checkpoint whose layers alternate between a window and the whole context, and its EAGLE-3 head.

Two KV groups in one target are where window faults live (sgl-24617); no small public model has them.
"""

from pathlib import Path
from typing import Any

import torch

from treetop.debug.random_checkpoint import random_tensors, write_config, write_tensors
from treetop.drafts.registry import drafter_spec
from treetop.models.registry import target_spec

_TARGET: dict[str, Any] = {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
}
_HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 96,
    "draft_vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
}


ZERO_AFTER_ZERO = 67
"""A seed whose target, with a window of 12, chooses token 0 after token 0: what the dummy row is made of."""


def write_two_group_pair(folder: Path, window: int = 12, seed: int = 0) -> tuple[Path, Path]:
    """Write target and head below `folder`; returns their folders. The same arguments give the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    target, head = folder / "two-group", folder / "two-group-eagle3"
    write_config(target, {**_TARGET, "sliding_window": window})
    spec = target_spec(target)
    write_tensors(target, random_tensors(spec.params, generator))
    write_config(head, _HEAD)
    draft = drafter_spec(head, spec.config, dummy=True)  # it has no tensors yet
    tensors = random_tensors(draft.params, generator)
    chosen = torch.randperm(spec.config.vocab_size, generator=generator)[: draft.vocab_size].sort().values
    tensors["d2t"] = chosen - torch.arange(draft.vocab_size)
    write_tensors(head, tensors)
    return target, head
