"""`--exactness bits` on a GPU in bfloat16 and float16: products and operations at the widths of real models.

A row has the same bits among any others. `pytest -s` prints where the library serves.

python -m pytest tests/gpu/test_gpu_exact_rows.py -q -s -m "not slow"
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from treetop.checkpoints.params import stay_packed
from treetop.engine.startup.operation_probes import operation_probe
from treetop.exact.probe import adversarial, same_bits
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.ordered_weights import OrderedLaunch, encode, ordered_gemm, why_not_ordered
from treetop.kernels.gemm.skinny_gemm import choose_no_split_k, gated_rows, skinny_gemm
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import gpu_traits
from treetop.models.registry import target_spec
from treetop.weights.gpu_products import COUNTS, MOST_ROWS, NoSplitKProduct, forbid_split_k, probe
from treetop.weights.ordered import offers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"
DTYPES = [torch.bfloat16, torch.float16]
PRODUCTS = {
    "qkv": (6144, 4096, None),
    "output": (4096, 4096, None),
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, None),
    "lm_head": (128256, 4096, None),
    "gpt-oss qkv": (5120, 2880, None),
    "gpt-oss output": (2880, 4096, None),
    "qwen3-moe output": (2048, 4096, None),
    "odd": (1000, 1200, None),
    "small": (96, 48, "gelu_tanh"),
}
"""Of Llama-3.1-8B, GPT-OSS-20B and Qwen3-30B-A3B, and of none: (n, k, kind of the gate)."""
ROWS = [*range(1, 81), 96, 128, 129, 191, 192, 193, 256, 257, 500, 513, 777, 1024, 1500, 2000, 3000, 4096, 5000, 8192]
ROWS += [9000, 16384]
SOON = {torch.bfloat16: ("qkv", "gate_up", "down", "lm_head", "odd", "small"), torch.float16: ("output", "gate_up")}
"""What is not slow, by dtype."""


def soon(names, dtypes):
    """All pairs; those not in `names` are slow."""
    return [
        pytest.param(name, dtype, marks=() if name in names.get(dtype, ()) else pytest.mark.slow, id=f"{name}-{dtype}")
        for name, dtype in dtypes
    ]


@pytest.mark.parametrize(("name", "dtype"), soon(SOON, product(PRODUCTS, DTYPES)))
def test_a_row_of_a_product_has_its_bits_at_any_number_of_rows(name, dtype, capsys):
    """By our kernel and by the library as a probe found it, with a bias and with a gate, among 1 to 16,384 rows."""
    n, k, kind = PRODUCTS[name]
    forbid_split_k()
    found, problem = probe((n, k), kind is not None, dtype, GPU)
    with capsys.disabled():
        print(f"\n  {name}, {dtype}: {found.served()}", end="")
    assert problem is None
    generator = torch.Generator(GPU).manual_seed(1)
    most = min(2 * MOST_ROWS, 2**29 // n)
    x = adversarial((most, k), generator).to(dtype)
    weight = (torch.randn((n, k), generator=generator, device=GPU) * k**-0.5).to(dtype)
    bias = torch.randn(n, generator=generator, device=GPU).to(dtype)
    kinds: list[tuple[torch.Tensor | None, Gate | None]] = [(None, None), (bias, None), (None, kind), (bias, kind)]
    gpu = gpu_traits(GPU)
    assert found.ordered == (dtype == torch.bfloat16 and bool(offers(n, k, kind is not None, gpu)))
    for added, gate in kinds if kind else kinds[:2]:
        whole = NoSplitKProduct(weight, added, gate, gpu, found, copies=True)
        want = whole(x)
        differ = []
        for rows in (rows for rows in ROWS if rows <= most):
            at = torch.randperm(most, generator=generator, device=GPU)[:rows]
            if not same_bits(whole(x[at]), want[at]):
                differ.append(rows)
        assert not differ, (added is not None, gate)
        normal = torch.randn((64, k), generator=generator, device=GPU).to(dtype)  # a gate of the others is infinite
        right = reference(normal, weight, added, gate)
        assert float((whole(normal).float() - right).norm()) <= 2e-2 * float(right.norm())


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(
    ("kind", "launch"),
    [
        *product([None, "silu"], [(1, 2, 1), (2, 3, 1), (2, 6, 2), (4, 2, 4), (8, 3, 4)]),
        *[("gelu_tanh", (4, 3, 4)), (None, (2, 2, 4, True)), (None, (2, 6, 4, True))],
    ],
)
def test_weights_in_13_bits_have_the_bits_of_16(rows, launch, kind):
    """By all kinds of launches, with fewer blocks of columns than slots and more, with a bias, of lines of any size, of
    zeros of both signs, and where chunks with outliers lie in 16 bits; each call but the first overlaps another."""
    gpu = gpu_traits(GPU)
    if (problem := why_not_ordered(torch.bfloat16, gpu)) is not None:
        pytest.skip(problem)
    generator = torch.Generator(GPU).manual_seed(rows)
    for n, k in ((256, 256), (640, 2560)):
        weight = torch.randn((n, k), generator=generator, device=GPU) * k**-0.5
        weight *= torch.exp2(torch.randint(-40, 20, (n, 1), generator=generator, device=GPU).float())
        weight[:, 7], weight[3], weight[5, ::2] = 0, 0, -0.0
        weight[n - 40, k - 1] = 1e-38
        weight = weight.bfloat16()
        made = encode(weight, kind is not None)
        assert made is not None
        assert int((made.whole_at >= 0).sum()) == 1
        x = adversarial((rows, k), generator).bfloat16()
        bias = None if kind else torch.randn(n, generator=generator, device=GPU).bfloat16()
        whole = choose_no_split_k(rows, n, k, kind is not None, gpu)
        if kind is None:
            want = skinny_gemm(x, weight, whole, gpu, bias, rounds=True)[0]
        else:
            want = gated_rows(x, weight, whole, gpu, kind, rounds=True)
        for _ in range(3):
            got = ordered_gemm(x, made, OrderedLaunch(*launch), gpu, bias, kind or "silu")
        assert same_bits(got, want), (n, k)


def test_the_library_is_told_not_to_cut_k():
    """Else it does at few rows of a long k, and our slower kernel serves there."""
    if torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("known of Hopper alone")
    forbid_split_k()
    n, k, _ = PRODUCTS["down"]
    found, problem = probe((n, k), False, torch.bfloat16, GPU, most=512)
    assert problem is None
    assert found.counts == tuple(rows for rows in COUNTS if rows <= 512)


def reference(x, weight, bias, kind):
    """In float32, with each rounding."""
    out = (x.double() @ weight.double().T).to(x.dtype)
    out = (out if bias is None else out + bias).float()
    if kind is None:
        return out
    gate, up = out.chunk(2, dim=1)
    return (
        torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    ) * up


MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5-air", "gemma-4-26b-a4b"]
MODELS_SOON = {torch.bfloat16: ("qwen3-30b-a3b", "gpt-oss-20b", "gemma-4-26b-a4b"), torch.float16: ("llama-3.1-8b",)}


@pytest.mark.parametrize(("preset", "dtype"), soon(MODELS_SOON, product(MODELS, DTYPES)))
def test_a_row_of_any_other_operation_has_its_bits_at_any_number_of_rows(preset, dtype):
    """Norms, rotation, gates, routing, products with experts, log-probabilities and draws, at a model's own widths."""
    target = target_spec(PRESETS / preset)
    ops = Ops(OpContext(GPU, dtype, profile=profile_of("bits", GPU)))
    assert operation_probe(ops, target.config, stay_packed(target.params, "tiles")).problem() is None


def test_what_a_program_does_by_the_number_of_rows_is_seen():
    """The probe sees what it is for: routing and experts as they are without `bits`."""
    target = target_spec(PRESETS / "qwen3-30b-a3b")
    problem = operation_probe(Ops(OpContext(GPU, torch.bfloat16)), target.config, ()).problem()
    assert problem is not None
    assert problem.startswith(("routing", "products with experts"))
