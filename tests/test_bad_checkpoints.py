"""A folder that cannot be loaded is refused in one sentence that names the file, key or tensor."""

import json
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import build, greedy, tokens
from refusing import load, refused
from tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop import LLM
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError

SHAPE = (2, 3, 6)


# ---------------------------------------------------------------------------------------------- target folders


def test_a_folder_that_is_not_there_is_named(tmp_path):
    refused(CheckpointError, load(tmp_path / "nowhere"), "nowhere", "no such folder")


def test_a_folder_without_a_config_is_named(tmp_path):
    refused(CheckpointError, load(tmp_path), "config.json")


def test_an_unknown_builtin_model_lists_the_known():
    refused(CheckpointError, lambda: LLM(model="builtin:cuckoo", draft=None), "builtin:cuckoo", "builtin:nestling")


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\xff", ""])
def test_a_config_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    refused(CheckpointError, load(tmp_path), "config.json")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [1]}, "architectures"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rope_parameters": [1e4]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 1.5}},
            "original_max_position",
        ),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_config_that_is_not_supported_names_the_key_or_value(strong_pair, tmp_path, changes, part):
    refused(CheckpointError, load(copy_folder(strong_pair.target, tmp_path / "t", **changes)), part, "config.json")


Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({Q_PROJ: None}, ("missing", Q_PROJ)),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}, ("unexpected", "model.layers.9.mlp.up_proj.weight")),
        ({Q_PROJ: torch.zeros(64, 63)}, (Q_PROJ, "(64, 63)", "(64, 64)")),
        ({"model.norm.weight": torch.full((64,), math.nan)}, ("model.norm.weight", "NaN")),
        ({"lm_head.weight": torch.full((12, 64), math.inf)}, ("lm_head.weight", "infinite")),
        ({"lm_head.weight": None}, ("missing", "lm_head.weight")),
    ],
    ids=["missing", "unexpected", "misshapen", "nan", "infinite", "no-lm-head"],
)
def test_a_wrong_tensor_of_the_target_is_named(strong_pair, tmp_path, tensors, parts):
    refused(CheckpointError, load(copy_folder(strong_pair.target, tmp_path / "t", tensors=tensors)), *parts)


def test_a_qwen3_target_without_its_norms_is_refused(strong_pair, tmp_path):
    folder = copy_folder(strong_pair.target, tmp_path / "copy", architectures=["Qwen3ForCausalLM"])
    refused(CheckpointError, load(folder), "missing", "self_attn.k_norm.weight")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_weight_file_is_named(strong_pair, tmp_path, keep):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(CheckpointError, load(folder), "model.safetensors")


def test_pickled_weights_are_never_loaded(strong_pair, tmp_path):
    """A folder with only a pickle says so, and nothing in it runs."""

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "it ran"), "w"))

    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(CheckpointError, load(folder), "safetensors", "pickled")
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"a": "missing.safetensors"}}', "{"])
def test_a_wrong_weight_index_is_named(strong_pair, tmp_path, index):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(CheckpointError, load(folder), "safetensors")


def test_a_single_file_comes_before_an_index(strong_pair, tmp_path):
    """As in transformers: shards that a newer `model.safetensors` replaced are not read."""
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "old.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "old.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    prompts = strong_pair.prompts([5])
    both = build(Pair(folder, strong_pair.head), None).generate(prompts, greedy(5))
    assert tokens(both) == tokens(build(strong_pair, None).generate(prompts, greedy(5)))


def test_a_tensor_in_two_files_is_refused(strong_pair, tmp_path):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weights = load_file(folder / "a.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "b.safetensors")
    refused(CheckpointError, load(folder), "b.safetensors", "model.norm.weight", "a.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_are_refused(strong_pair, tmp_path, dtype):
    """Quantised numbers would need their scales; by doctor too, which reads only headers."""
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(strong_pair.target / "model.safetensors")[name]
    folder = copy_folder(strong_pair.target, tmp_path / "t", tensors={name: weight.to(dtype)})
    refused(CheckpointError, load(folder), name, "stored as", "BF16")
    refused(CheckpointError, target_spec(folder).check, name, "stored as")


def test_stored_frequencies_of_the_rotation_are_left_alone(strong_pair, tmp_path):
    """Llama 2's files hold them."""
    stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    folder = copy_folder(strong_pair.target, tmp_path / "t", tensors=stored)
    assert build(Pair(folder, strong_pair.head), None).generate([[5]], greedy(1))


def test_weights_in_several_files_are_the_same_model(strong_pair, tmp_path):
    """A weight index over two files loads what one file holds."""
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    prompts = strong_pair.prompts([5])
    split = build(Pair(folder, strong_pair.head), None).generate(prompts, greedy(10))
    assert tokens(split) == tokens(build(strong_pair, None).generate(prompts, greedy(10)))


# ---------------------------------------------------------------------------------------------- heads


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
        ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, ("unexpected", "q_norm")),
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
        "unexpected",
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
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, "layer"),
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


def test_an_eagle_1_head_is_refused_as_what_it_is(strong_pair, tmp_path):
    """Without the norm of an EAGLE-3 head it is an EAGLE head, which is not supported."""
    weights = {"d2t": None, "midlayer.hidden_norm.weight": None}
    head = copy_folder(strong_pair.head, tmp_path / "h", tensors=weights)
    refused(CheckpointError, load(strong_pair.target, head), "EAGLE")


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


@pytest.mark.parametrize("text", ['["a"]', '{"eos_token_id": "end"}', "{"])
def test_a_wrong_generation_config_is_named(strong_pair, tmp_path, text):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "generation_config.json").write_text(text)
    refused(CheckpointError, load(folder), "generation_config.json")
