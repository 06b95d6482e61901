"""Targets with experts: the models that `transformers` runs, exact with trees, whatever shares their batch."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.engines import build, greedy, tokens
from support.grids import few_of
from support.logits import record_logits
from support.tiny_models import Pair, copy_folder, save_mxfp4, save_random_experts, save_random_head
from treetop import LLM
from treetop.bench.machine import Machine
from treetop.bench.roofline import Case, distinct_at_random, expert_work, round_floor
from treetop.checkpoints.loader import LoadContext, load_weights, weight_bytes
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError
from treetop.types.layout import PLAIN
from treetop.types.phase import Phase

FAMILIES = ["qwen3_moe", "gpt_oss", "glm4_moe", "mxfp4"]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
PROMPTS = [5, 41, 17, 1, 23]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every family's folder, a head for it, and what `transformers` is to load: without MXFP4, which needs a GPU."""
    place, made = tmp_path_factory.mktemp("experts"), {}
    for family in FAMILIES[:3]:
        folder = save_random_experts(place / family, family, seed=3)
        made[family] = Pair(folder, save_random_head(place / f"{family}-head", with_heads(folder), 60)), folder
    stacked = save_random_experts(place / "stacked", "gpt_oss", hidden_size=64, intermediate_size=64, seed=4)
    packed = save_mxfp4(place / "mxfp4", stacked, seed=5)
    plain = copy_folder(stacked, place / "decoded", tensors=decoded(packed))
    made["mxfp4"] = Pair(packed, save_random_head(place / "mxfp4-head", with_heads(packed), 60)), plain
    return made


def with_heads(folder):
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 24
    return folder


def decoded(folder):
    """The experts of an MXFP4 folder as numbers, by the format's definition."""
    sizes, tensors, out = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], load_file(folder / "model.safetensors"), {}
    table = torch.tensor(sizes + [-size for size in sizes])
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2)
            scale = 2.0 ** (tensors[name.replace("_blocks", "_scales")].float() - 127)
            rows = (table[codes.long()] * scale[..., None]).flatten(-2)
            out[name.removesuffix("_blocks")] = rows.transpose(1, 2).contiguous()
    return out


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("chunk", few_of([512, 6], 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(folders, family, chunk, device):
    """float32, 1e-4 of the largest: prompts in one chunk and in many, then decoded positions."""
    pair, plain = folders[family]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, experts_implementation="eager").eval()
    options = {"dtype": "float32", "graphs": "off", "device": device, "context_length": 128}
    llm = LLM(model=str(pair.target), draft=None, chunked_prefill_size=chunk, page_size=4, **options)
    seen = record_logits(llm)
    for prompt in pair.prompts([1, 41]):
        seen.clear()
        (output,) = llm.generate([prompt], greedy(12))
        ours = torch.cat([logits[0] for logits in seen]).double().cpu()
        with torch.no_grad():
            theirs = model(torch.tensor([[*prompt, *output.token_ids[:-1]]])).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", few_of(FAMILIES, 0, 1))
@pytest.mark.parametrize("shape", [pytest.param((1, 3, 4), marks=pytest.mark.slow), (4, 3, 12)])
def test_speculative_tokens_equal_plain_ones_in_any_batch(folders, family, shape):
    """float64, greedy, prefix cache on: five prompts at once, padded to a bucket, and each alone and plainly."""
    pair, _ = folders[family]
    options, prompts = {"context_length": 128, "page_size": 4}, pair.prompts(PROMPTS, seed=2)
    plain, tree = build(pair, None, **options), build(pair, shape, **options)
    alone = [tokens(plain.generate([prompt], greedy(20)))[0] for prompt in prompts]
    assert tokens(tree.generate(prompts, greedy(20))) == alone
    assert tokens(plain.generate(prompts, greedy(20))) == alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [None, (1, 3, 4), (4, 3, 12)])
