"""Products that decode a weight as they read it: in the interpreter each weight's bits are those of the reference.

As test_operations.py: under pytest this file starts itself again with TRITON_INTERPRET=1, and holds the tests of the
kernel there and on a GPU.
"""

import pytest
import torch

from support.interpreted import INTERPRETED, require_interpreted_pass
from support.operation_cases import DEVICE, coded_weight
from treetop.kernels.coded import (
    CodedLaunch,
    CodedWeight,
    Coding,
    choose_coded,
    coded_gated,
    coded_gated_reference,
    coded_rows,
    coded_rows_reference,
    decode,
)
from treetop.kernels.triton_guard import GpuTraits, gpu_traits

CODINGS = [
    Coding("e4m3", 0),
    Coding("e4m3", 128),
    Coding("e4m3", 48),
    Coding("int4", 0),
    Coding("int4", 32),
    Coding("int4", 128, zeros=True),
    Coding("int4", 7, zeros=True),
    Coding("e2m1", 16, "times"),
    Coding("e2m1", 16, "over"),
    Coding("e2m1", 32, "e8m0"),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def test_every_code_is_its_number():
    """Against tables written from the formats' documents, subnormal numbers and both zeros too."""
    e4m3 = [
        (-1) ** (code >> 7)
        * ((1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7) if code >> 3 & 15 else (code & 7) / 8 * 2.0**-6)
        for code in range(256)
        if code & 0x7F != 0x7F
    ]
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    one = torch.ones(1, 1)
    assert decode(CodedWeight(Coding("e4m3", 0), 254, codes[None], one))[0].tolist() == e4m3
    both = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = CodedWeight(Coding("e2m1", 0), 16, both, one)
    assert decode(weight)[0].tolist() == [*e2m1, *(-each for each in e2m1)]
    assert decode(CodedWeight(Coding("int4", 0), 16, both, one))[0].tolist() == [*range(-8, 8)]
    zero = torch.tensor([[16]], dtype=torch.uint8)
    weight = CodedWeight(Coding("int4", 0, zeros=True), 16, both, one, zero=zero)
    assert decode(weight)[0].tolist() == [*range(-16, 0)]


def test_rows_of_padding_are_zeros_though_a_scale_divides():
    """All their parts are filled with zeros."""
    none = torch.zeros(1, 1, dtype=torch.uint8)
    weight = CodedWeight(Coding("e2m1", 0, "over"), 2, none, none, torch.zeros(1, 1))
    assert decode(weight).tolist() == [[0, 0]]


@pytest.mark.parametrize("shape", [(64, 128), (4096, 4096), (100, 77), (1024, 14336), (28672, 4096)])
def test_launches_cut_whole_blocks(shape):
    """And never more for more rows: a row's bits do not depend on how many there are."""
    for gated in (False, True):
        launch = choose_coded(shape, gated, GpuTraits(132, True, 227 << 10))
        assert launch.splits == 1 or shape[1] % (launch.splits * launch.block_k) == 0
        assert not gated or launch.splits == 1


if not INTERPRETED and DEVICE.type == "cpu":

    def test_the_kernel_passes_in_tritons_interpreter():
        require_interpreted_pass(__file__)


if INTERPRETED or DEVICE.type == "cuda":

    def picking(rows, k):
        """Rows that each have a single 1: products are weights, whatever the order of sums."""
        x = torch.zeros(rows, k, device=DEVICE)
        x[torch.arange(rows), torch.arange(rows) * (k // rows or 1) % k] = 1
        return x

    @pytest.mark.parametrize("coding", CODINGS, ids=str)
    @pytest.mark.parametrize(("n", "k", "splits"), [(64, 256, 2), (37, 77, 1), (70, 130, 1)])
    def test_each_weight_has_the_bits_of_the_reference(coding, n, k, splits):
        """Outputs, columns, groups and bytes that no block divides; float32 and rounded to float16."""
        if coding.numbers != "e4m3":
            k += k % 2
        weight = coded_weight(n, k, coding)
        launch, gpu = CodedLaunch(64, 128, splits, 2, 4), gpu_traits(DEVICE)
        picked = picking(20, k)
        for x in (picked, picked.half()):
            got = coded_rows(x, weight, launch=launch, gpu=gpu).sum(0)
            assert torch.equal(got.float(), coded_rows_reference(x, weight)[0].to(got.dtype).float())
        x, bias = torch.randn(3, k, device=DEVICE), torch.randn(n, device=DEVICE)
        got = coded_rows(x, weight, bias, launch=launch, gpu=gpu).sum(0)
        want = coded_rows_reference(x, weight, bias)[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))

    @pytest.mark.parametrize("rows", [1, 65])
    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
    def test_a_gated_product_is_that_of_the_halves(rows, kind):
        """With rows in more than one block, and a bias."""
        weight = coded_weight(2 * 37, 96, Coding("int4", 32, zeros=True))
        x, bias = torch.randn(rows, 96, device=DEVICE), torch.randn(2 * 37, device=DEVICE)
        launch = CodedLaunch(32, 64, 1, 2, 4)
        got = coded_gated(x, weight, kind, bias, launch=launch, gpu=gpu_traits(DEVICE))
        want = coded_gated_reference(x, weight, kind, bias)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_a_row_has_the_same_bits_in_any_company():
        weight = coded_weight(64, 256, Coding("e4m3", 128))
        x, gpu = torch.randn(70, 256, device=DEVICE), gpu_traits(DEVICE)
        launch = CodedLaunch(64, 128, 2, 2, 4)
        whole = coded_rows(x, weight, launch=launch, gpu=gpu)
        for rows in (1, 2, 17, 65):
            assert torch.equal(coded_rows(x[:rows], weight, launch=launch, gpu=gpu), whole[:, :rows])
