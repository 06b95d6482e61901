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
from treetop.types.errors import CapacityError, CheckpointError, ConfigError

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
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": 1}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
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


SIZES = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [10**10, 2**70, 10**500, 0, -1, True, 1.5, math.nan, math.inf, "9" * 10**5, [], {}])
def test_an_absurd_size_names_key_and_bound(strong_pair, tmp_path, key, value):
    """Of the target and of the head, before anything is made of that size."""
    least = 2 if key == "head_dim" else 1
    parts = ("config.json", f"{key} must be an integer from {least} to ")
    target = copy_folder(strong_pair.target, tmp_path / "t", **{key: value})
    assert len(refused(CheckpointError, load(target), *parts)) < 400
    if key != "num_hidden_layers":  # a head has one layer, whatever its config says
        head = copy_folder(strong_pair.head, tmp_path / "h", **{key: value})
        refused(CheckpointError, load(strong_pair.target, head), *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_hidden_layers": 10**7}, ("num_hidden_layers", "1024", "10000000")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps", "1.0")),
        ({"rms_norm_eps": 1e308}, ("rms_norm_eps", "1.0")),
        ({"rope_parameters": None, "rope_theta": 10**400}, ("rope_theta",)),
        ({"rope_parameters": {"rope_theta": 5e-324}}, ("rope_theta",)),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 10**400}}, ("factor",)),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 2**70}}, ("original_max",)),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 1}},
            ("high_freq_factor", "greater"),
        ),
        ({"eos_token_id": 2**70}, ("eos_token_id", "16777216")),
    ],
)
def test_an_absurd_number_names_key_and_bound(strong_pair, tmp_path, changes, parts):
    refused(CheckpointError, load(copy_folder(strong_pair.target, tmp_path / "t", **changes)), "config.json", *parts)


def test_the_largest_sizes_are_a_matter_of_memory(strong_pair, tmp_path):
    """Within the bounds nothing overflows: what does not fit is a CapacityError."""
    most = {"num_hidden_layers": 2**10, "num_attention_heads": 2**10, "num_key_value_heads": 2**10, "head_dim": 2**12}
    wide = {"hidden_size": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24, "max_position_embeddings": 2**31}
    target = copy_folder(strong_pair.target, tmp_path / "t", **most, **wide)
    huge = {"max_running_requests": 65536, "chunked_prefill_size": 2**40}
    for options in ({}, huge):
        options |= {"disable_logits_processors": True}
        refused(CapacityError, lambda options=options: LLM(target, **options), "need", "have")


DEEP = "[" * 100_000 + "]" * 100_000
LLAMA = '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": '


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("config.json", DEEP, ("nested too deeply",)),
        ("config.json", LLAMA + "9" * 100_000 + "}", ("num_attention_heads", "1024")),
        ("generation_config.json", DEEP, ("nested too deeply",)),
        ("generation_config.json", '{"eos_token_id": ' + "9" * 100_000 + "}", ("eos_token_id",)),
        ("generation_config.json", '{"eos_token_id": -2}', ("eos_token_id",)),
        ("tokenizer.json", DEEP, ("not a tokenizer",)),
        ("tokenizer.json", "9" * 100_000, ("not a tokenizer",)),
        ("model.safetensors.index.json", DEEP, ("nested too deeply",)),
        ("model.safetensors.index.json", "9" * 100_000, ("JSON object",)),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', ("weight_map", "file names")),
        ("model.safetensors.index.json", '{"weight_map": {"a": [1]}}', ("weight_map", "file names")),
        ("model.safetensors.index.json", '{"weight_map": {"a": "\\ud800"}}', ("weight_map", "file names")),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x\\u0000"}}', ("weight_map", "file names")),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_a_hostile_json_file_is_named(strong_pair, tmp_path, name, text, parts):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    if "index" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(text)
    refused(CheckpointError, load(folder), name, *parts)


def test_a_json_file_beyond_all_reason_is_not_read(strong_pair, tmp_path):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2**40)  # no block of which is written
    refused(CheckpointError, load(folder), "config.json", str(2**40), "bytes")


NAMES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", [*NAMES, "weights.safetensors"])
def test_a_link_to_nowhere_is_called_one(strong_pair, tmp_path, name):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    if "safetensors" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "gone")
    refused(CheckpointError, load(folder), str(folder / name), "a link to", "gone", "which is not there")


@pytest.mark.parametrize("name", [*NAMES, "weights.safetensors"])
def test_a_folder_where_a_file_should_be_is_called_none(strong_pair, tmp_path, name):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    if "safetensors" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    refused(CheckpointError, load(folder), str(folder / name), "not a file")


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


class Bomb:
    """Opens a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_runs_nothing(strong_pair, tmp_path):
    """`weights_only` alone: what holds more than tensors is refused by name, whatever it would have done."""
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "it ran")))
    refused(CheckpointError, load(folder), "pytorch_model.bin", "more than tensors")
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
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"speculators_model_type": "peagle"}, "peagle"),
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


@pytest.mark.parametrize("text", ['["a"]', '{"eos_token_id": "end"}', "{"])
def test_a_wrong_generation_config_is_named(strong_pair, tmp_path, text):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "generation_config.json").write_text(text)
    refused(CheckpointError, load(folder), "generation_config.json")
