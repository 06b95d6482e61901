"""A draft head that cannot be loaded is refused in one sentence that names the file, key or tensor."""

import math

import pytest
import torch
from safetensors.torch import load_file

from support.engines import build, greedy
from support.refusing import Bomb, load, refused
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop.types.errors import CheckpointError, ConfigError

SHAPE = (2, 3, 6)


def offsets(ids):
    return torch.tensor(ids) - torch.arange(len(ids))


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"d2t": offsets([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12])}, ("d2t", "12", "offsets")),
        ({"d2t": offsets([-1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])}, ("d2t", "-1")),
        ({"d2t": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11])}, ("d2t", "offsets")),
        ({"d2t": offsets([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9])}, ("d2t", "one")),
        ({"d2t": torch.zeros(11)}, ("d2t", "F32", "I64")),
        ({"d2t": torch.zeros(10, dtype=torch.int64)}, ("d2t", "(10,)", "(11,)")),
        ({"d2t": None}, ("missing", "d2t")),
        ({"lm_head.weight": None}, ("missing", "lm_head.weight")),
        ({"fc.weight": torch.zeros(64, 128)}, ("fc.weight", "(64, 128)", "(64, 192)")),
        ({"midlayer.hidden_norm.weight": torch.full((64,), math.nan)}, ("midlayer.hidden_norm.weight", "NaN")),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, ("missing", "midlayer.self_attn.k_norm.weight")),
        ({"midlayer.extra.weight": torch.ones(16)}, ("unexpected", "midlayer.extra.weight")),
        ({"midlayer.hidden_norm.weight": None}, ("missing", "midlayer.hidden_norm.weight")),
        ({"layers.0.hidden_norm.weight": torch.ones(64)}, ("midlayer", "layers.0", "two first layers")),
        ({"layers.2.input_layernorm.weight": torch.ones(64)}, ("missing", "layers.1.self_attn.q_proj.weight")),
        ({"fc_norm.0.weight": torch.ones(64)}, ("missing", "fc_norm.1.weight")),
        ({"input_norm.weight": torch.ones(64)}, ("input_norm.weight", "(64,)", "(192,)")),
        ({"fc.bias": torch.ones(32)}, ("fc.bias", "(32,)", "(64,)")),
        ({"midlayer.input_layernorm.weight": None}, ("missing", "midlayer.input_layernorm.weight")),
    ],
    ids=[
        "d2t-above",
        "d2t-below",
        "d2t-of-ids",
        "d2t-twice",
        "d2t-float",
        "d2t-short",
        "no-d2t",
        "no-lm-head",
        "narrow-fc",
        "nan",
        "half-of-the-head-norms",
        "unexpected",
        "no-hidden-norm",
        "two-first-layers",
        "a-gap-in-the-layers",
        "one-feature-norm",
        "narrow-input-norm",
        "short-bias",
        "no-input-norm",
    ],
)
def test_a_wrong_tensor_of_the_head_is_named(strong_pair, tmp_path, tensors, parts):
    head = copy_folder(strong_pair.head, tmp_path / "h", tensors=tensors)
    refused(CheckpointError, load(strong_pair.target, head), *parts)


def test_a_t2d_that_contradicts_d2t_is_refused(weak_pair, tmp_path):
    """d2t holding ids instead of offsets may stay in range; the mask t2d, where there is one, tells."""
    right = load_file(weak_pair.head / "model.safetensors")["t2d"]
    head = copy_folder(weak_pair.head, tmp_path / "h", tensors={"t2d": right.roll(1)})
    refused(CheckpointError, load(weak_pair.target, head), "t2d")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": 13}, "vocab_size"),
        ({"target_hidden_size": 48}, "target_hidden_size"),
        ({"norm_output": 1}, "norm_output"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"use_aux_norm": True}, "fc_norm.0.weight"),
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"bias": True}, "fc.bias"),
        ({"attention_bias": True}, "midlayer.self_attn.k_proj.bias"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"speculators_model_type": "other"}, "other"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
        ({"eagle_config": {"use_aux_hidden_state": "no"}}, "use_aux_hidden_state"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, "layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}}, "layer"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}, "layer"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "layer"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, "layer"),
        ({"eagle_aux_hidden_state_layer_ids": ["0", 1, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": {"a": 1}}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": [1]}, "eagle_config"),
        ({"draft_vocab_size": "11"}, "draft_vocab_size"),
        ({"target_hidden_size": 0}, "target_hidden_size"),
        ({"norm_before_residual": "yes"}, "norm_before_residual"),
        ({"hidden_size": 32, "head_dim": 8, "target_hidden_size": 64}, "embed_tokens"),
    ],
)
def test_a_head_for_another_target_is_refused(strong_pair, tmp_path, changes, part):
    head = copy_folder(strong_pair.head, tmp_path / "h", **changes)
    refused(CheckpointError, load(strong_pair.target, head), part)


