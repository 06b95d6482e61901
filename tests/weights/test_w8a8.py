"""`--quantize-activations`: engines against a dense model that rounds its inputs with `compressed-tensors`' functions,
trees against plain decoding, and what is refused."""

import logging
from dataclasses import replace

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.quantized import by_library, fp8_blocks, nvfp4_of_modelopt, quantized
from support.refusing import load, refused
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head, save_random_llama
from treetop import SamplingParams
from treetop.checkpoints.loader import LoadContext, load_weights, random_weights, weight_bytes
from treetop.engine.kv_staging import staging_of
from treetop.engine.startup.plan import check_quantized_activations
from treetop.kernels.kv import FP8
from treetop.models.registry import target_spec
from treetop.parallel.exchange import ExchangeRank
from treetop.tools.inspect import as_text, inspect
from treetop.tools.quantize import quantize as quantize_folder
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError
from treetop.weights.w8a8 import W8A8Linear

BF16 = torch.bfloat16
E4M3 = {"num_bits": 8, "type": "float"}
TOKEN = {**E4M3, "strategy": "token", "dynamic": True}
STATIC = {**E4M3, "strategy": "tensor", "dynamic": False}
CHANNELS = {**E4M3, "strategy": "channel"}
BLOCKS = {**E4M3, "strategy": "block", "block_structure": [32, 32]}
FORMATS = {
    "token": by_library("float-quantized", BF16, inputs=TOKEN, **CHANNELS),
    "static": by_library("float-quantized", BF16, inputs=STATIC, **E4M3, strategy="tensor"),
    "groups": fp8_blocks(32, 32, BF16),
    "powers": fp8_blocks(32, 64, BF16, scale_fmt="ue8m0"),
}
"""Weights times scales of 16 bits are float32s: the decoded folder is what is multiplied, to the bit."""
ON = {"quantize_activations": True, "context_length": 128}
LENGTHS = [9, 17, 3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    target = save_random_llama(folder / "target", seed=8, vocab_size=12, intermediate_size=128)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


@pytest.fixture(scope="module")
def made(pair, tmp_path_factory):
    """Of each format the folder and the decoded one."""
    return {
        name: quantized(pair.target, tmp_path_factory.mktemp(name) / "made", each) for name, each in FORMATS.items()
    }


def rounding(name):
    """What inputs [1, tokens, k] float32 become, in float64."""

    def by_library(x):
        args = QuantizationArgs(**(TOKEN if name == "token" else STATIC))
        scale, zero = torch.tensor([2.0**-6]), torch.zeros(1)
        if name == "token":
            scale, zero = compute_dynamic_scales_and_zp(x, args, None)
        return quantize(x, scale, zero, args, dtype=FP8).double() * scale.double()

    def by_group(x):
        parts = x.unflatten(-1, (-1, 32 if name == "groups" else 64))
        scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        if name == "powers":
            scale = torch.exp2(scale.double().log2().ceil()).float()
        return ((parts / scale).to(FP8).double() * scale.double()).flatten(-2)

    return by_library if name in ("token", "static") else by_group


def dense(folder, prompts, count, round_inputs):
    """Greedy tokens, their log-probabilities, of the decoded model of `transformers` whose products round inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            module.register_forward_pre_hook(lambda _, given: (round_inputs(given[0].float()),))
    found = []
    for prompt in prompts:
        ids, logprobs = list(prompt), []
        for _ in range(count):
            with torch.inference_mode():
                each = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(each.argmax()))
            logprobs.append(float(each.max()))
        found.append((tuple(ids[len(prompt) :]), logprobs))
    return found


@pytest.mark.parametrize("name", few_of(FORMATS, 1, 3))
def test_answers_are_those_of_a_dense_model_that_rounds_its_inputs(name, pair, made):
    """In float64: tokens and log-probabilities of trees in batches, these to a float32; without the option they are
    others."""
    folder, decoded = made[name]
    mine, prompts = Pair(folder, pair.head), pair.prompts(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
    want = dense(decoded, prompts, 10, rounding(name))
    got = build(mine, (4, 3, 12), **ON).generate(prompts, params)
    for each, (ids, logprobs) in zip(got, want, strict=True):
        assert each.token_ids == ids
        assert [at.logprob for at in each.logprobs] == pytest.approx(logprobs, abs=1e-6)
    wide = build(mine, None, context_length=128).generate(prompts, params)
    assert (
        max(
            abs(a.logprob - b.logprob)
            for x, y in zip(wide, got, strict=True)
            for a, b in zip(x.logprobs, y.logprobs, strict=True)
        )
        > 1e-3
    )


@pytest.mark.parametrize("name", FORMATS)
def test_norms_write_the_codes_that_the_next_product_would(name, pair, made, monkeypatch):
    """Those of qkv and of gate and up, whose rows are then not rounded again; logits have the same bits without."""
    mine, prompts = Pair(made[name][0], pair.head), pair.prompts(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    options = {**ON, "dtype": "float32", "exactness": "bits"}
    count, found, real = [0], [], W8A8Linear.take

    def take(self, x, codes):
        count[0] += 1
        fresh = self._quantized(x.flatten(0, -2))
        assert torch.equal(fresh.codes, codes.codes)
        assert torch.equal(fresh.scale, codes.scale)
        real(self, x, codes)

    monkeypatch.setattr(W8A8Linear, "take", take)
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr(W8A8Linear, "reads_codes", lambda self, columns: False)
        before = count[0]
        found.append(build(mine, (3, 2, 6), **options).generate(prompts, params))
        assert (count[0] > before) == (reads and name != "static")
    assert tokens(found[0]) == tokens(found[1])
    assert [each.logprobs for each in found[0]] == [each.logprobs for each in found[1]]


@pytest.mark.parametrize("name", few_of(FORMATS, 0, 2))
def test_trees_give_the_bits_of_plain_decoding(name, pair, made):
    """float32 with `--exactness bits`: each row's products are its own, alone and in any batch and chunk."""
    mine, prompts = Pair(made[name][0], pair.head), pair.prompts(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    options = {**ON, "dtype": "float32", "exactness": "bits"}
    plain = build(mine, None, **options, max_running_requests=1).generate(prompts, params)
    tree = build(mine, (4, 3, 12), **options, chunked_prefill_size=8).generate(prompts, params)
    assert tokens(tree) == tokens(plain)
    assert [each.logprobs for each in tree] == [each.logprobs for each in plain]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_give_the_tokens_of_plain_decoding(dtype, pair, made):
    """With the default exactness: a first other token only where plain decoding's two best were near, which a code that
    rounds the other way decides."""
    mine, prompts = Pair(made["token"][0], pair.head), pair.prompts([9, 17, 3, 30, 22, 12])
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    plain = build(mine, None, **ON, dtype=dtype).generate(prompts, params)
    tree = build(mine, (4, 3, 12), **ON, dtype=dtype).generate(prompts, params)
    near = 0
    for one, other in zip(plain, tree, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), None)
        if at is not None:
            best = [logprob for _, logprob in one.logprobs[at].top]
            assert best[0] - best[1] < (1e-3 if dtype == "float32" else 5e-2)
            near += 1
    assert near <= (0 if dtype == "float32" else 2)


def test_fixed_scales_of_one_product_must_agree(pair, made, tmp_path):
    """And be scales; one that is missing is named."""
    folder, _ = made["static"]
    scale = "model.layers.1.self_attn.k_proj.input_scale"
    for value, words in ((0.5, "one number"), (0.0, scale), (float("nan"), scale), (float("inf"), scale)):
        wrong = copy_folder(folder, tmp_path / f"wrong {value}", tensors={scale: torch.tensor([value])})
        refused(CheckpointError, load(wrong, **ON), words)
        load(wrong, context_length=128)().close()
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if name != scale}
    missing = copy_folder(folder, tmp_path / "missing")
    save_file(tensors, missing / "model.safetensors")
    refused(CheckpointError, load(missing, **ON), scale)


