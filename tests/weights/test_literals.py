"""Bytes written by hand from the formats' descriptions, and the numbers that they are: no packer of ours has a part.

Sources: AutoAWQ `awq/utils/packing_utils.py` (AWQ_ORDER 0 2 4 6 1 3 5 7); gptqmodel `checkpoint_format` gptq and
gptq_v2, `g_idx`; compressed-tensors `pack_quantized`; NVIDIA ModelOpt `weight_scale`, `weight_scale_2`; OCP MX 1.0;
OCP 8-bit Floating Point Specification 1.0.
"""

import pytest
import torch

from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, read_rows
from treetop.weights.plain import UNQUANTIZED
from treetop.weights.registry import read_formats

E4M3 = torch.float8_e4m3fn


def signed(*words):
    """Words as int32."""
    return [word - (1 << 32) if word > 0x7FFFFFFF else word for word in words]


def read(config, shape, **tensors):
    """The weight `x.weight` of a folder with this `quantization_config`; every tensor that is read has its shape."""
    format_ = read_formats({"quantization_config": config}, None).of("model.layers.0.x")
    given = {f"model.layers.0.x.{name}": tensor for name, tensor in tensors.items()}
    source = CheckpointTensor("model.layers.0.x.weight", shape)
    for name, stored in format_.stored(source).items():
        if stored.read:
            assert tuple(given[name].shape) in (stored.shape, *stored.others), name

    def fetch(name, span):
        assert span is None or span.stop - span.start <= given[name].shape[span.axis]
        return given[name] if span is None else given[name].narrow(span.axis, span.start, span.stop - span.start)

    return torch.cat([rows for _, rows in read_rows(format_, UNQUANTIZED, source, fetch)])


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


def test_awqs_words_have_columns_0_2_4_6_1_3_5_7():
    """A word from its lowest nibble on has the outputs 0, 2, 4, 6, 1, 3, 5, 7; so has one of zeros."""
    ascending = 0x75316420  # output i has code i
    qweight = torch.tensor([signed(ascending), signed(0xFFFFFFFF)] * 2, dtype=torch.int32)
    qzeros = torch.tensor([signed(0x11111111), signed(ascending)], dtype=torch.int32)
    scales = torch.tensor([[1.0] * 8, [0.5] * 8], dtype=torch.float16)
    got = read({**AWQ, "group_size": 2}, (8, 4), qweight=qweight, qzeros=qzeros, scales=scales)
    # columns 0 and 1 are of group 0, zero 1, scale 1; 2 and 3 of group 1, zero i, scale 1/2
    assert got.tolist() == [[i - 1, 14, 0, (15 - i) / 2] for i in range(8)]


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
ROWS = [*signed(0x76543210), *signed(0xFEDCBA98)]
"""Inputs 0 .. 7, the first lowest, have codes 0 .. 7; the second output's have 8 .. 15."""


def gptq_tensors(groups, zero):
    """Of eight outputs, the first of which have these rows and the others the second's. zero: as it is stored."""
    return {
        "qweight": torch.tensor([[ROWS[0]] + [ROWS[1]] * 7], dtype=torch.int32),
        "qzeros": torch.tensor([signed(zero)] * groups, dtype=torch.int32),
        "scales": torch.tensor([[2.0**-g] * 8 for g in range(groups)], dtype=torch.float16),
    }


@pytest.mark.parametrize(("stored", "zero"), [("gptq", 0x77777776), ("gptq_v2", 0x88888887), (None, 0x77777776)])
def test_gptq_stores_zeros_less_one_and_its_version_2_does_not(stored, zero):
    """The first output's zero is 7, the others' 8."""
    config = {**GPTQ, "group_size": 4} | ({} if stored is None else {"checkpoint_format": stored})
    g_idx = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)
    got = read(config, (8, 8), g_idx=g_idx, **gptq_tensors(2, zero))
    assert got[0].tolist() == [-7, -6, -5, -4, -1.5, -1, -0.5, 0]
    assert got[1].tolist() == [0, 1, 2, 3, 2, 2.5, 3, 3.5]
    assert torch.equal(got[2:], got[1:2].expand(6, 8))


def test_a_zero_of_gptq_may_be_sixteen():
    """15, stored in version 1, is 16."""
    config = {**GPTQ, "group_size": -1}
    got = read(config, (8, 8), g_idx=torch.zeros(8, dtype=torch.int32), **gptq_tensors(1, 0xFFFFFFFF))
    assert got[0].tolist() == [*range(-16, -8)]


def test_g_idx_says_each_inputs_group():
    """In act order: the groups' inputs are not neighbours."""
    config = {**GPTQ, "group_size": 4, "desc_act": True}
    g_idx = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.int32)
    got = read(config, (8, 8), g_idx=g_idx, **gptq_tensors(2, 0x77777777))
    assert got[0].tolist() == [-4, -7, -3, -5, -4, -1.5, -1, -1]


def test_whole_rows_are_one_group():
    config = {**GPTQ, "group_size": -1, "sym": True}
    got = read(config, (8, 8), g_idx=torch.zeros(8, dtype=torch.int32), **gptq_tensors(1, 0x77777777))
    assert got[0].tolist() == [*range(-8, 0)]
    assert got[7].tolist() == [*range(8)]


