"""Random weights in the formats that people deploy, for benchmarks."""

from collections.abc import Mapping
from typing import Any

import torch
from frame import DEVICE

from treetop.kernels.gemm.quantized_weight import QuantizedWeight
from treetop.weights.fp4 import NVFP4_OF_MODELOPT
from treetop.weights.fp8 import BY_ROW, fp8
from treetop.weights.int4 import PackQuantized, w4a16
from treetop.weights.mxfp4 import MXFP4
from treetop.weights.packed import Packed, held
from treetop.weights.quantized import Grid

_COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
_MOE_IGNORE = ["lm_head", "re:.*mlp.gate$"]


def _group(stored: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": stored, "weights": weights, "input_activations": activations}
    groups = {"group_0": group}
    return {**_COMPRESSED, "ignore": _MOE_IGNORE, "format": stored, "config_groups": groups}


CONFIGS: dict[str, Mapping[str, Any]] = {
    "fp8-channel": _group(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        num_bits=8,
        type="float",
        strategy="channel",
    ),
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "w4a16": _group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "mxfp4": _group("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}
"""A `quantization_config` of each."""


def _packed(format_: Any) -> Packed:
    made = held(format_, "matrix", "tiles", False)
    assert made is not None
    return made


FORMATS: dict[str, Packed] = {
    "fp8-channel": _packed(fp8(BY_ROW)),
    "fp8-block": _packed(fp8(Grid(128, 128))),
    "w4a16": _packed(w4a16(PackQuantized(128, zeros=False))),
    "nvfp4": _packed(NVFP4_OF_MODELOPT),
    "mxfp4": _packed(MXFP4),
}


def random_weight(format_: Packed, *shape: int, device: torch.device = DEVICE) -> QuantizedWeight:
    """Of which products keep their input's size, about."""
    found = format_.parts(shape, torch.bfloat16).items()
    parts = {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in found}
    format_.fill_random(parts, torch.Generator(device).manual_seed(0))
    return format_.weight(parts)
