"""What a caller can get wrong is a typed error of one line that names the culprit, before any work."""

import copy
import math
import os
import pickle
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.engines import build, greedy
from support.refusing import refused
from treetop import LLM, SamplingParams
from treetop.core.wire import AddRequests, decode_to_core, encode
from treetop.distributed.open import info_of
from treetop.text.prompts import PromptReader
from treetop.types import errors
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckpointError, ConfigError, InputError, PromptError, UserError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest

SHAPE = (2, 3, 6)


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
        ({"context_length": 1}, ("--context-length", "between 2")),
        ({"draft": None, "speculative_num_steps": -3}, ("num-steps -3",)),
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


class Unprintable:
    """Its words for itself are many lines, or an error."""

    def __init__(self, error: bool) -> None:
        self._error = error

    def __repr__(self) -> str:
        if self._error:
            raise RuntimeError("no words")
        return "line\n" * 1000


LEGAL = {
    "model": str,
    "draft": str,
    "stop": (str, list),
    "stop_token_ids": list,
    "top_k": int,
    "max_tokens": int,
    "logit_bias": dict,
    "allowed_token_ids": list,
}
"""What may be anything of its kind here; folders and ids are checked by the engine."""
HOSTILE = [10**5000, -(10**5000), "x" * 10**6, ["\n" * 10**5], [10**5000], Unprintable(True), Unprintable(False), {}]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_a_value_of_any_kind_is_refused_in_one_short_line(kind, value):
    """Of every option and parameter; numbers too long to print are told by their size."""
    for each in fields(kind):
        if isinstance(value, LEGAL.get(each.name, ())):
            continue
        message = refused(UserError, lambda name=each.name: kind(**{name: value}))
        assert len(message) < 1000, each.name


def test_an_unknown_option_of_many_lines_is_one_line():
    assert len(refused(ConfigError, lambda: LLM(**{"a\n" * 10**4: 1}), "unknown option a")) < 1000


def test_an_unknown_option_names_those_that_are_near():
    refused(ConfigError, lambda: LLM(max_running_request=1), "near are max_running_requests")


def test_a_folder_without_permission_is_refused_by_option(strong_pair, tmp_path, monkeypatch):
    """Whoever runs this; the system's word is replaced, for some may read everything."""
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    refused(CheckpointError, lambda: LLM(tmp_path), "model", "permission")
    refused(CheckpointError, lambda: LLM(strong_pair.target, tmp_path), "--speculative-draft-model-path", "permission")


# ---------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"seed": -(2**63) - 1}, "seed"),
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


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "max_tokens": np.int32(7), "seed": np.uint8(3)},
        {"stop_token_ids": [np.int64(4)], "allowed_token_ids": [np.int32(5)], "logit_bias": {np.int64(3): Fraction(1)}},
        {"max_tokens": 10**30, "min_tokens": 10**29, "top_k": 2**70, "temperature": 10**25, "logprobs": np.int8(2)},
    ],
)
def test_whatever_parameters_are_legal_reach_an_engine_in_another_process(strong_pair, options):
    reader = PromptReader(info_of(build(strong_pair, SHAPE).engine))
    params = reader.bounded(SamplingParams(**options))
    (received,) = decode_to_core(encode(AddRequests((EngineRequest(RequestId(0), (4,), params, 0),)))).requests
    assert received.params == params


def test_a_fraction_of_numpy_is_an_option_that_reaches_an_engine_in_another_process():
    config = EngineConfig(mem_fraction_static=np.float64(0.5), step_timeout=np.float64(3))
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_a_stop_string_that_no_text_has_is_refused():
    """Half of a surrogate pair, which no message can hold either."""
    refused(InputError, lambda: SamplingParams(stop=["a", "\ud800"]), "stop", "UTF-8")


