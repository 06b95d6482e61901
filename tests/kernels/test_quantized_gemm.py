"""Codes and scales by rows: every code is the number that the formats' documents say."""

import torch

from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme, decode


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
    assert decode(QuantizedWeight(QuantScheme("e4m3", 0), 254, codes[None], one))[0].tolist() == e4m3
    both = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = QuantizedWeight(QuantScheme("e2m1", 0), 16, both, one)
    assert decode(weight)[0].tolist() == [*e2m1, *(-each for each in e2m1)]
    assert decode(QuantizedWeight(QuantScheme("int4", 0), 16, both, one))[0].tolist() == [*range(-8, 8)]
    zero = torch.tensor([[16]], dtype=torch.uint8)
    weight = QuantizedWeight(QuantScheme("int4", 0, zeros=True), 16, both, one, zero=zero)
    assert decode(weight)[0].tolist() == [*range(-16, 0)]


def test_rows_of_padding_are_zeros_though_a_scale_divides():
    """All their parts are filled with zeros."""
    none = torch.zeros(1, 1, dtype=torch.uint8)
    weight = QuantizedWeight(QuantScheme("e2m1", 0, "over"), 2, none, none, torch.zeros(1, 1))
    assert decode(weight).tolist() == [[0, 0]]