def group_of(inputs, weights=CHANNELS, stored="float-quantized"):
    group = {"targets": ["Linear"], "format": stored, "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
REFUSED = {
    "dynamic by tensor": (group_of({**STATIC, "dynamic": True}), "would depend on the others"),
    "weights alone": (group_of(None), "no activations in FP8"),
    "integers": (group_of({**TOKEN, "type": "int"}), "input_activations"),
    "with zeros": (group_of({**TOKEN, "symmetric": False}), "input_activations"),
    "tokens with blocks": (group_of(TOKEN, BLOCKS), "32 columns of weights"),
    "other groups": (group_of({**E4M3, "strategy": "group", "group_size": 64, "dynamic": True}, BLOCKS), "of 64"),
    "groups of 16": (fp8_blocks(32, 16).config, "32, 64, 128"),
    "fixed with blocks": ({**fp8_blocks(32, 32).config, "activation_scheme": "static"}, "'static'"),
    "other scales": ({**fp8_blocks(32, 32).config, "scale_fmt": "e5m2"}, "scale_fmt"),
    "blocks of modelopt": ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, "no activations in FP8"),
    "nvfp4": (nvfp4_of_modelopt({**MODELOPT, "quant_algo": "NVFP4"}).config, "NVFP4 has no activations in FP8"),
    "w4a16": (
        group_of(None, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized"),
        "W4A16 has no activations in FP8",
    ),
    "mxfp4": (
        group_of(None, {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
        "MXFP4 has no activations in FP8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name, pair, tmp_path):
    """By the first weight's name; no weight is read."""
    config, words = REFUSED[name]
    folder = copy_folder(pair.target, tmp_path / "made", quantization_config=config)
    message = refused(ConfigError, load(folder, load_format="dummy", **ON), "--quantize-activations", words)
    assert "model.layers.0." in message


def test_other_options_and_devices_are_refused_by_name(pair, made, monkeypatch):
    """Plain weights, decoded ones, and GPUs whose tensor cores know no FP8."""
    refused(ConfigError, load(pair.target, **ON), "no dense products in FP8")
    refused(ConfigError, load(made["token"][0], **ON, dequantize_weights=True), "--dequantize-weights")
    folder = made["token"][0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    config, gpu = EngineConfig(str(folder), quantize_activations=True), torch.device("cuda")
    refused(ConfigError, lambda: check_quantized_activations(config, target_spec(folder), gpu), "an older GPU", "8.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_quantized_activations(config, target_spec(folder), gpu)


@pytest.mark.parametrize("name", ["static", "groups"])
def test_memory_is_counted_and_what_is_in_force_is_said(name, made, caplog):
    """By `treetop inspect`, its JSON, the block at the start, and to another worker."""
    folder = made[name][0]
    how = {"static": "by a fixed scale", "groups": "by token and group of 32"}[name]
    config = EngineConfig(str(folder), dtype="bfloat16", quantize_activations=True)
    report = inspect(config)
    assert report.target.activations == f"activations in FP8 {how}"
    assert f"FP8 with activations in FP8 {how} " in as_text(report)
    assert inspect(replace(config, quantize_activations=False)).target.activations is None
    place = LoadContext(torch.bfloat16, torch.device("cpu"), 8, activations=True)
    params = place.own(target_spec(folder).params)
    for weights in (load_weights(folder, target_spec(folder).params, place), random_weights(params, place)):
        assert sum(each.nbytes for each in weights.held.values()) == weight_bytes(params, torch.bfloat16)
        sizes = []
        for param in params:
            if param.held.activations is not None:
                product = weights.linear(param.name)
                sizes.append(float(product(torch.randn(64, param.shape[1]).bfloat16()).float().std()))
                assert product.read_bytes(1) < 2 * product.numbers
    assert all(0.5 < each < 2 for each in sizes), "random weights keep their input's size, about"
    assert report.target.weight_bytes == weight_bytes(params, torch.bfloat16)
    slots = {"disaggregation_slots": 1, "disaggregation_slot_bytes": 2**20, "context_length": 64}
    with caplog.at_level(logging.INFO, "treetop"):
        on = load(folder, quantize_activations=True, **slots)()
    assert f"activations in FP8 {how}" in caplog.text
    off = load(folder, **slots)()
    assert staging_of(on.engine).schema.target != staging_of(off.engine).schema.target


def test_experts_keep_their_activations_and_it_is_said(tmp_path, caplog):
    """Dense products beside them are quantized: answers differ from those without the option."""
    sizes = {"vocab_size": 12, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
    target = save_random_experts(tmp_path / "plain", "qwen3_moe", seed=3, **sizes)
    pair = Pair(target, save_random_head(tmp_path / "head", target, 12, seed=2))
    folder, _ = quantized(target, tmp_path / "made", FORMATS["groups"])
    report = inspect(EngineConfig(str(folder), quantize_activations=True))
    assert "those of experts keep 16 bits" in as_text(report)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    mine, prompts = Pair(folder, pair.head), pair.prompts(LENGTHS)
    with caplog.at_level(logging.INFO, "treetop"):
        tree = build(mine, (2, 2, 6), **ON).generate(prompts, params)
    assert "those of experts keep 16 bits" in caplog.text
    assert tokens(tree) == tokens(build(mine, None, **ON).generate(prompts, params))
    assert [each.logprobs for each in tree] != [
        each.logprobs for each in build(mine, None, context_length=128).generate(prompts, params)
    ]
    dense = [f"{part}_proj" for part in ("q", "k", "v", "o", "mlp.gate", "mlp.up", "mlp.down")]
    only = {**FORMATS["groups"].config, "modules_to_not_convert": [*dense, "lm_head"]}
    refused(ConfigError, load(copy_folder(folder, tmp_path / "only", quantization_config=only), **ON), "dense products")


def test_heads_of_compressed_attention_keep_their_activations_and_it_is_said(tmp_path):
    """Rows of a plane that turns lie in another order, with their scales."""
    pair = FAMILIES["youtu"].save(tmp_path / "plain", seed=5).pair
    prompts = pair.prompts(LENGTHS)
    for name in ("token", "static"):
        folder, _ = quantized(pair.target, tmp_path / name, FORMATS[name])
        report = inspect(EngineConfig(str(folder), quantize_activations=True))
        assert "those of heads of compressed attention keep 16 bits" in as_text(report)
        tree = build(Pair(folder, pair.head), (2, 2, 6), **ON).generate(prompts, greedy(8))
        assert tokens(tree) == tokens(build(Pair(folder, pair.head), None, **ON).generate(prompts, greedy(8)))


@pytest.mark.parametrize("name", ["token", "static", "groups"])
def test_ranks_have_their_part(name, made):
    """Rows of some weights and columns of others, with the scales of those: of each rank's own part of the inputs."""
    spec, place = target_spec(made[name][0]), LoadContext(torch.float64, torch.device("cpu"), 1, activations=True)
    whole = load_weights(made[name][0], spec.params, place)
    x = torch.randn(3, 128).double()
    for rank in range(2):
        parallel = ExchangeRank(rank, 2, place.device, None, None)
        mine = load_weights(made[name][0], spec.params, replace(place, parallel=parallel))
        inner = whole.held["layers.0.mlp.gate_up"].shape[0] // 2
        lines = slice(rank * inner // 2, (rank + 1) * inner // 2)
        both = load_weights(made[name][0], spec.params, place).linear("layers.0.mlp.gate_up")(x[:, :64])
        got = mine.linear("layers.0.mlp.gate_up")(x[:, :64])
        assert torch.equal(got, torch.cat([each[:, lines] for each in both.chunk(2, 1)], 1))
        columns = slice(rank * 64, (rank + 1) * 64)
        part = mine.linear("layers.0.mlp.down")
        zeros = torch.zeros(3, 128).double()
        zeros[:, columns] = x[:, columns]
        alone = load_weights(made[name][0], spec.params, place).linear("layers.0.mlp.down")(zeros)
        torch.testing.assert_close(part(x[:, columns]), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_head_is_quantized_as_its_own_file_says(pair, made, tmp_path):
    """One whose file says nothing of it keeps 16 bits; tokens are the same. `treetop quantize` writes them by token."""
    prompts = pair.prompts(LENGTHS)
    head = tmp_path / "head"
    quantize_folder(pair.head, pair.target, "fp8", 8, head)
    wide = copy_folder(head, tmp_path / "wide", quantization_config=group_of(None))
    found = []
    for each, kinds in ((head, True), (wide, False)):
        llm = build(Pair(made["token"][0], each), (4, 3, 12), **ON)
        layers = llm.engine.runner.drafter.products.layers
        assert any(isinstance(product, W8A8Linear) for product in layers) is kinds
        found.append(tokens(llm.generate(prompts, greedy(12))))
    assert found[0] == found[1]
