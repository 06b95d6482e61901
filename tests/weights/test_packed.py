"""Weights that stay packed: products of many blocks, bits that depend on a row alone, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from support.engines import build, tokens
from support.operation_cases import coded_weight
from support.quantized import fp8_blocks, gptq, quantized
from support.refusing import load, refused
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop import SamplingParams
from treetop.checkpoints.params import stay_packed
from treetop.kernels.gemm.quantized_weight import QuantScheme, decode
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.models.registry import target_spec
from treetop.tools.quantize import quantize
from treetop.types.errors import CheckpointError
from treetop.weights import packed
from treetop.weights.packed import GateOver, QuantizedLinear
from treetop.weights.plain import UNQUANTIZED

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, and how many numbers were decoded together."""
    sizes, real = [], packed.decode
    monkeypatch.setattr(packed, "_BLOCK", 5 * 96)
    monkeypatch.setattr(packed, "decode", lambda weight: sizes.append(weight.shape.numel()) or real(weight))
    return sizes


@pytest.mark.parametrize(
    "scheme", [QuantScheme("e4m3", 32), QuantScheme("int4", 32, zeros=True), QuantScheme("e2m1", 16, "over")], ids=str
)
def test_a_product_of_blocks_is_that_of_the_decoded_weight(scheme, small_blocks):
    """A block of rows at a time, the last one smaller; with bias, for any shape of x."""
    torch.manual_seed(2)
    weight, bias = coded_weight(44, 96, scheme, CPU), torch.randn(44).double()
    whole = decode(weight).double()
    ops = Ops(OpContext(CPU, torch.float64))
    linear = QuantizedLinear(weight, bias, ops)
    gated = GateOver(linear, 44, "silu", ops)
    for shape in ((96,), (1, 96), (3, 4, 96)):
        x = torch.randn(shape).double()
        want = F.linear(x, whole, bias)
        torch.testing.assert_close(linear(x), want, rtol=1e-13, atol=1e-13)
        assert torch.equal(linear.parts(x), linear(x)[None])
        gate, up = want.chunk(2, -1)
        torch.testing.assert_close(gated(x), F.silu(gate) * up, rtol=1e-12, atol=1e-13)
    assert set(small_blocks) == {5 * 96, 4 * 96}
    assert linear.numbers == 44 * 96
    assert linear.read_bytes(1) == weight.nbytes < 4 * 44 * 96


def test_a_row_has_the_same_bits_in_any_company(small_blocks):
    """In float32 with `--exactness bits`."""
    torch.manual_seed(2)
    linear = QuantizedLinear(
        coded_weight(44, 96, QuantScheme("e4m3", 0), CPU),
        None,
        Ops(OpContext(CPU, torch.float32, profile=profile_of("bits", CPU))),
    )
    x = torch.randn(70, 96)
    whole = linear(x)
    for rows in (1, 2, 3, 17, 64):
        assert torch.equal(linear(x[70 - rows :]).view(torch.int32), whole[70 - rows :].view(torch.int32))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    target = save_random_llama(folder / "target", seed=8, vocab_size=12, intermediate_size=128)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
def test_a_head_stays_packed_by_its_own_format(name, pair, tmp_path):
    """Target and head in one format each, both packed; tokens are those of decoded ones, in bits of float32 too."""
    folder, _ = quantized(pair.target, tmp_path / "target", fp8_blocks(32, 16))
    head = tmp_path / "head"
    quantize(pair.head, pair.target, name, 8, head)
    prompts = pair.prompts([9, 3])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    found = []
    for dequantized in (True, False):
        llm = build(Pair(folder, head), (4, 3, 12), dequantize_weights=dequantized)
        packed_ones = [each for each in llm.engine.runner.drafter.products.layers if isinstance(each, QuantizedLinear)]
        assert bool(packed_ones) is not dequantized
        found.append(tokens(llm.generate(prompts, params)))
    options = {"dtype": "float32", "exactness": "bits", "dequantize_weights": False}
    tree, plain = (
        build(Pair(folder, head), shape, **options).generate(prompts, params) for shape in ((4, 3, 12), None)
    )
    assert found[0] == found[1]
    assert tokens(tree) == tokens(plain)
    assert [each.logprobs for each in tree] == [each.logprobs for each in plain]


def test_what_cannot_stay_packed_is_named(pair, tmp_path):
    """Groups out of order where the configuration says they are in order; numbers too large for float16."""
    up = "model.layers.2.mlp.up_proj"
    folder, _ = quantized(pair.target, tmp_path / "gptq", gptq(32))
    order = torch.arange(64, dtype=torch.int32) % 2
    wrong = copy_folder(folder, tmp_path / "wrong", tensors={f"{up}.g_idx": order})
    load(wrong)().close()
    refused(CheckpointError, load(wrong, dequantize_weights=False), f"{up}.g_idx", "--dequantize-weights")
    folder, _ = quantized(pair.target, tmp_path / "fp8", fp8_blocks(32, 16))
    wrong = copy_folder(folder, tmp_path / "large", tensors={f"{up}.weight_scale_inv": torch.full((4, 4), 1e4)})
    refused(CheckpointError, load(wrong, dequantize_weights=False, dtype="float16"), "--dtype bfloat16")


def test_groups_out_of_order_are_decoded_though_others_stay_packed(pair, tmp_path):
    """`desc_act`: its numbers have no coding in memory, and `treetop inspect` says which are decoded."""
    folder, _ = quantized(pair.target, tmp_path / "gptq", gptq(16, act_order=True))
    assert {each.held for each in stay_packed(target_spec(folder).params, "rows")} == {UNQUANTIZED}
