"""Products whose k is not cut, on a GPU with `--exactness bits`: what is launched by rows, and what a probe finds.

No GPU is here: launches are noted and not run, and products that are probed are made up. They run on a GPU in
`tests/gpu/test_gpu_exact_rows.py`.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from support.launches import noted_launches
from treetop.engine.startup.probed_products import probed_products
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.skinny_gemm import choose_launch, choose_no_split_k, shared_bytes
from treetop.kernels.gemm.tiles import in_turn, tile
from treetop.kernels.moe.experts import Activation
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.errors import ConfigError
from treetop.weights import gpu_products, linear, packed
from treetop.weights.format import MAIN, KernelContext, ProductWeight
from treetop.weights.gpu_products import COUNTS, MOST_ROWS, NoSplitKProduct, Probed, probe
from treetop.weights.packed import Packed, TiledGated, TiledLinear
from treetop.weights.plain import UNQUANTIZED

H200 = GpuTraits(132, True, 227 << 10)
SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "lm_head": (128256, 4096, False),
    "not measured": (1000, 1200, False),
    "tiny": (96, 48, True),
}
GPUS = [H200, GpuTraits(84, False, 99 << 10), GpuTraits(108, False, 163 << 10)]
ROWS = [*range(1, 700), 1024, 4096, 8192, 8193]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.num_sms} multiprocessors")
@pytest.mark.parametrize("name", SHAPES)
def test_no_launch_cuts_k_at_any_number_of_rows(name, gpu):
    """And each fits the GPU: tiles only where it has them, and sums of gates and ups beside operands in registers."""
    n, k, gated = SHAPES[name]
    for rows in ROWS:
        launch = choose_no_split_k(rows, n, k, gated, gpu)
        assert launch.splits == 1
        assert k % launch.block_k == 0
        assert shared_bytes(launch, rows, gated) <= gpu.shared_bytes
        assert gpu.can_overlap or not launch.tiled
        assert rows <= 256 or launch.block_rows
        if rows > 64 and gated and not gpu.by_warp_groups:
            assert 2 * launch.block_n * launch.block_rows <= 64 * 32 * launch.num_warps


def test_the_table_of_few_rows_cuts_k():
    """So there is something to be seen: elsewhere a launch of few rows has splits, by the number of rows."""
    assert len({choose_launch(rows, 4096, 14336, False, H200).splits for rows in (16, 192)}) > 1


def test_a_width_that_no_block_divides_has_no_launch():
    assert choose_no_split_k(1, 64, 40, False, H200) is None


# ---------------------------------------------------------------------------------------------------------- launches


def kernel_context(dtype=torch.bfloat16, **options):
    """What an exact engine on a GPU would hold products with."""
    ops = Ops(OpContext(torch.device("cpu"), dtype))
    object.__setattr__(
        ops, "context", OpContext(torch.device("cuda"), dtype, profile=profile_of("bits", torch.device("cuda")))
    )
    ops.gpu_for = lambda op: H200 if op.applies(ops.context) else None
    return KernelContext(ops, **options)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Kernels serve: none is run."""
    monkeypatch.setattr("treetop.kernels.table.why_not", lambda device: None)


def products_at(product, width, rows, patch):
    """Launches of a product at each number of rows, by it."""
    found = {}
    for count in rows:
        with noted_launches(patch) as noted:
            product(torch.zeros(count, width, dtype=torch.bfloat16))
        found[count] = noted
    return found


def uncut(launch):
    """Of a product's launch: it has all of k."""
    return launch.grid[1] == 1 and launch.arguments["share"] == launch.arguments["k"]


def libraries(monkeypatch):
    """Row counts of the library's calls."""
    seen = []

    def library(x, weight):
        seen.append(len(x))
        return torch.zeros(len(x), len(weight), dtype=x.dtype)

    monkeypatch.setattr(gpu_products, "library", library)
    return seen


ROWS_OF_LAUNCHES = [*range(1, 34), 48, 63, 64, 65, 100, 128, 129, 192, 200, 256, 257, 300, 384, 500, 1000]


