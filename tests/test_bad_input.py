"""What a caller can get wrong is a typed error of one line that names the culprit, before any work."""

import json
import math
import pickle

import numpy as np
import pytest
import torch

from engines import build, greedy, tokens
from tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop import LLM, SamplingParams
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckpointError, ConfigError, InputError, UserError

SHAPE = (2, 3, 6)


def refused(kind, act, *parts) -> str:
    """The message of the UserError that `act` raises: one line that holds all `parts`."""
    with pytest.raises(kind) as error:
        act()
    assert isinstance(error.value, UserError)
    message = str(error.value)
    assert message
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


# ---------------------------------------------------------------------------------------------- target folders


def load(folder, head=None):
    return lambda: LLM(model=str(folder), draft=None if head is None else str(head))


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
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
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
    (folder / "model.safetensors.index.json").write_text(index)
    refused(CheckpointError, load(folder), "safetensors")


def test_weights_in_several_files_are_the_same_model(strong_pair, tmp_path):
    """A weight index over two files loads what one file holds."""
    from safetensors.torch import load_file, save_file

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
        ({"d2t": torch.zeros(11)}, ("d2t", "float32")),
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
    from safetensors.torch import load_file

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


def test_a_target_is_no_head(strong_pair):
    refused(UserError, load(strong_pair.target, strong_pair.target), str(strong_pair.target))


def test_topk_beyond_the_draft_vocabulary_is_refused(tmp_path, strong_pair):
    head = save_random_head(tmp_path / "h", strong_pair.target, draft_vocab=3)
    refused(ConfigError, lambda: build(Pair(strong_pair.target, head), (4, 2, 5)), "topk 4", "3")


def test_a_target_too_shallow_for_the_default_layers_is_refused(tmp_path):
    """Two layers have no third from the end: the default feature layers do not exist."""
    target = save_random_llama(tmp_path / "t", num_hidden_layers=2)
    head = save_random_head(tmp_path / "h", target, draft_vocab=50)
    refused(CheckpointError, load(target, head), "layer")


# ---------------------------------------------------------------------------------------------- options


def test_all_problems_of_a_configuration_are_reported_at_once():
    message = refused(
        ConfigError,
        lambda: EngineConfig(
            page_size=3,
            check_level=7,
            max_running_requests=0,
            dtype="int8",
            seed=-1,
            draft="x",
            speculative_num_steps=0,
        ),
        "--page-size",
        "--check-level",
        "--max-running-requests",
        "--dtype",
        "--seed",
        "num-steps",
    )
    assert "int8" in message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"page_size": 0}, ("--page-size", "0")),
        ({"page_size": 24}, ("--page-size", "24")),
        ({"chunked_prefill_size": 0}, ("--chunked-prefill-size",)),
        ({"context_length": 0}, ("--context-length",)),
        ({"max_total_tokens": -5}, ("--max-total-tokens", "-5")),
        ({"graphs": "maybe"}, ("--graphs", "maybe")),
        ({"attention_backend": "abacus"}, ("--attention-backend", "abacus")),
        ({"speculative_algorithm": "NONE", "draft": "x"}, ("NONE", "--speculative-draft-model-path")),
        ({"speculative_algorithm": "EAGLE3"}, ("EAGLE3", "--speculative-draft-model-path")),
        ({"speculative_algorithm": "HYDRA", "draft": "x"}, ("--speculative-algorithm", "HYDRA")),
        ({"draft": "x", "speculative_num_draft_tokens": 500}, ("num-draft-tokens", "69")),
        ({"seed": 2**63}, ("--seed",)),
    ],
)
def test_an_option_that_cannot_work_is_named(options, parts):
    refused(ConfigError, lambda: EngineConfig(**options), *parts)


def test_an_unknown_option_lists_the_known(strong_pair):
    refused(ConfigError, lambda: build(strong_pair, None, page_sise=16), "page_sise", "page_size")


def test_a_context_beyond_the_model_is_refused(strong_pair):
    refused(ConfigError, lambda: build(strong_pair, None, context_length=513), "--context-length", "513", "512")


def test_a_pool_below_one_request_is_a_capacity_error(strong_pair):
    refused(CapacityError, lambda: build(strong_pair, SHAPE, max_total_tokens=1), "--max-total-tokens", "need", "have")


# ---------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(options, part):
    refused(InputError, lambda: SamplingParams(**options), part)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"temperature": "0"}, ("temperature must be a number", "'0'")),
        ({"temperature": None}, ("temperature", "None")),
        ({"temperature": True}, ("temperature", "True")),
        ({"top_p": [0.9]}, ("top_p must be a number",)),
        ({"min_p": "x"}, ("min_p",)),
        ({"top_k": 4.0}, ("top_k must be an integer", "4.0")),
        ({"max_tokens": "8"}, ("max_tokens must be an integer",)),
        ({"max_tokens": 8.5}, ("max_tokens", "8.5")),
        ({"stop": 5}, ("stop must be text",)),
        ({"stop": ["a", 5]}, ("stop must be text",)),
        ({"stop": {"a"}}, ("stop must be text",)),
        ({"stop_token_ids": 5}, ("stop_token_ids must be a list",)),
        ({"stop_token_ids": ["a"]}, ("stop_token_ids",)),
        ({"ignore_eos": 1}, ("ignore_eos must be True or False",)),
        ({"seed": 1.0}, ("seed must be an integer or None",)),
        ({"seed": "1", "top_k": "2"}, ("seed", "top_k")),
    ],
)
def test_a_sampling_parameter_of_another_kind_is_named(options, parts):
    refused(InputError, lambda: SamplingParams(**options), *parts)