def test_all_problems_of_sampling_parameters_are_reported_at_once():
    act = lambda: SamplingParams(temperature=-1, top_p=2, max_tokens=0, seed=2**63)  # noqa: E731  # one line, called twice
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
        ([[4, 2.5]], ("prompt 1: ", "must be text or a list of token ids", "2.5")),
        ([[True]], ("prompt 1", "True")),
        ([None], ("prompt 1", "None")),
        ([4], ("prompt 1", "4")),
        ([b"text"], ("prompt 1", "text")),
        ([[4, 12]], ("prompt 1", "12")),
        (["text"], ("tokenizer",)),
        ([[10**5000]], ("an integer of", "vocabulary")),
        ([[4] * 10**7], ("10000000 tokens", "--context-length")),
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


def test_a_stop_token_that_the_vocabulary_lacks_is_refused(strong_pair):
    llm = build(strong_pair, SHAPE)
    refused(InputError, lambda: llm.stream([[4]], SamplingParams(stop_token_ids=[3, 12])), "stop token id 12", "12)")
    assert not llm.scheduler.has_work


@pytest.mark.parametrize("prompts", [None, 5, b"text", bytearray(b"abc"), memoryview(b"abc"), {4: 5}])
def test_what_is_no_prompt_at_all_is_refused(strong_pair, prompts):
    refused(InputError, lambda: build(strong_pair, SHAPE).generate(prompts, greedy(5)), "prompt")


def test_folders_may_be_paths_and_the_word_unset_is_a_folder(strong_pair):
    """No text stands for a draft that was not given."""
    llm = LLM(strong_pair.target, strong_pair.head, dtype="float64", context_length=64)
    assert llm.draft_path == strong_pair.head
    refused(CheckpointError, lambda: LLM(strong_pair.target, "unset"), "unset", "no such folder")
    refused(ConfigError, lambda: LLM(5), "--model", "5")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x" * 100_000, "too long"),
        ("\0", "not a path"),
        ("a\nb\0", "not a path"),
        ("\ud800", "no"),
        ("", "not a folder"),
        ("/dev/null", "not a folder"),
        ("/dev/null/x", "no such folder"),
        ("nowhere\n", "no such folder"),
        ("builtin:", "no such builtin"),
        ("builtin:..", "no such builtin"),
        ("builtin:/etc", "no such builtin"),
        ("builtin:\0", "no such builtin"),
        ("builtin:" + "x" * 100_000, "no such builtin"),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_a_name_that_can_be_no_folder_is_refused_by_option(name, part):
    """In one short line, of the model and of the draft."""
    assert len(refused(CheckpointError, lambda: LLM(name), "model", part)) < 500
    assert len(refused(CheckpointError, lambda: LLM(draft=name), "--speculative-draft-model-path", part)) < 500


def test_every_error_can_be_pickled_and_copied():
    """Processes and threads hand them on: kind, words and fields stay."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 13
    for kind in kinds:
        args = (2, 3, "too long", "a_code") if kind is PromptError else ("too long",)
        error = kind(*args)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(twin), str(twin), vars(twin)) == (kind, str(error), vars(error))


def test_a_stop_string_longer_than_any_text_costs_nothing(weak_pair):
    llm = build(weak_pair, SHAPE)
    plain, stopped = (SamplingParams(max_tokens=20, ignore_eos=True, stop=stop) for stop in ((), "x" * 10**7))
    assert llm.generate("def f", stopped)[0].token_ids == llm.generate("def f", plain)[0].token_ids


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


def test_one_prompt_among_several_is_named_by_its_index(strong_pair):
    """The error says which prompt; alone it needs no number."""
    llm = build(strong_pair, SHAPE)
    refused(PromptError, lambda: llm.generate([[5], [], [6]]), "prompt 1: ", "empty")
    refused(PromptError, lambda: llm.generate([[5], [6], [99]]), "prompt 2: ", "99")
    assert not refused(PromptError, lambda: llm.generate([[]])).startswith("prompt 0")


def test_a_tree_beyond_all_reason_is_refused():
    for options in (
        {"speculative_num_steps": 65},
        {"speculative_eagle_topk": 65},
        {"speculative_num_draft_tokens": 513, "speculative_eagle_topk": 16},
        {"speculative_num_steps": 10**9, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 10**9 + 1},
    ):
        refused(
            ConfigError, lambda options=options: EngineConfig(draft="x", **options), "too large a tree", "64", "512"
        )