def test_a_head_of_another_vocabulary_is_refused_by_name(strong_pair, weak_pair):
    """The head of one target with another target: both sizes are in the message."""
    refused(CheckpointError, load(strong_pair.target, weak_pair.head), "another target", "211", "12")


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP"])
def test_another_algorithm_than_the_heads_is_a_conflict(strong_pair, algorithm):
    act = lambda: build(strong_pair, SHAPE, speculative_algorithm=algorithm)  # noqa: E731
    refused(ConfigError, act, algorithm, "EAGLE3")
    assert build(strong_pair, SHAPE, speculative_algorithm="EAGLE3").generate([[5]], greedy(1))


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        ({"norm_before_fc": False}, {"input_norm.weight": torch.ones(192)}, ("norm_before_fc", "input_norm.weight")),
        ({"fc_norm": False}, {"fc_norm.0.weight": torch.ones(64)}, ("fc_norm = false", "fc_norm.0.weight")),
        ({"bias": False}, {"fc.bias": torch.ones(64)}, ("bias = false", "fc.bias")),
        ({"draft_vocab_size": None}, {"lm_head.weight": None, "d2t": None, "t2d": None}, ("fits",)),
        ({"target_hidden_size": 64, "hidden_size": 32}, {"embed_tokens.weight": None}, ("embed_tokens.weight",)),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(strong_pair, tmp_path, config, tensors, parts):
    head = copy_folder(strong_pair.head, tmp_path / "h", tensors=tensors, **config)
    if parts == ("fits",):  # it uses the target's matrix: nothing is wrong
        assert load(strong_pair.target, head)()
    else:
        refused(CheckpointError, load(strong_pair.target, head), *parts)


def test_a_pickled_head_is_refused_by_name(strong_pair, tmp_path):
    """More than tensors, other containers, a truncated file, tensors that are missing."""
    head = copy_folder(strong_pair.head, tmp_path / "h")
    (head / "model.safetensors").unlink()
    weights = head / "pytorch_model.bin"
    ran = tmp_path / "ran"
    torch.save({"fc.weight": torch.ones(2, 2), "bomb": Bomb(ran)}, weights)
    refused(CheckpointError, load(strong_pair.target, head), "pytorch_model.bin", "more than tensors")
    assert not ran.exists()
    torch.save([torch.ones(2)], weights)
    refused(CheckpointError, load(strong_pair.target, head), "pytorch_model.bin", "tensors by name")
    torch.save({"fc.weight": torch.ones(200, 200)}, weights)
    weights.write_bytes(weights.read_bytes()[:2000])
    refused(CheckpointError, load(strong_pair.target, head), "pytorch_model.bin", "damaged")
    torch.save({"fc.weight": torch.ones(3, 64), "layers.0.self_attn.q_proj.weight": torch.ones(2)}, weights)
    refused(CheckpointError, load(strong_pair.target, head), "missing", "layers.0.")


def test_a_target_is_no_head(strong_pair, weak_pair):
    """Its own target, another one and the embedded one: each is called what it is, before its sizes are compared."""
    for folder in (strong_pair.target, weak_pair.target, "builtin:nestling"):
        name = str(folder).removeprefix("builtin:")
        words = (name, "a target, not a draft head", "--speculative-draft-model-path")
        refused(CheckpointError, load(strong_pair.target, folder), *words)


def test_topk_beyond_the_draft_vocabulary_is_refused(tmp_path, strong_pair):
    head = save_random_head(tmp_path / "h", strong_pair.target, draft_vocab=3)
    refused(ConfigError, lambda: build(Pair(strong_pair.target, head), (4, 2, 5)), "topk 4", "3")


def test_a_target_too_shallow_for_the_default_layers_is_refused(tmp_path):
    """Two layers have no third from the end: the default feature layers do not exist."""
    target = save_random_llama(tmp_path / "t", num_hidden_layers=2)
    head = save_random_head(tmp_path / "h", target, draft_vocab=50)
    refused(CheckpointError, load(target, head), "layer")