def compressed(stored, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups}


def test_compressed_tensors_integers_are_less_by_eight_and_may_have_zeros():
    """Words along rows, zeros in words along columns: both hold a number of -8 .. 7 plus 8."""
    shape = torch.tensor([2, 8])
    words = torch.tensor([[ROWS[0]], [ROWS[1]]], dtype=torch.int32)
    scale = torch.tensor([[1.0, 0.5], [2.0, 0.25]])
    sizes = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4}
    got = read(compressed("pack-quantized", **sizes), (2, 8), weight_packed=words, weight_scale=scale,
               weight_shape=shape)  # fmt: skip
    assert got.tolist() == [[-8, -7, -6, -5, -2, -1.5, -1, -0.5], [0, 2, 4, 6, 1, 1.25, 1.5, 1.75]]
    zeros = torch.tensor([signed(0x000000A8, 0x00000087)], dtype=torch.int32).view(1, 2)  # 0, 2; -1, 0
    got = read(compressed("pack-quantized", **sizes, symmetric=False), (2, 8), weight_packed=words,
               weight_scale=scale, weight_shape=shape, weight_zero_point=zeros)  # fmt: skip
    assert got.tolist() == [[-8, -7, -6, -5, -1.5, -1, -0.5, 0], [-4, -2, 0, 2, 1, 1.25, 1.5, 1.75]]


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ALL_CODES = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
"""Sixteen codes of 4 bits in their order: the first of two in the lower half."""


def test_nvfp4_of_modelopt_has_scales_of_two_levels():
    """e4m3: 0x38 is 1, 0x40 is 2, 0x7e 448 and 0x01 2 ** -9; times weight_scale_2. input_scale counts for nothing."""
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    scale = torch.tensor([[0x38, 0x40], [0x7E, 0x01]], dtype=torch.uint8).view(E4M3)
    got = read(config, (2, 32), weight=ALL_CODES.repeat(2, 2), weight_scale=scale, weight_scale_2=torch.tensor(0.25),
               input_scale=torch.tensor(7.0))  # fmt: skip
    for row, factors in zip(got.tolist(), ((0.25, 0.5), (112, 2**-11)), strict=True):
        assert row == [number * factor for factor in factors for number in E2M1]


def test_nvfp4_of_compressed_tensors_is_divided_by_its_global_scale():
    config = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scale = torch.tensor([[0x38]], dtype=torch.uint8).view(E4M3)
    got = read(config, (1, 16), weight_packed=ALL_CODES, weight_scale=scale, weight_global_scale=torch.tensor([4.0]))
    assert got[0].tolist() == [number / 4 for number in E2M1]


def test_mxfp4_scales_are_powers_of_two_of_which_127_is_one():
    """Of GPT-OSS's experts, whose blocks have sixteen bytes, and of llm-compressor's weights."""
    config = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    want = [*E2M1, *E2M1, *(8 * number for number in [*E2M1, *E2M1])]
    assert read(config, (1, 64), weight_packed=ALL_CODES.repeat(1, 4), weight_scale=scale)[0].tolist() == want
    format_ = read_formats({"quantization_config": {"quant_method": "mxfp4"}}, None).of("model.layers.0.mlp.experts.x")
    tensors = {"blocks": ALL_CODES.repeat(1, 4).view(1, 1, 2, 16), "scales": scale.view(1, 1, 2)}
    source, fetch = CheckpointTensor("x", (1, 1, 64), stacked=True), lambda name, span: tensors[name.rpartition("_")[2]]
    (rows,) = [rows for _, rows in read_rows(format_, UNQUANTIZED, source, fetch)]
    assert rows.flatten().tolist() == want


@pytest.mark.parametrize("config", [
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "fp8", "activation_scheme": "static"},
])  # fmt: skip
def test_fp8_is_e4m3_times_its_scale_whatever_the_activations_have(config):
    """0x38 is 1, 0xc4 -3, 0x7e 448, 0x01 2 ** -9."""
    codes = torch.tensor([[0x38, 0xC4], [0x7E, 0x01]], dtype=torch.uint8).view(E4M3)
    got = read(config, (2, 2), weight=codes, weight_scale=torch.tensor(0.5), input_scale=torch.tensor(9.0))
    assert got.tolist() == [[0.5, -1.5], [224, 2**-10]]


def test_fp8_blocks_have_a_scale_each():
    """`weight_scale_inv` multiplies; a block at an edge is a part of one."""
    codes = torch.full((3, 3), 0x38, dtype=torch.uint8).view(E4M3)
    config = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    got = read(config, (3, 3), weight=codes, weight_scale_inv=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert got.tolist() == [[1, 1, 2], [1, 1, 2], [3, 3, 4]]


def test_a_code_that_is_no_number_is_refused():
    """0x7f of e4m3."""
    codes = torch.tensor([[0x7F, 0x38]], dtype=torch.uint8).view(E4M3)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        read({"quant_method": "fp8"}, (1, 2), weight=codes, weight_scale=torch.tensor(1.0))
