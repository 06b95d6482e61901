"""`--quantize-activations` on an NVIDIA GPU with FP8 tensor cores: kernels against references, and engines.

python -m pytest tests/gpu/test_gpu_fp8_activations.py -q
"""

from functools import partial

import pytest
import torch

from support.engines import build, greedy, tokens
from support.operation_cases import coded_weight
from support.quantized import by_library, fp8_blocks, quantized
from support.tiny_models import Pair, save_random_experts, save_random_head, save_random_llama
from treetop import SamplingParams
from treetop.exact.probe import same_bits
from treetop.kernels.fused import add_rms_norm
from treetop.kernels.gemm.fp8_rows import (
    Activations,
    QuantizedRows,
    by_group,
    choose_fp8,
    fp8_rows,
    fp8_rows_reference,
    quantize_rows,
    quantize_rows_reference,
)
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.quantizing_norm import add_rms_norm_codes
from treetop.kernels.gemm.scaled_mm import ROWS_OF_GROUPS, scaled_rows, why_not
from treetop.kernels.kv import FP8, FP8_CAPABILITY
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY,
    reason="no CUDA device with FP8 tensor cores",
)

GPU = torch.device("cuda")
WAYS = [Activations(), Activations(128), Activations(128, powers=True), Activations(fixed=True)]
SHAPES = [(6144, 4096, None), (28672, 4096, "silu"), (4096, 14336, None), (1000, 1200, None)]
ROWS = [1, 2, 7, 16, 17, 40, 64, 65, 100, 128, 129, 300, 1024, 2000, 8192]
INPUTS = {"num_bits": 8, "type": "float"}
CHANNELS = {**INPUTS, "strategy": "channel"}
OF_CHANNELS = partial(by_library, "float-quantized", torch.bfloat16, **CHANNELS)
FORMATS = {
    "token": partial(OF_CHANNELS, inputs={**INPUTS, "strategy": "token", "dynamic": True}),
    "fixed": partial(OF_CHANNELS, inputs={**INPUTS, "strategy": "tensor", "dynamic": False}),
    "groups": partial(fp8_blocks, 64, 64),
}
"""Made by the test that asks for one: some need `compressed-tensors`."""


