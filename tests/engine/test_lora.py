"""Adapters beside a target's products: each request's tokens are those of the model with its adapter merged."""

import json
import random
from collections import Counter
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.command_line import run
from support.engines import build, greedy, pump, sampled, submit, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.loras import EVERY, merged, save_lora
from support.refusing import refused
from support.serving import serving
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop import LLM
from treetop.checkpoints.folder import resolve_folder
from treetop.types.errors import CheckpointError, ConfigError, InputError
from treetop.types.messages import MixedPlan, PrefillPlan, prefill_of
from treetop.types.sampling import SamplingParams
from treetop_debug.adapter_faults import ADAPTER_FAULTS

SHAPE = (3, 4, 12)
KNOWN = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    target = save_random_llama(folder / "target", seed=3)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=None))


@pytest.fixture(scope="module")
def adapters(pair, tmp_path_factory):
    """Eight of several ranks and modules: (name, folder, the model that it makes)."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for i in range(8):
        kinds = EVERY if i % 3 == 0 else ("q_proj", "v_proj") if i % 3 == 1 else ("gate_proj", "down_proj", "o_proj")
        rank, alpha = (1, 4, 8, 16)[i % 4], 2.0 * (i + 1)
        config = {"use_rslora": True} if i % 2 else {}
        lora = save_lora(folder / f"a{i}", pair.target, rank, alpha, i, kinds, **config)
        scale = alpha / (rank**0.5 if i % 2 else rank)
        made.append((f"a{i}", lora, merged(folder / f"m{i}", pair.target, lora, scale)))
    return made


def modules(adapters) -> dict:
    return {name: str(folder) for name, folder, _ in adapters}


def wanted(pair, adapters, prompts, params):
    """Of each of the models alone, plainly: the base, then each with its adapter."""
    return [
        tokens(build(Pair(target, None), None).generate(prompts, params))
        for target in (pair.target, *(whole for _, _, whole in adapters))
    ]


@pytest.mark.parametrize("shape", few_of([None, SHAPE], 1))
def test_each_request_has_the_model_with_its_adapter(pair, adapters, shape):
    prompts, params = pair.prompts([9, 30, 5]), [greedy(20), sampled(3, 20), greedy(12)]
    want = wanted(pair, adapters[:3], prompts, params)
    assert len({str(each) for each in want}) == len(want)  # they do differ
    llm = build(pair, shape, lora_modules=modules(adapters[:3]), page_size=4, chunked_prefill_size=7)
    for _ in range(2):  # the second finds its own prefixes, and nobody else's
        got = [tokens(llm.generate(prompts, params, lora=name)) for name in (None, "a0", "a1", "a2")]
        assert got == want
    assert llm.generate(prompts[1], greedy(2), lora="a1")[0].metrics.num_cached_tokens > 0
    assert build(pair, shape).generate(prompts, params)[0].token_ids == want[0][0]


@pytest.mark.slow
def test_eight_adapters_and_none_in_one_batch(pair, adapters):
    """Whoever runs beside it, and whatever was put back; rows are given again to others."""
    prompts, params = (
        pair.prompts([9, 20, 5]),
        [greedy(16, whole=True), sampled(3, 16, whole=True), greedy(9, whole=True)],
    )
    names = [None, *modules(adapters)]
    want = wanted(pair, adapters, prompts, params)
    options = {"max_total_tokens": 160, "context_length": 64, "page_size": 4, "check_level": 3}
    llm = build(pair, SHAPE, lora_modules=modules(adapters), graphs="sim", max_running_requests=6, **options)
    asked = [(name, i) for name in names for i in range(len(prompts))]
    random.Random(1).shuffle(asked)
    requests = [each for name, i in asked for each in llm._asked([prompts[i]], [params[i]], None, name)]
    got = {asked[delta.index]: delta.output for delta in llm._run(requests) if delta.output is not None}
    assert {key: output.token_ids for key, output in got.items()} == {
        (name, i): want[n][i] for n, name in enumerate(names) for i in range(len(prompts))
    }
    assert llm.scheduler.num_retractions > 0
    llm.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("shape", "graphs", "apart"),
    few_of([(SHAPE, "sim", False), (None, "off", False), (SHAPE, "sim", True), (SHAPE, "off", False)], 0, 1, 2),
)
def test_packed_prompts_have_their_own_adapters(pair, adapters, shape, graphs, apart, monkeypatch):
    """In one forward of nodes and chunks, or of blocks alone, each token with its row's; more adapters than slots, one
    came later.
    """
    monkeypatch.setattr("treetop.scheduler.mixed._STEPS", 1)  # all sizes come up
    names, prompts = ["", *modules(adapters[:3])] * 2, pair.prompts([9, 60, 5, 70, 17, 33, 61, 22])
    params = [greedy(16) if i % 2 else sampled(i, 20 - i) for i in range(len(names))]
    want = dict.fromkeys(range(len(names)))
    for at, target in enumerate((pair.target, *(whole for _, _, whole in adapters[:3]))):
        own = range(at, len(names), 4)
        alone = build(Pair(target, None), None).generate([prompts[i] for i in own], [params[i] for i in own])
        want |= zip(own, tokens(alone), strict=True)
    options = {"max_running_requests": 4, "chunked_prefill_size": 32, "page_size": 4, "check_level": 3}
    options |= {"prefill_graph_max_tokens": 32} if apart else {"mixed_chunk": "on"}
    options |= {"graphs": graphs, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
    llm = build(pair, shape, lora_modules=modules(adapters[:2]), **options)
    llm.load_lora("a2", adapters[2][1])
    requests = submit(llm, prompts, params, loras=names)
    kind = PrefillPlan if apart else MixedPlan
    packed = Counter(prefill_of(plan).packed > 0 for plan, _ in pump(llm) if isinstance(plan, kind))
    assert {i: tuple(request.output_ids) for i, request in enumerate(requests)} == want
    assert packed[graphs == "sim"] > 2


@pytest.mark.slow
def test_ranks_have_their_share_of_each_adapter(pair, adapters):
    prompts, params = pair.prompts([9, 20, 5]), [greedy(16), sampled(3, 16), greedy(9)]
    want = wanted(pair, adapters[:2], prompts, params)
    llm = build(pair, SHAPE, lora_modules=modules(adapters[:2]), tp_size=2, device="cpu")
    assert [tokens(llm.generate(prompts, params, lora=name)) for name in (None, "a0", "a1")] == want


@pytest.mark.parametrize("family", ["phi3", "qwen3", pytest.param("gemma3", marks=pytest.mark.slow), "gemma4"])
def test_families_that_store_their_weights_otherwise(tmp_path, family):
    """Norms of heads, sandwich norms, q, k and v or gate and up in one tensor."""
    pair = FAMILIES[family].save(tmp_path).pair
    kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else EVERY
    lora = save_lora(tmp_path / "lora", pair.target, 4, 8.0, 1, kinds)
    whole = merged(tmp_path / "whole", pair.target, lora, 2.0)
    prompts = pair.prompts([9, 20])
    llm = build(pair, SHAPE, lora_modules={"it": str(lora)})
    for target, name in ((pair.target, None), (whole, "it")):
        want = build(Pair(target, None), None).generate(prompts, KNOWN)
        got = llm.generate(prompts, KNOWN, lora=name)
        assert tokens(got) == tokens(want)
        for ours, theirs in zip(got, want, strict=True):
            for mine, its in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert dict(mine.top) == pytest.approx(dict(its.top), abs=1e-9)


def test_alpha_by_module(pair, tmp_path):
    alphas = {"q_proj": 12.0, "layers.1.self_attn.v_proj": 2.0}
    lora = save_lora(tmp_path / "lora", pair.target, 4, 8.0, 1, ("q_proj", "v_proj"), alpha_pattern=alphas)
    factors = load_file(lora / "adapter_model.safetensors")
    for name in factors:
        by = 12 / 8 if "q_proj" in name else 2 / 8 if "layers.1." in name else 1.0
        if name.endswith("lora_B.weight"):
            factors[name] = factors[name] * by
    other = copy_folder(lora, tmp_path / "other")
    save_file(factors, other / "adapter_model.safetensors")
    whole, prompts = merged(tmp_path / "whole", pair.target, other, 2.0), pair.prompts([9])
    llm = build(pair, SHAPE, lora_modules={"it": str(lora)})
    assert tokens(llm.generate(prompts, greedy(16), lora="it")) == tokens(
        build(Pair(whole, None), None).generate(prompts, greedy(16))
    )


def changed(folder, tmp_path, tensors=None, **config):
    other = copy_folder(folder, tmp_path / "other")
    said = json.loads((folder / "adapter_config.json").read_text()) | config
    (other / "adapter_config.json").write_text(json.dumps(said))
    if tensors is not None:
        save_file(tensors, other / "adapter_model.safetensors")
    return other


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"peft_type": "IA3"}, ("peft_type", "IA3")),
        ({"use_dora": True}, ("use_dora",)),
        ({"bias": "all"}, ("bias",)),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save", "lm_head")),
        ({"fan_in_fan_out": True}, ("fan_in_fan_out",)),
        ({"lora_alpha": "much"}, ("lora_alpha", "much")),
        ({"alpha_pattern": {"(": 1}}, ("alpha_pattern", "no pattern")),
        ({"r": 64}, ("r or rank_pattern is 64", "has 1 rows")),
        ({"rank_pattern": {"q_proj": 2}}, ("r or rank_pattern is 2", "q_proj.lora_A.weight has 1 rows")),
        ({"r": "many"}, ("r or rank_pattern of", "'many'")),
    ],
)
def test_what_an_adapter_may_not_be_is_refused_by_its_key(pair, adapters, tmp_path, config, parts):
    folder = changed(adapters[0][1], tmp_path, **config)
    refused(CheckpointError, lambda: build(pair, SHAPE, lora_modules={"it": str(folder)}), *parts)


def test_tensors_that_do_not_fit_are_refused_by_name(pair, adapters, tmp_path):
    factors = load_file(adapters[0][1] / "adapter_model.safetensors")
    first = next(name for name in factors if name.endswith("lora_A.weight"))
    cases = {
        "embed_tokens": {**factors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)},
        "lm_head": {
            **factors,
            "base_model.model.lm_head.lora_A.weight": torch.ones(2, 64),
            "base_model.model.lm_head.lora_B.weight": torch.ones(211, 2),
        },
        "layers.77": {**factors, first.replace("layers.0", "layers.77"): factors[first].clone()},
        "missing tensor": {name: x for name, x in factors.items() if name != first},
        "another model": {**factors, first: torch.ones(4, 3)},
        "no number": {**factors, first: torch.full_like(factors[first], torch.inf)},
    }
    for at, (part, tensors) in enumerate(cases.items()):
        folder = changed(adapters[0][1], tmp_path / f"{at}", tensors)
        refused(CheckpointError, lambda folder=folder: build(pair, SHAPE, lora_modules={"it": str(folder)}), part)


def test_factors_beyond_the_models_dtype_are_refused(pair, adapters, tmp_path):
    """Beside others' in one product, an infinite one would be theirs, too."""
    factors = load_file(adapters[0][1] / "adapter_model.safetensors")
    name = next(name for name in factors if name.endswith("lora_B.weight"))
    large = {**factors, name: torch.full_like(factors[name], 1e36)}
    folder = changed(adapters[0][1], tmp_path, large, lora_alpha=9e5)
    call = partial(build, pair, SHAPE, lora_modules={"it": str(folder)})
    refused(CheckpointError, partial(call, dtype="float32"), "900000", "float32", "--dtype")
    call(dtype="float64").close()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"lora_modules": ("a",)}, ("--lora-modules", "NAME=FOLDER", "'a'")),
        ({"lora_modules": ("a=x", "a=y")}, ("--lora-modules", "twice")),
    ],
)
def test_options_that_cannot_be(pair, options, parts):
    refused(ConfigError, lambda: build(pair, SHAPE, **options), *parts)


