"""Rotary embeddings: every kind has the frequencies of `transformers`, and every layout of a head is one rotation."""

import pytest
import torch
from transformers import Glm4Config, Glm4MoeConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from treetop.kernels.rope import RopeSpec, head_order, inverse_frequencies, rope_table, rotate_
from treetop.models.layers import reorder_heads
from treetop.models.rope_config import rope_spec
from treetop.types.errors import CheckpointError

THETA = 10000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn, whole dimensions": {**YARN, "truncate": True},
    "yarn of GPT-OSS": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn, other ramp": {**YARN, "beta_fast": 4.0, "beta_slow": 0.25, "truncate": False},
    "yarn without a ramp": {**YARN, "beta_fast": 7.0, "beta_slow": 7.0, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.75},
    "yarn, both mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
}
CPU = torch.device("cpu")


def read(where, head_dim=24, config=None, **options) -> RopeSpec:
    return rope_spec({"max_position_embeddings": 256, **(config or {})}, head_dim, where, **options)


def theirs(parameters, head_dim=24, **config) -> LlamaConfig:
    return LlamaConfig(
        head_dim=head_dim, max_position_embeddings=256, rope_parameters={"rope_theta": THETA, **parameters}, **config
    )


@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_transformers(kind, head_dim, tmp_path):
    """cos and sin of every position, attention factor included, from either spelling."""
    module = LlamaRotaryEmbedding(theirs(KINDS[kind], head_dim))
    cos, sin = module(torch.zeros(1), torch.arange(300)[None])
    older = {"rope_theta": THETA, "rope_scaling": KINDS[kind]}
    for config in ({"rope_parameters": {**KINDS[kind], "rope_theta": THETA}}, older):
        data = rope_table(read(tmp_path, head_dim, config), 300, torch.float32, CPU).data
        torch.testing.assert_close(data[:, 0], cos[0], rtol=0, atol=2e-4)  # float32 angles of 300 turn by 3e-5
        torch.testing.assert_close(data[:, 1].abs(), sin[0].abs(), rtol=0, atol=2e-4)
        assert torch.equal(data[:, 1, : head_dim // 2], -data[:, 1, head_dim // 2 :])


def test_dynamic_gives_each_position_the_frequencies_of_a_text_that_ends_there(tmp_path):
    """Up to `max_position_embeddings` those of no scaling, bit for bit; past it those of `transformers` by length."""
    parameters = {"rope_type": "dynamic", "factor": 2.3}
    spec = read(tmp_path, config={"rope_parameters": {"rope_theta": THETA, **parameters}})
    got = inverse_frequencies(spec, torch.arange(600, dtype=torch.float32))
    plain = inverse_frequencies(RopeSpec(24, THETA), torch.zeros(1))
    assert torch.equal(got[:256], plain.expand(256, -1))
    for position in (256, 300, 599):
        want, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs(parameters), seq_len=position + 1)
        torch.testing.assert_close(got[position], want, rtol=1e-5, atol=0)
    assert not torch.allclose(got[599], got[300], rtol=1e-3)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_in_our_order_turn_as_the_family_turns_them(share, interleaved, tmp_path):
    """GLM's partial rotations: reordered q and k rotate to the reordered rotation, and no dimension is lost."""
    dim, n = 24, 9
    module, of = (modeling_glm4, Glm4Config) if interleaved else (modeling_glm4_moe, Glm4MoeConfig)
    config = of(
        head_dim=dim, rope_parameters={"rope_theta": THETA, "rope_type": "default"}, partial_rotary_factor=share
    )
    if not interleaved:
        config.head_dim = dim
    rotary = (module.Glm4RotaryEmbedding if interleaved else module.Glm4MoeRotaryEmbedding)(config)
    q = torch.randn(1, 3, n, dim)
    want, _ = module.apply_rotary_pos_emb(q, q, *rotary(q, torch.arange(n)[None]))
    spec = read(tmp_path, dim, {"partial_rotary_factor": share}, rotary_factor=0.5, interleaved=interleaved)
    order = head_order(spec) or tuple(range(dim))
    assert sorted(order) == list(range(dim))
    ours = rotate_(
        q[..., list(order)].transpose(1, 2).clone(), rope_table(spec, n, torch.float32, CPU).at(torch.arange(n)[None])
    )
    torch.testing.assert_close(ours.transpose(1, 2), want[..., list(order)])
    assert (head_order(spec) is None) == (share == 1 and not interleaved)


def test_weights_of_whole_heads_are_reordered_together():
    """Rows of each head stay its own."""
    stored = torch.arange(2 * 4 * 3).view(8, 3)
    assert torch.equal(reorder_heads(stored, (0, 2, 1, 3))[:, 0] // 3, torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))
    assert torch.equal(reorder_heads(torch.arange(8), (0, 2, 1, 3)), torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))


BAD = {
    "rope_type": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
    "short_factor": {"rope_scaling": {"type": "yarn", "factor": 2.0, "short_factor": [1.0]}},
    "factor": {"rope_scaling": {"type": "linear"}},
    "low_freq_factor": {"rope_scaling": {"type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}},
    "high_freq_factor": {
        "rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 5.0, "high_freq_factor": 4.0}
    },
    "beta_fast": {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}},
    "truncate": {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}},
    "attention_factor": {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1.0}},
    "mscale": {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "1"}},
    "rope_theta": {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "original_max_position_embeddings": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}
    },
    "rope_parameters and rope_scaling": {
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "rope_parameters": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
}


@pytest.mark.parametrize("key", BAD)
def test_what_is_not_supported_is_refused_by_its_key(key, tmp_path):
    """Nothing of a rotary embedding is guessed or left out."""
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path, config=BAD[key])


def test_a_share_that_turns_an_odd_number_of_dimensions_is_refused(tmp_path):
    for share in (0.3, 0.01):
        with pytest.raises(CheckpointError, match="partial_rotary_factor"):
            read(tmp_path, config={"partial_rotary_factor": share}, rotary_factor=0.5)
