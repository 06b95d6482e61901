"""Products of 4-bit integers that a CPU takes packed: near the decoded weight's, and a row's bits its own."""

import pytest
import torch

from support.operation_cases import coded_weight
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme, decode
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.types.layout import PLAIN
from treetop.weights.cpu_int4 import Int4Linear, takes
from treetop.weights.format import MAIN, KernelContext
from treetop.weights.packed import Packed, QuantizedLinear

CPU = torch.device("cpu")
CODINGS = [
    QuantScheme("int4", 32, minimums=True),
    QuantScheme("int4", 32),
    QuantScheme("int4", 64, zeros=True),
    QuantScheme("int4", 128, zeros=True),
    QuantScheme("int4", 256),
]


def weight_of(scheme: QuantScheme, lines: int = 48, columns: int = 512) -> QuantizedWeight:
    weight = coded_weight(lines, columns, scheme, CPU)
    if not scheme.minimums:
        return weight
    minimum = -8 * weight.scale * torch.rand_like(weight.scale)
    return QuantizedWeight(scheme, columns, weight.codes, weight.scale, minimum=minimum)


@pytest.mark.parametrize("scheme", CODINGS, ids=str)
def test_a_product_is_near_that_of_the_decoded_weight(scheme: QuantScheme) -> None:
    """Off by no more than what two numbers of 8 bits a group, and a sum rounded to 8 bits, can change; with bias."""
    torch.manual_seed(3)
    weight, bias = weight_of(scheme), torch.randn(48).bfloat16()
    linear = Int4Linear(weight, bias)
    for shape in ((512,), (1, 512), (3, 7, 512)):
        x = torch.randn(shape).bfloat16()
        whole = decode(weight).double()
        want = x.double() @ whole.T + bias.double()
        scale = weight.scale.double().repeat_interleave(scheme.group or 512, 1)
        codes = 16 * scale  # a code, and the number of code 8, are at most so large
        bound = 2**-8 * (x.double().abs() @ (2 * codes).T) + 2**-7 * want.abs() + 2**-7 * bias.abs()
        assert bool(((linear(x).double() - want).abs() <= bound).all())
        assert torch.equal(linear.parts(x), linear(x)[None])
    assert linear.numbers == 48 * 512
    assert linear.read_bytes(1) < weight.nbytes + 1 < 48 * 512


@pytest.mark.parametrize("scheme", CODINGS[:3], ids=str)
def test_a_row_has_the_same_bits_in_any_company(scheme: QuantScheme) -> None:
    """Alone, and with 2 to 80 rows at any place among them: plain decoding and a tree take the same product."""
    torch.manual_seed(4)
    linear, x = Int4Linear(weight_of(scheme), None), torch.randn(80, 512).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 80):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[80 - rows :]), alone[80 - rows :])


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (QuantScheme("int4", 16), (48, 512)),
        (QuantScheme("int4", 0), (48, 512)),
        (QuantScheme("int4", 64), (44, 512)),
        (QuantScheme("int4", 128), (48, 192)),
        (QuantScheme("e4m3", 32), (48, 512)),
        (QuantScheme("int4", 32), (2, 48, 512)),
    ],
    ids=str,
)
def test_what_the_operation_has_not_is_not_taken(scheme: QuantScheme, shape: tuple[int, ...]) -> None:
    """Other groups, lines that are no multiple of 16, other numbers, experts."""
    assert not takes(scheme, shape)


@pytest.mark.parametrize(
    ("dtype", "exactness", "kind"),
    [
        (torch.bfloat16, "ties", Int4Linear),
        (torch.float32, "ties", QuantizedLinear),
        (torch.float32, "bits", QuantizedLinear),
        (torch.bfloat16, "bits", QuantizedLinear),
    ],
    ids=str,
)
def test_bits_that_may_not_change_are_decoded(dtype: torch.dtype, exactness: str, kind: type) -> None:
    """Only bfloat16, which rounds inputs anyway, takes codes; `--exactness bits` never."""
    weight = weight_of(CODINGS[0])
    assert weight.minimum is not None
    parts = {MAIN: weight.codes, "scale": weight.scale, "minimum": weight.minimum}
    kernel_context = KernelContext(Ops(OpContext(CPU, dtype, (PLAIN,), profile_of(exactness, CPU))))
    linear = Packed("Q4_1", CODINGS[0]).linear(parts, None, kernel_context)
    assert type(linear) is kind