@pytest.mark.parametrize("how", WAYS[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(1, 4096, 4), (33, 4096, 1), (16, 5120, 0), (7, 1536, 2)])
def test_a_norm_that_writes_codes_has_the_bits_of_two_launches(rows, hidden, parts, dtype, how):
    """One row in some is zeros, and in some huge."""
    torch.manual_seed(rows)
    gpu, x = gpu_traits(GPU), torch.randn(rows, hidden, device=GPU).to(dtype)
    x[rows // 2] *= 1e4
    x[rows - 1, : hidden // 2] = 0
    delta = torch.randn(parts, rows, hidden, device=GPU) if parts else None
    delta = delta.to(dtype) if parts == 1 else delta
    weight = (torch.rand(hidden, device=GPU) + 0.5).to(dtype)
    total, normed = add_rms_norm(x, delta, weight, 1e-5, gpu)
    want = quantize_rows(normed, how, gpu=gpu)
    got = add_rms_norm_codes(x, delta, weight, 1e-5, how, gpu)
    assert same_bits(got[0], total)
    assert same_bits(got[1], normed)
    assert torch.equal(got[2].codes, want.codes)
    assert same_bits(got[2].scale, want.scale)


def fixed_of(how):
    return torch.tensor([2.0**-5], device=GPU) if how.fixed else None


def made(lines, k, group) -> QuantizedWeight:
    """Numbers as weights have them: most in the middle of e4m3's range, scales of a few percent."""
    torch.manual_seed(lines + k)
    weight = coded_weight(lines, k, QuantScheme("e4m3", group), GPU)
    codes = (torch.randn(lines, k, device=GPU) * 100).clamp(-448, 448).to(FP8).view(torch.uint8)
    return by_group(QuantizedWeight(weight.scheme, k, codes, weight.scale + 1e-3))


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("k", [1200, 4096, 14336, 28672])
def test_codes_and_scales_are_those_of_the_reference(how, k):
    """Bit for bit: zeros, huge and tiny numbers, NaN and infinity among them."""
    torch.manual_seed(k)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(300, k, device=GPU) * torch.exp2(torch.randint(-12, 13, (300, 1), device=GPU).float())
        x[1], x[2, 5], x[3, 7], x[4] = 0, torch.nan, torch.inf, 6e4
        x[5, ::9], x[6] = 0, 1e-7
        x = x.to(dtype)
        got, want = (
            quantize_rows(x, how, fixed_of(how), gpu=gpu_traits(GPU)),
            quantize_rows_reference(x, how, fixed_of(how)),
        )
        torch.testing.assert_close(got.scale, want.scale, rtol=0, atol=0, equal_nan=True)
        codes, others = (each.codes.view(FP8).float() for each in (got, want))
        torch.testing.assert_close(codes, others, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("lines", "k", "kind"), SHAPES)
@pytest.mark.parametrize("group", [0, 128])
def test_products_equal_the_reference(group, lines, k, kind, rows):
    """At each number of rows by the launch that is chosen, k cut or not; of many rows the first and the last."""
    weight, how = made(lines, k, group), Activations(group)
    gpu = gpu_traits(GPU)
    x = torch.randn(rows, k, device=GPU, dtype=torch.bfloat16)
    quantized_rows = quantize_rows(x, how, gpu=gpu)
    some = torch.tensor(sorted({*range(min(rows, 40)), *range(max(0, rows - 40), rows)}), device=GPU)
    few = type(quantized_rows)(quantized_rows.codes[some], quantized_rows.scale[some])
    want = fp8_rows_reference(few, weight, kind=kind)[0]
    for whole in (False, True):
        launch = choose_fp8((lines, k), group, kind is not None, rows, gpu, whole)
        got = fp8_rows(quantized_rows, weight, None, kind, dtype=torch.bfloat16, launch=launch, gpu=gpu)
        error = float((got.float().sum(0)[some] - want).norm() / want.norm())
        assert error < 4e-3, f"relative error {error:.1e}"


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the library serves Hopper"
)
@pytest.mark.parametrize("rows", [1, 7, 128, 300, 1027, 8192])
@pytest.mark.parametrize(("lines", "k"), [(6144, 4096), (4096, 14336), (1008, 384), (4096, 640), (256, 896)])
@pytest.mark.parametrize("group", [0, 128])
def test_the_librarys_products_equal_the_reference(group, lines, k, rows):
    """k in 3, 5 and 7 groups, rows in no fours; no further from the reference than our kernel is."""
    weight, how, gpu = made(lines, k, group), Activations(group), gpu_traits(GPU)
    assert why_not(weight, None, torch.bfloat16, gpu) is None
    x = torch.randn(rows, k, device=GPU, dtype=torch.bfloat16)
    filled = quantize_rows(x, how, multiple=ROWS_OF_GROUPS if group else 1, gpu=gpu)
    some = torch.tensor(sorted({*range(min(rows, 40)), *range(max(0, rows - 40), rows)}), device=GPU)
    want = fp8_rows_reference(QuantizedRows(filled.codes[some], filled.scale[some]), weight)[0]
    got = scaled_rows(filled, weight)[some].float()
    error = float((got - want).norm() / want.norm())
    assert error < 4e-3, f"relative error {error:.1e}"


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize(("lines", "k", "kind"), SHAPES)
def test_a_row_has_its_bits_at_any_number_of_rows(lines, k, kind, how):
    """Where k is not cut, as `--exactness bits` has it: rows among others, in other places."""
    weight, gpu = made(lines, k, how.group), gpu_traits(GPU)
    generator = torch.Generator(GPU).manual_seed(k)
    size = torch.exp2(torch.randint(-6, 7, (8192, 1), generator=generator, device=GPU).float())
    x = (torch.randn(8192, k, generator=generator, device=GPU) * size).to(torch.bfloat16)

    def product(rows):
        launch = choose_fp8((lines, k), how.group, kind is not None, len(rows), gpu, whole=True)
        found = quantize_rows(rows, how, fixed_of(how), gpu=gpu)
        return fp8_rows(found, weight, None, kind, dtype=torch.bfloat16, launch=launch, gpu=gpu)[0]

    want, differ = product(x), []
    for rows in ROWS:
        at = torch.randperm(8192, generator=generator, device=GPU)[:rows]
        if not same_bits(product(x[at].contiguous()), want[at]):
            differ.append(rows)
    assert not differ


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("activations")
    dense = save_random_llama(folder / "dense", seed=8, vocab_size=12, intermediate_size=128)
    sizes = {"vocab_size": 12, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
    experts = save_random_experts(folder / "experts", "qwen3_moe", seed=3, **sizes)
    return {
        "dense": Pair(dense, save_random_head(folder / "dense-head", dense, draft_vocab=11, seed=2)),
        "experts": Pair(experts, save_random_head(folder / "experts-head", experts, 12, seed=2)),
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_captured_rounds_with_a_tree_equal_eager_ones(kind, name, pairs, tmp_path):
    """bfloat16: the same kernels on the same numbers, so the same tokens; other logits than without the option."""
    folder, _ = quantized(pairs[kind].target, tmp_path / "target", FORMATS[name]())
    pair, found = Pair(folder, pairs[kind].head), []
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    for graphs, on in (("auto", True), ("off", True), ("off", False)):
        llm = build(
            pair, (4, 3, 12), dtype="bfloat16", device="cuda", graphs=graphs, overlap=False, quantize_activations=on
        )
        found.append(llm.generate(pair.prompts([5, 41, 17], seed=2), params))
        llm.close()
    assert tokens(found[0]) == tokens(found[1])
    logprobs = [[[at.logprob for at in each.logprobs] for each in outputs] for outputs in found]
    assert logprobs[0] != logprobs[2]


@pytest.mark.parametrize("name", FORMATS)
def test_trees_give_the_bits_of_plain_decoding(name, pairs, tmp_path):
    """bfloat16 with `--exactness bits`: tokens and log-probabilities, captured, in batches and chunks."""
    folder, _ = quantized(pairs["dense"].target, tmp_path / "target", FORMATS[name]())
    pair, found = Pair(folder, pairs["dense"].head), []
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    options = {"dtype": "bfloat16", "device": "cuda", "exactness": "bits", "quantize_activations": True}
    for shape, chunk, rows in ((None, 512, 1), ((4, 3, 12), 16, 8)):
        llm = build(pair, shape, **options, chunked_prefill_size=chunk, max_running_requests=rows)
        found.append(llm.generate(pair.prompts([5, 41, 17], seed=2), params))
        llm.close()
    assert tokens(found[0]) == tokens(found[1])
    assert [each.logprobs for each in found[0]] == [each.logprobs for each in found[1]]


def test_an_answer_is_the_same_alone_and_in_a_batch(pairs, tmp_path):
    """Greedy tokens, plain rounds."""
    folder, _ = quantized(pairs["dense"].target, tmp_path / "target", FORMATS["token"]())
    llm = build(
        Pair(folder, pairs["dense"].head), None, dtype="bfloat16", device="cuda", exactness="bits",
        quantize_activations=True,
    )  # fmt: skip
    prompts = pairs["dense"].prompts([5, 41, 17], seed=2)
    alone = [llm.generate([each], greedy(16))[0].token_ids for each in prompts]
    assert alone == tokens(llm.generate(prompts, greedy(16)))
    llm.close()
