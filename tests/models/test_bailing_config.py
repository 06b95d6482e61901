"""Configurations of Ling 3.0: as published, as `transformers` saves them, and keys that cannot be honoured."""

from pathlib import Path

from treetop.models.families.hybrids import bailing

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