def test_captured_rounds_equal_eager_ones_on_a_gpu(folders, family, shape):
    """bfloat16: the same kernels on the same numbers, so the same tokens; five rows, padded to eight."""
    pair, _ = folders[family]
    outputs = []
    for graphs in ("auto", "off"):
        llm = build(pair, shape, dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        outputs.append(tokens(llm.generate(pair.prompts(PROMPTS, seed=2), greedy(24))))
        del llm
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_and_floor_know_the_experts(folders, family):
    """What loading takes is what was counted, and a round reads those experts that somebody chose."""
    spec = target_spec(folders[family][0].target)
    weights = load_weights(spec.folder, spec.params, LoadContext(torch.float32, torch.device("cpu"), 8))
    assert sum(weight.nbytes for weight in weights.held.values()) == weight_bytes(spec.params, torch.float32)
    layers = spec.expert_layers(torch.float32)
    assert len(layers) == {"qwen3_moe": 3, "glm4_moe": 3}.get(family, 4)
    held = sum(layer.bytes * layer.router.num_experts for layer in layers)
    assert held == sum(p.held_bytes(torch.float32) for p in spec.params if p.kind == "experts")
    if family == "mxfp4":
        assert held == 4 * sum(layer.numbers * layer.router.num_experts for layer in layers)
        packed = spec.expert_layers(torch.float32, "tiles")
        assert [32 * layer.bytes for layer in packed] == [17 * layer.numbers for layer in layers]
    machine, case = Machine("none", "0", "float32", 1e9, 1e30), Case(PLAIN, 1, 8, 4)
    top_k = layers[0].router.top_k
    one, all_of_them = (
        round_floor(spec, None, case, machine, distinct=[count] * len(layers))[Phase.VERIFY]
        for count in (top_k, layers[0].router.num_experts)
    )
    missing = held * (1 - top_k / layers[0].router.num_experts)
    assert all_of_them - one == pytest.approx(missing / 1e9)
    assert distinct_at_random(layers[0].router, 1) == pytest.approx(top_k)
    assert expert_work(layers, 1).flop == sum(2 * top_k * layer.numbers for layer in layers)


def test_a_glm_with_its_layer_of_mtp_loads_as_a_target(folders, tmp_path):
    """The layer after the last, with the experts, shared and routed, of every other, is known and left alone."""
    folder = folders["glm4_moe"][0].target
    layer = {name: t for name, t in load_file(folder / "model.safetensors").items() if ".layers.3." in name}
    more = {name.replace(".layers.3.", ".layers.4."): tensor for name, tensor in layer.items()}
    more |= {f"model.layers.4.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")}
    more |= {f"model.layers.4.shared_head.{name}.weight": torch.ones(64) for name in ("norm", "head")}
    spec = target_spec(copy_folder(folder, tmp_path / "mtp", tensors=more))
    assert spec.check() == target_spec(folder).check()


def test_what_is_wrong_with_mxfp4_is_an_error_that_names_it(folders, tmp_path):
    pair, _ = folders["mxfp4"]
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(pair.target / "model.safetensors")

    def refusal(**changes) -> str:
        folder = copy_folder(pair.target, tmp_path / str(len(list(tmp_path.iterdir()))), **changes)
        with pytest.raises(CheckpointError) as refused:
            LLM(model=str(folder), draft=None, context_length=64)
        return str(refused.value)

    scales = tensors[f"{name}_scales"].clone()
    scales[0, 0, 0] = 255
    assert f"{name}: its scales" in refusal(tensors={f"{name}_scales": scales})
    scales[0, 0, 0] = 254
    assert f"{name}: its scales" in refusal(tensors={f"{name}_scales": scales})
    assert f"missing tensor {name}_scales" in refusal(tensors={f"{name}_scales": None})
    assert "has shape" in refusal(tensors={f"{name}_blocks": tensors[f"{name}_blocks"][..., :8]})
    assert "quantization_config" in refusal(quantization_config={"quant_method": "bnb"})
    assert "intermediate_size" in refusal(intermediate_size=48)
    assert "layer_types" in refusal(layer_types=["sliding_attention"])
    assert "num_experts_per_tok" in refusal(num_experts_per_tok=9)
