"""`quant_method` modelopt: FP8 and NVFP4 as NVIDIA's Model Optimizer exports them.

`config.json` says what is in which format, or in older folders `hf_quant_config.json` beside it.
Source: Model Optimizer's unified checkpoint, vllm `quantization/modelopt.py`. Scales of K/V: `models.kv_scales`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.kernels.gemm.fp8_rows import Activations
from treetop.types.errors import CheckpointError, shown
from treetop.weights import fp4, fp8
from treetop.weights.quantized import SCALES, Grid, Quantized
from treetop.weights.rules import Named, Rule, kept_plain

_BLOCK = 128
_ALGORITHMS: dict[str, Quantized] = {
    "FP8": fp8.fp8(fp8.WHOLE, activations=Activations(fixed=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8.fp8(fp8.BY_ROW, activations=Activations()),
    "FP8_PB_WO": fp8.fp8(Grid(_BLOCK, _BLOCK), "_scale", SCALES, apart=True),
    "NVFP4": fp4.NVFP4_OF_MODELOPT,
}


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """The rules of a `quantization_config`; with MIXED_PRECISION each module has an algorithm of its own."""
    plain = [rule for key in ("ignore", "exclude_modules") for rule in kept_plain(config, key, where)]
    name = config.get("quant_algo")
    if name is None and config.get("kv_cache_quant_algo") is not None:
        return ()
    if name != "MIXED_PRECISION":
        return (*plain, Rule("*", _format(name, config, where)))
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
        raise CheckpointError(f"{where}: quantization_config: quantized_layers must name modules, got {shown(layers)}")
    found: dict[Quantized, set[str]] = {}
    for module, each in layers.items():
        found.setdefault(_format(each.get("quant_algo"), each, where), set()).add(module)
    return (*plain, *(Named(frozenset(modules), format_, inside=True) for format_, modules in found.items()))


def _format(name: object, config: Mapping[str, Any], where: Path) -> Quantized:
    format_ = _ALGORITHMS.get(name.upper()) if isinstance(name, str) else None
    if format_ is None:
        raise CheckpointError(
            f"{where}: quantization_config: quant_algo {shown(name)} is not supported, only {', '.join(_ALGORITHMS)}"
        )
    group = config.get("group_size")
    if format_ is fp4.NVFP4_OF_MODELOPT and group not in (None, fp4.NVFP4_GROUP):
        raise CheckpointError(f"{where}: quantization_config: group_size {shown(group)} is not supported, only 16")
    return format_