@pytest.mark.parametrize("shape", [(512, 256), (4096, 14336)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [None, "silu"])
def test_a_plain_weights_products_are_whole_and_rounded_before_a_bias_or_a_gate(
    monkeypatch, on_a_gpu, shape, biased, kind
):
    """At every number of rows by our kernel, where the library serves nowhere."""
    libraries(monkeypatch)
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    bias = torch.zeros(shape[0], dtype=torch.bfloat16) if biased else None
    made = UNQUANTIZED.linear({"": weight}, bias, kernel_context())
    if kind is not None:
        made = UNQUANTIZED.gated({"": weight}, bias, kind, kernel_context())
    for rows, noted in products_at(made, shape[1], ROWS_OF_LAUNCHES, monkeypatch).items():
        first, *after = noted
        assert first.kernel == "_skinny_gemm_kernel"
        assert uncut(first), (rows, first)
        assert first.arguments["rounds"]
        assert first.arguments["has_bias"] == biased
        assert [each.kernel for each in after] == (["_gate_mul_kernel"] if biased and kind else [])


def test_rows_of_a_count_of_the_librarys_go_to_it_as_they_are_and_fewer_among_others(monkeypatch):
    """Nothing is copied where nothing has to be; what stands behind fewer rows is no part of what they give."""
    seen, weight = [], torch.randn(32, 64).bfloat16()
    monkeypatch.setattr(gpu_products, "library", lambda x, w: seen.append((x.shape, x.data_ptr())) or F.linear(x, w))
    product = NoSplitKProduct(weight, None, None, H200, Probed((32, 64), (72,)))
    x = torch.randn(72, 64).bfloat16()
    want = F.linear(x, weight)
    assert torch.equal(product(x.view(2, 36, 64)), want.view(2, 36, 32))
    assert torch.equal(product(x[:70]), want[:70])
    assert torch.equal(product(x.view(2, 36, 64)[:, :35]), want.view(2, 36, 32)[:, :35])
    assert seen[0] == ((2, 36, 64), x.data_ptr())
    assert [shape for shape, _ in seen[1:]] == [(72, 64)] * 2


def test_a_launch_that_cuts_k_by_the_number_of_rows_is_seen(monkeypatch, on_a_gpu):
    """The check above sees what it is for: with the launches of `ties` it fails."""
    libraries(monkeypatch)
    monkeypatch.setattr(gpu_products, "choose_no_split_k", linear.choose_launch)
    product = NoSplitKProduct(torch.zeros(4096, 14336).bfloat16(), None, None, H200, Probed((4096, 14336), ()))
    monkeypatch.setattr(gpu_products, "skinny_gemm", partial(_called_without_rounding, linear.skinny_gemm))
    found = products_at(product, 14336, [1, 16, 64, 150], monkeypatch)
    assert not any(uncut(noted[0]) for noted in found.values())
    assert len({noted[0].grid[1] for noted in found.values()}) > 1


def _called_without_rounding(product, *args, rounds):
    return product(*args)


@pytest.mark.parametrize("scheme", [QuantScheme("e4m3", 128), QuantScheme("int4", 128, zeros=True)], ids=str)
def test_a_packed_weights_products_are_whole_and_one_kernels(monkeypatch, on_a_gpu, scheme):
    """Whatever the number of rows: the library would round gates and sums of halves otherwise."""
    n, k = 512, 1024
    groups = torch.zeros((n, scheme.groups_of(k)))
    zero = groups.byte() if scheme.zeros else None
    weight = QuantizedWeight(scheme, k, torch.zeros((n, scheme.bytes_of(k)), dtype=torch.uint8), groups, zero=zero)
    monkeypatch.setattr(packed, "decode_tiles", None)  # what the library would take
    small = tile(weight), tile(in_turn(weight.halves()))
    for made in (TiledLinear(small[0], None, H200, whole=True), TiledGated(small[1], None, "silu", H200, whole=True)):
        for rows, noted in products_at(made, k, ROWS_OF_LAUNCHES, monkeypatch).items():
            assert [each.kernel for each in noted] == ["_quantized_kernel"], rows
            assert noted[0].grid[2] == 1
            assert noted[0].arguments["share"] == k // 128


@pytest.mark.parametrize("exactness", ["bits", "ties"])
def test_where_bits_are_those_of_decoded_weights_a_factor_stays_in_them(on_a_gpu, exactness):
    """In halves; else it goes to the sums of all products: few rows, many, gates and experts."""
    ops = kernel_context()
    gpu, kinds = torch.device("cuda"), ("float32", "halves") if exactness == "bits" else ("e4m3", "levels")
    object.__setattr__(ops.ops, "context", OpContext(gpu, torch.bfloat16, profile=profile_of(exactness, gpu)))
    parts = {MAIN: torch.zeros((128, 128), dtype=torch.uint8), packed.SCALE: torch.zeros((128, 16), dtype=torch.uint8)}
    parts[packed.FACTOR] = torch.rand(128, 1)
    parts[packed.SCALE][0, 0] = 0x38
    held = Packed("NVFP4", QuantScheme("e2m1", 16, "times"))
    made = held.linear(parts, None, ops), held.gated(parts, None, "silu", ops)
    assert {(one.weight.scheme.scales, one.weight.form) for one in made} == {kinds}
    first, second = ({n: part.unflatten(0, sizes) for n, part in parts.items()} for sizes in ((2, 2, 32), (2, 64)))
    experts = held.experts(first, second, (None, None), Activation.SILU, ops).experts
    assert {(each.scheme.scales, each.form) for each in (experts.gate_up, experts.down)} == {kinds}


def test_the_library_serves_at_counts_that_were_probed_alone(monkeypatch, on_a_gpu):
    """Padded up to the next, if that is near; cut above the most; few rows and all others are our kernel's."""
    seen = libraries(monkeypatch)
    probed = Probed((512, 256), (128, 192, 1024, 8192))
    weight = torch.zeros((512, 256), dtype=torch.bfloat16)
    made = UNQUANTIZED.linear({"": weight}, None, kernel_context(probed={(512, 256): probed}))
    asked = [1, 64, 65, 100, 128, 129, 193, 600, 700, 1024, 1025, 8000, 8193, 20000]
    found = products_at(made, 256, asked, monkeypatch)
    ours = {rows: [each.arguments["rows"] for each in noted] for rows, noted in found.items() if noted}
    assert ours == {each: [each] for each in (1, 64, 65, 193, 600, 1025)} | {8193: [1], 20000: [3616]}
    assert seen == [128, 128, 192, 1024, 1024, 8192, 8192, 8192, 8192]


def test_counts_are_an_eighth_apart():
    """So that padding costs little, and a start probes few."""
    assert COUNTS[-1] == MOST_ROWS
    assert len(COUNTS) < 64
    assert all(after <= before * 1.14 for before, after in pairwise(COUNTS))


# ------------------------------------------------------------------------------------------------------------- probes


class MadeUp:
    """Products on a CPU, of rows that the library cuts and of rows that our kernel cuts, which would be a fault."""

    def __init__(self, library_cuts=(), kernel_cuts=()):
        self.library_cuts, self.kernel_cuts = library_cuts, kernel_cuts

    def product(self, x, weight, cut):
        shares = 2 if cut else 1
        pairs = zip(x.double().chunk(shares, 1), weight.double().chunk(shares, 1), strict=True)
        return torch.stack([(a @ b.T).half() for a, b in pairs]).sum(0)

    def library(self, x, weight):
        return self.product(x, weight, len(x) in self.library_cuts)

    def kernel(self, x, weight, launch, gpu, bias=None, rounds=False):
        assert launch.splits == 1
        assert rounds
        return self.product(x, weight, len(x) in self.kernel_cuts)[None]

    def gated(self, x, weight, launch, gpu, kind, rounds):
        gate, up = self.product(x, weight, False).chunk(2, 1)
        return gate * up

    def gate_mul(self, gate_up, kind, gpu):
        gate, up = gate_up.chunk(2, 1)
        return gate * up * (1 if kind == "silu" or self.gelu_agrees else 1.01)

    gelu_agrees = True

    def probe(self, monkeypatch, shape=(32, 64), gated=True):
        names = {"library": self.library, "skinny_gemm": self.kernel, "gated_rows": self.gated}
        for name, function in {**names, "gate_mul": self.gate_mul}.items():
            monkeypatch.setattr(gpu_products, name, function)
        return probe(shape, gated, torch.float16, torch.device("cpu"), 700)


def test_a_probe_leaves_out_the_counts_at_which_the_library_cuts_k(monkeypatch):
    found, problem = MadeUp(library_cuts=(72, 256, 640)).probe(monkeypatch)
    assert problem is None
    assert found.counts == tuple(count for count in COUNTS if count <= 700 and count not in (72, 256, 640))
    assert "the library at" in found.served()


@pytest.mark.parametrize("rows", [1, 33, 257])
def test_a_kernel_of_ours_that_cuts_k_somewhere_is_found(monkeypatch, rows):
    _, problem = MadeUp(kernel_cuts=(rows,)).probe(monkeypatch)
    assert problem == f"products [32, 64] of {rows} rows"


def test_a_gate_that_differs_in_one_launch_and_behind_a_product_is_found(monkeypatch):
    made = MadeUp()
    made.gelu_agrees = False
    assert made.probe(monkeypatch)[1] == "gated products [32, 64], gelu_tanh, of 1 rows"
    assert made.probe(monkeypatch, gated=False)[1] is None


@pytest.mark.slow
def test_a_start_refuses_by_name_and_remembers_what_it_found(monkeypatch, tmp_path):
    """Found is kept for the next start; what is refused is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = "treetop.engine.startup.probed_products"
    calls, answers = [], {(64, 64): None, (32, 64): "products [32, 64] of 7 rows"}

    def probing(shape, gated, dtype, device):
        calls.append((shape, gated))
        return Probed(shape, (128, 192)), answers[shape]

    monkeypatch.setattr(f"{module}.probe", probing)
    monkeypatch.setattr(f"{module}.forbid_split_k", lambda: None)  # a PyTorch without CUDA has none to tell
    monkeypatch.setattr(f"{module}.identity", lambda device, *what: "-".join(map(str, what)).replace(" ", ""))
    device, plain = torch.device("cpu"), ProductWeight(UNQUANTIZED, (64, 64), gated=False, bias=True)
    for _ in range(2):
        found = probed_products([plain, replace(plain, gated=True)], torch.float16, device)
        assert found == {(64, 64): Probed((64, 64), (128, 192))}
        probed_products.__globals__["_probed"].cache_clear()
    assert calls == [((64, 64), True)]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the bits of products \[32, 64\] of 7 rows depend on the batch"):
            probed_products([replace(plain, shape=(32, 64))], torch.float16, device)
    assert len(calls) == 3
    with pytest.raises(ConfigError, match="no multiple of 16"):
        probed_products([replace(plain, shape=(32, 40))], torch.float16, device)