def test_a_name_that_nobody_gave(pair, adapters, tmp_path):
    llm = build(pair, SHAPE, lora_modules=modules(adapters[:1]))
    refused(InputError, lambda: llm.generate([[5, 6]], greedy(2), lora="other"), "'other'", "a0")
    refused(CheckpointError, lambda: build(pair, SHAPE, lora_modules={"it": str(tmp_path)}), "adapter_config.json")


@pytest.mark.parametrize("name", ADAPTER_FAULTS)
def test_each_past_bug_shows(pair, adapters, name):
    prompts = pair.prompts([30, 9])
    want = wanted(pair, adapters[:1], prompts, greedy(16))

    def got():
        llm = build(pair, SHAPE, lora_modules=modules(adapters[:1]), page_size=4)
        return [tokens(llm.generate(prompts, greedy(16), lora=each)) for each in ("a0", None)]

    assert got() == want[::-1]
    with ADAPTER_FAULTS[name].active():
        assert got() != want[::-1]


@pytest.mark.parametrize("options", [(), pytest.param(("--dp-size", "2"), marks=pytest.mark.slow)])
def test_a_server_has_adapters_as_models(adapters, tmp_path, options):
    """Under their names, as vLLM has them; SGLang's way too."""
    folder = resolve_folder("builtin:nestling")
    lora = save_lora(tmp_path / "lora", folder, 4, 8.0, 1)
    llm = LLM("builtin:nestling", "builtin:nestling-eagle3", lora_modules={"it": str(lora)})
    asked, params = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}, SamplingParams(max_tokens=12)
    want = [llm.generate("Once upon", params, lora=name)[0].text for name in (None, "it")]
    assert want[0] != want[1]
    flags = ("--speculative-draft-model-path", "builtin:nestling-eagle3", "--lora-modules", f"it={lora}")
    flags += ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2")
    with serving("builtin:nestling", "--served-model-name", "base", *flags, *options) as server:
        listed = {each["id"]: each["parent"] for each in server.get("/v1/models").json()["data"]}
        assert listed == {"base": None, "it": "base"}
        for name, text in zip(("base", "it", None), (*want, want[0]), strict=True):
            body = server.post("/v1/completions", asked | ({} if name is None else {"model": name})).json()
            assert (body["choices"][0]["text"], body["model"]) == (text, name or "base")
        said = {"text": "Once upon", "lora_path": "it", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        assert server.post("/generate", said).json()["text"] == want[1]
        assert server.post("/v1/completions", asked | {"model": "other"}).status_code == 404
        new = {"lora_name": "more", "lora_path": str(lora)}
        assert server.post("/v1/load_lora_adapter", {}).status_code == 400
        assert server.post("/v1/load_lora_adapter", new | {"lora_name": "base"}).status_code == 400
        answer = server.post("/v1/load_lora_adapter", new)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'more' added successfully.")
        assert "already" in server.post("/v1/load_lora_adapter", new).json()["error"]["message"]
        for _ in range(3):  # whichever engine takes it
            body = server.post("/v1/completions", asked | {"model": "more"}).json()
            assert (body["choices"][0]["text"], body["model"]) == (want[1], "more")
        assert {each["id"] for each in server.get("/v1/models").json()["data"]} == {"base", "it", "more"}
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "it"}).status_code == 200
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "it"}).status_code == 404
        assert server.post("/v1/completions", asked | {"model": "it"}).status_code == 404
        assert server.post("/v1/completions", asked | {"model": "more"}).json()["choices"][0]["text"] == want[1]


def test_an_adapter_that_is_called_as_the_model_is_refused(adapters, capsys):
    code, _, err = run(capsys, "serve", "base", "--lora-modules", f"base={adapters[0][1]}")
    assert (code, "--lora-modules" in err) == (2, True)
