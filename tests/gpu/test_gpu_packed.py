"""Weights that stay packed on an NVIDIA GPU: products of a Llama 8B's sizes, and engines that keep them by default."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from support.engines import build, greedy, tokens
from support.operation_cases import coded_weight
from support.quantized import by_library, fp8_blocks, nvfp4_of_modelopt, quantized
from support.tiny_models import Pair, save_random_experts, save_random_head, save_random_llama
from treetop.engine.startup.weight_copies import packing
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.tiles import apart, decode_tiles, in_turn, tile
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.config import EngineConfig
from treetop.weights.packed import TiledGated, TiledLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
CODINGS = [
    QuantScheme("e4m3", 0),
    QuantScheme("e4m3", 128),
    QuantScheme("int4", 128, zeros=True),
    QuantScheme("e2m1", 16, "times"),
]
W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FORMATS = {
    "fp8 blocks": partial(fp8_blocks, 32, 64),
    "fp8 channel": partial(by_library, "float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel"),
    "w4a16": partial(by_library, "pack-quantized", torch.bfloat16, **W4A16),
    "nvfp4": partial(nvfp4_of_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
}
"""Made by the test that asks for one: some need `compressed-tensors`."""


def near(got, want):
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert error < 1e-2, f"relative error {error:.1e}"


@pytest.mark.parametrize("scheme", CODINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 40, 100, 256, 300])
@pytest.mark.parametrize(("lines", "k", "gated"), [(6144, 4096, False), (28672, 4096, True), (4096, 14336, False)])
def test_products_of_a_llama_8b_equal_those_of_the_decoded_weight(lines, k, gated, rows, scheme):
    """By the kernel up to 256 rows, by a decoded block for more; three times, each beside the one before it."""
    torch.manual_seed(rows)
    by_rows, gpu = coded_weight(lines, k, scheme, GPU), gpu_traits(GPU)
    weight = tile(in_turn(by_rows.halves()) if gated else by_rows)
    whole = decode_tiles(weight, 0, lines, torch.bfloat16, gpu)
    x = torch.randn(rows, k, device=GPU, dtype=torch.bfloat16) / float(whole.float().std()) * k**-0.5
    want = F.linear(x, whole).float()
    product = TiledGated(weight, None, "silu", gpu) if gated else TiledLinear(weight, None, gpu)
    for _ in range(3):
        got = product(x)
    if gated:
        gate, up = apart(want, -1)
        want = F.silu(gate) * up
    near(got, want)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    dense = save_random_llama(folder / "dense", seed=8, vocab_size=12, intermediate_size=128)
    sizes = {"vocab_size": 12, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
    experts = save_random_experts(folder / "experts", "qwen3_moe", seed=3, **sizes)
    return {
        "dense": Pair(dense, save_random_head(folder / "dense-head", dense, draft_vocab=11, seed=2)),
        "experts": Pair(experts, save_random_head(folder / "experts-head", experts, 12, seed=2)),
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_captured_rounds_with_packed_weights_equal_eager_ones(kind, name, pairs, tmp_path):
    """bfloat16: packed by default, and the same kernels on the same numbers, so the same tokens."""
    folder, _ = quantized(pairs[kind].target, tmp_path / "target", FORMATS[name]())
    pair, found = Pair(folder, pairs[kind].head), []
    assert packing(EngineConfig.of(str(folder), draft=None, device="cuda", context_length=128)) == "tiles"
    for graphs in ("auto", "off"):
        llm = build(pair, (4, 3, 12), dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        found.append(tokens(llm.generate(pair.prompts([5, 41, 17], seed=2), greedy(24))))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_float32_answers_are_those_of_decoded_weights(kind, pairs, tmp_path):
    """Where products are exact enough that a tie is rare."""
    folder, _ = quantized(pairs[kind].target, tmp_path / "target", FORMATS["w4a16"]())
    pair, found = Pair(folder, pairs[kind].head), []
    for dequantized in (True, False):
        llm = build(pair, (4, 3, 12), dtype="float32", device="cuda", dequantize_weights=dequantized)
        found.append(tokens(llm.generate(pair.prompts([5, 41, 17], seed=2), greedy(24))))
        llm.close()
    assert found[0] == found[1]