def test_numbers_of_numpy_and_lists_are_sampling_parameters():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop=["a"], stop_token_ids=[np.int32(4)])
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("a",), (4,))


def test_all_problems_of_sampling_parameters_are_reported_at_once():
    act = lambda: SamplingParams(temperature=-1, top_p=2, max_tokens=0, seed=-5)  # noqa: E731
    refused(InputError, act, "temperature", "top_p", "max_tokens", "seed")


def test_extreme_but_legal_parameters_are_served(strong_pair):
    """Huge and tiny legal numbers neither crash nor leave the vocabulary; top_k beyond it is off."""
    prompt = strong_pair.prompts([5])[0]
    base = {"temperature": 1.0, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    llm = build(strong_pair, SHAPE)
    (plain,) = llm.generate([prompt], SamplingParams(**base))
    for extreme in ({"top_k": 10**6}, {"top_k": 2**70}, {"top_k": -1}, {"min_p": 1e-300}, {"top_p": 1 - 1e-16}):
        (output,) = llm.generate([prompt], SamplingParams(**{**base, **extreme}))
        assert output.token_ids == plain.token_ids, extreme
    for extreme in ({"temperature": 1e300}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"seed": 2**63 - 1}):
        (output,) = llm.generate([prompt], SamplingParams(**{**base, **extreme}))
        assert len(output.token_ids) == 5, extreme


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([[]], ("empty",)),
        ([[4] * 256], ("256", "--context-length")),
        ([[4] * 1000], ("1000", "256")),
        ([[4, 12]], ("12", "vocabulary")),
        ([[-1]], ("-1", "vocabulary")),
        ([[4, 2.5]], ("prompt 1 must be text or a list of token ids", "2.5")),
        ([[True]], ("prompt 1", "True")),
        ([None], ("prompt 1", "None")),
        ([4], ("prompt 1", "4")),
        ([b"text"], ("prompt 1", "text")),
        ([[4, 12]], ("prompt 1", "12")),
        (["text"], ("tokenizer",)),
        ([""], ("tokenizer",)),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_any_work(strong_pair, prompt, parts):
    """It takes no good prompt beside it down with it: nothing is queued, and the engine serves on."""
    llm = build(strong_pair, SHAPE)
    refused(InputError, lambda: llm.stream([[4, 5], *prompt], greedy(5)), *parts)
    refused(InputError, lambda: llm.generate([[4, 5], *prompt], greedy(5)), *parts)
    assert not llm.scheduler.has_work
    assert len(llm.generate([[4, 5]], greedy(5))[0].token_ids) == 5


@pytest.mark.parametrize("prompts", [None, 5, b"text", {4: 5}])
def test_what_is_no_prompt_at_all_is_refused(strong_pair, prompts):
    refused(InputError, lambda: build(strong_pair, SHAPE).generate(prompts, greedy(5)), "prompt")


def test_folders_may_be_paths_and_the_word_unset_is_a_folder(strong_pair):
    """No text stands for a draft that was not given."""
    llm = LLM(strong_pair.target, strong_pair.head, dtype="float64", context_length=64)
    assert llm.draft_path == strong_pair.head
    refused(CheckpointError, lambda: LLM(strong_pair.target, "unset"), "unset", "no such folder")
    refused(ConfigError, lambda: LLM(5), "--model", "5")


def test_an_empty_text_is_an_empty_prompt(weak_pair):
    refused(InputError, lambda: build(weak_pair, SHAPE).generate(["def", ""], greedy(5)), "empty")


def test_a_prompt_that_leaves_room_for_one_token_gets_one(strong_pair):
    (output,) = build(strong_pair, SHAPE).generate([[4] * 255], greedy(5))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_a_list_of_ids_and_a_str_are_one_prompt_each(weak_pair):
    llm = build(weak_pair, SHAPE)
    assert len(llm.generate("def f", greedy(2))) == 1
    assert len(llm.generate([5, 6, 7], greedy(2))) == 1
    assert len(llm.generate(["a", [5, 6]], greedy(2))) == 2
    assert llm.generate([], greedy(2)) == []


def test_parameters_that_do_not_pair_with_the_prompts_are_refused(strong_pair):
    llm = build(strong_pair, SHAPE)
    refused(InputError, lambda: llm.generate([[4], [5], [6]], [greedy(1), greedy(1)]), "2", "3")
    assert not llm.scheduler.has_work


def test_stop_strings_without_a_tokenizer_are_refused_before_any_work(strong_pair):
    """The good prompt before the bad one is not left behind in the queue."""
    llm = build(strong_pair, SHAPE)
    refused(InputError, lambda: llm.stream([[4], [5]], [greedy(3), SamplingParams(stop="x")]), "tokenizer")
    refused(InputError, lambda: llm.generate([[4], [5]], [greedy(3), SamplingParams(stop="x")]), "tokenizer")
    assert not llm.scheduler.has_work
