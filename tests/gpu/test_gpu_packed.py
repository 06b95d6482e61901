"""Weights that stay packed on an NVIDIA GPU: products of a Llama 8B's sizes, and engines that keep them by default."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from support.engines import build, greedy, tokens
from support.operation_cases import coded_weight
from support.quantized import by_library, fp8_blocks, nvfp4_of_modelopt, quantized
from support.tiny_models import Pair, save_random_experts, save_random_head, save_random_llama
from treetop.engine.startup.weight_copies import packing
from treetop.kernels.gemm.quantized_gemm import QuantizedLaunch, quantized_gated, quantized_gemm
from treetop.kernels.gemm.quantized_gluon import joined, launch_of, why_not
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.tiles import apart, decode_tiles, in_turn, tile
from treetop.kernels.gluon_guard import why_no_gluon
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
    QuantScheme("e2m1", 16, "over"),
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
@pytest.mark.parametrize(
    ("rows", "by_gluon"), [(1, True), *product((100, 256, 300), (True, False)), (16, True), (40, True)]
)
@pytest.mark.parametrize(("lines", "k", "gated"), [(6144, 4096, False), (28672, 4096, True), (4096, 14336, False)])
def test_products_of_a_llama_8b_equal_those_of_the_decoded_weight(lines, k, gated, rows, by_gluon, scheme):
    """By a kernel of few rows, and on Hopper by one of many; without that by a decoded block for more than 256.

    Three times, each beside the one before it.
    """
    torch.manual_seed(rows)
    by_rows, gpu = coded_weight(lines, k, scheme, GPU), gpu_traits(GPU)
    weight = tile(in_turn(by_rows.halves()) if gated else by_rows)
    whole = decode_tiles(weight, 0, lines, torch.bfloat16, gpu)
    x = torch.randn(rows, k, device=GPU, dtype=torch.bfloat16) / float(whole.float().std()) * k**-0.5
    want = F.linear(x, whole).float()
    multiply = TiledGated(weight, None, "silu", gpu) if gated else TiledLinear(weight, None, gpu)
    multiply._by_gluon &= by_gluon
    for _ in range(3):
        got = multiply(x)
    if gated:
        gate, up = apart(want, -1)
        want = F.silu(gate) * up
    near(got, want)


MANY = [
    (scheme, block, gated)
    for scheme in (*CODINGS, QuantScheme("e2m1", 32, "e8m0"), QuantScheme("e2m1", 16, "e4m3"), QuantScheme("int4", 128))
    for block, gated in (((128, 256), True), ((256, 128), False))
]
MANY += [(CODINGS[0], (256, 128), True), (CODINGS[2], (128, 256), False), (CODINGS[0], (128, 128), False)]
MANY += [(CODINGS[0], (8, 64), True), (CODINGS[2], (16, 128), False), (CODINGS[3], (64, 64), True)]
"""A scheme, a block of the kernel's, and whether there is a gate: each takes seconds to compile."""


def of_usual_size(weight):
    """With scales of 16 bits, and no larger than other arithmetic than usual would be taken for."""
    if weight.scheme.scales == "e8m0":
        return replace(weight, scale=weight.scale.clamp(max=128))
    if weight.scheme.scales == "float32":
        folds = weight.scheme == QuantScheme("int4", 128)
        return replace(weight, scale=(weight.scale.bfloat16() if folds else weight.scale.half()).float())
    return replace(weight, factor=weight.factor * (1e4 if weight.scheme.scales == "over" else 1e-4))


@pytest.mark.parametrize(("scheme", "block", "gated"), MANY, ids=str)
def test_the_product_of_many_rows_has_the_bits_of_the_one_of_few(scheme, block, gated):
    """With last blocks of rows, lines and columns that are full or not, more blocks than slots, splits, and a bias.

    By a program a block, and by few programs that multiply one after another.
    """
    torch.manual_seed(1)
    gpu, on_hopper = gpu_traits(GPU), torch.cuda.get_device_capability() == (9, 0) and why_no_gluon(GPU) is None
    splits, multiply = (1, partial(quantized_gated, kind="silu")) if gated else (2, quantized_gemm)
    for (lines, k), rows in product(((448, 2048), (192, 712), (256, 256)), (65, 128, 200, 513)):
        by_rows = of_usual_size(coded_weight(lines, k, scheme, GPU))
        weight = tile(in_turn(by_rows.halves()) if gated else by_rows, torch.bfloat16)
        if (why := why_not(weight, torch.bfloat16, gpu)) is not None:
            assert not on_hopper, why
            pytest.skip(why)
        x, bias = (torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in ((rows, k), (lines,)))
        beside, warps = 1 if block[0] >= 128 else 3, 16 if (block, scheme.numbers) == ((128, 256), "e2m1") else 0
        launch = launch_of(scheme.numbers, k, block, splits, gpu, beside, warps)
        want = multiply(x, weight, bias=bias, launch=QuantizedLaunch(64, splits, 2, 4), gpu=gpu)
        assert torch.equal(multiply(x, weight, bias=bias, launch=launch, gpu=gpu), want), (lines, k, rows)
        stay, few = replace(launch, stays=True), replace(gpu, num_sms=2)  # some programs have more than one block
        assert torch.equal(multiply(x, weight, bias=bias, launch=stay, gpu=few), want), (lines, k, rows)
        others = [replace(stay, ahead=3)] if block == (256, 128) else []
        lies_ready = weight.kind in ("folded", "e8m0", "levels", "halves")
        readies = [replace(stay, ready=True, ahead=3)] if lies_ready else []
        for other in (*others, *readies, *map(joined, (launch, stay, *readies))):
            assert torch.equal(multiply(x, weight, bias=bias, launch=other, gpu=few), want), (lines, k, rows, other)


@pytest.mark.parametrize(("lines", "k"), [(448, 2048), (192, 712)])
def test_blocks_of_half_a_tile_have_the_bits_of_whole_ones(lines, k):
    """Of NVFP4 under `bits`, by two warps that wait for no product; with blocks and columns that are full or not."""
    torch.manual_seed(2)
    gpu, weight = gpu_traits(GPU), tile(of_usual_size(coded_weight(lines, k, CODINGS[3], GPU)), torch.bfloat16)
    assert weight.form == "halves"
    for rows in (1, 16, 20, 32):
        x, bias = (torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in ((rows, k), (lines,)))
        want, got = (
            quantized_gemm(x, weight, bias, launch=QuantizedLaunch(*each), gpu=gpu)
            for each in ((64, 1, 2, 4), (32, 1, 4, 2))
        )
        assert torch.equal(got, want), rows


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
