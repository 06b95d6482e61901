"""Small pairs for engines whose K/V are in FP8."""

from unittest.mock import patch

import torch
from safetensors.torch import load_file

from support.tiny_models import Pair, copy_folder
from treetop.debug import two_group

OPTIONS = {"kv_cache_dtype": "fp8_e4m3", "page_size": 4, "context_length": 128}
LENGTHS = [3, 30, 17]
LAYERS = 4
A_HEAD = {
    f"model.layers.{i}.self_attn.{plane}_scale": torch.tensor([0.01 * (i + 1), 0.3]).view(-1, 1, 1) * (1 + n)
    for i in range(LAYERS)
    for n, plane in enumerate("kv")
}
"""Scales as `compressed-tensors` has them with the strategy `attn_head`."""


def windows_pair(folder) -> Pair:
    """Layers with and without a window of 9, of two K/V heads, and a head that is often right."""
    small = {"vocab_size": 7}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        return Pair(*two_group.write_two_group_pair(folder, 9))


def with_tensors(pair, folder, more) -> Pair:
    """The pair, whose target's files hold more."""
    tensors = load_file(pair.target / "model.safetensors")
    return Pair(copy_folder(pair.target, folder, tensors={**tensors, **more}), pair.head)
