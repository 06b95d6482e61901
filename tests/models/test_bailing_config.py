"""Configurations of Ling 3.0: as published, as `transformers` saves them, and keys that cannot be honoured."""

from pathlib import Path

import pytest

from treetop.models.families.hybrids import bailing
from treetop.types.errors import CheckpointError

WHERE = Path("config.json")
GIVEN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "head_dim": 16, "layer_group_size": 2, "first_k_dense_replace": 1, "num_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip


def test_a_share_that_turns_is_left_out_wherever_it_is_written():
    """`save_pretrained` moves it among what is of rotation: all of `qk_rope_head_dim` turns, with or without it."""
    whole = bailing.read(GIVEN, WHERE)
    share = {"partial_rotary_factor": 0.5, "rotary_dim": 64}
    assert bailing.read({**GIVEN, **share}, WHERE) == whole
    for key in ("rope_parameters", "rope_scaling"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, **share}
        assert bailing.read({**GIVEN, key: rope}, WHERE) == whole


def test_what_says_the_same_twice_is_read():
    also = {"n_routed_experts": 8, "num_local_experts": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}
    also |= {"use_qk_norm": True, "moe_router_activation_func": "sigmoid", "rope_interleave": True}
    assert bailing.read({**GIVEN, **also}, WHERE) == bailing.read(GIVEN, WHERE)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rope_interleave": False}, "rope_interleave = "),
        ({"use_qk_norm": False}, "use_qk_norm = "),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func = "),
        ({"linear_num_heads": 4}, "linear_num_heads = 4 is not supported, only 2"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3 is not supported, only 4"),
        ({"n_routed_experts": 16}, "n_routed_experts is said in two spellings that differ, 8 and 16"),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused(other, words):
    with pytest.raises(CheckpointError) as caught:
        bailing.read({**GIVEN, **other}, WHERE)
    assert words in str(caught.value)
