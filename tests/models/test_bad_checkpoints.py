"""A folder that cannot be loaded is refused in one sentence that names the file, key or tensor."""

import json
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, tokens
from support.refusing import Bomb, load, refused
from support.tiny_models import Pair, copy_folder
from treetop import LLM
from treetop.models.registry import target_spec
from treetop.types.errors import CapacityError, CheckpointError

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
        ({"quantization_config": {"quant_method": "bnb"}}, "quantization_config"),
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
    minimum = 2 if key == "head_dim" else 1
    parts = ("config.json", f"{key} must be an integer from {minimum} to ")
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
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 2, "high_freq_factor": 1}},
            ("high_freq_factor", "no less"),
        ),
        ({"eos_token_id": 2**70}, ("eos_token_id", "16777216")),
    ],
)
def test_an_absurd_number_names_key_and_bound(strong_pair, tmp_path, changes, parts):
    refused(CheckpointError, load(copy_folder(strong_pair.target, tmp_path / "t", **changes)), "config.json", *parts)


@pytest.mark.slow
def test_the_largest_sizes_are_a_matter_of_memory(strong_pair, tmp_path):
    """Within the bounds nothing overflows: what does not fit is a CapacityError."""
    maximum = {
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**10,
        "num_key_value_heads": 2**10,
        "head_dim": 2**12,
    }
    wide = {"hidden_size": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24, "max_position_embeddings": 2**31}
    target = copy_folder(strong_pair.target, tmp_path / "t", **maximum, **wide)
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


@pytest.mark.parametrize("text", ['["a"]', '{"eos_token_id": "end"}', "{"])
def test_a_wrong_generation_config_is_named(strong_pair, tmp_path, text):
    folder = copy_folder(strong_pair.target, tmp_path / "t")
    (folder / "generation_config.json").write_text(text)
    refused(CheckpointError, load(folder), "generation_config.json")
