"""What a checkpoint says of K/V in FP8: the names of their scales, and which schemes can be honoured.

Sources: `compressed-tensors` 0.20 (`kv_cache_scheme`: a scale a tensor or a head), Model Optimizer's unified checkpoint
(`kv_cache_quant_algo`), and vllm `maybe_remap_kv_scale_name`, which lists how older writers called them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown

PLANES = ("k", "v")
_STRATEGIES = ("tensor", "attn_head")


def scale_names(attention: str, plane: str) -> tuple[str, ...]:
    """What the scale of a plane, k or v, may be called; the last is that of both. attention: the module's name."""
    inside = (f"{plane}_proj.{plane}_scale", f"qkv_proj.{plane}_scale", f"{plane}_proj.output_scale")
    return (*(f"{attention}.{end}" for end in (f"{plane}_scale", *inside)), f"{attention}.kv_scale")


def zero_names(attention: str) -> tuple[str, ...]:
    """Of asymmetric integers."""
    return tuple(f"{attention}.{plane}_zero_point" for plane in ("q", *PLANES))


def all_names(attention: str) -> tuple[str, ...]:
    """All that a file may hold beside K/V: also scales of queries and of their sums, which stay in 16 bits or more."""
    scales = (name for plane in PLANES for name in scale_names(attention, plane))
    fused = (f"{attention}.{end}" for end in ("q_scale", "qkv_proj.output_scale"))
    return (*scales, *fused, *zero_names(attention))


def check_scheme(config: Mapping[str, Any], where: Path) -> None:
    """Raises CheckpointError if a checkpoint's K/V are meant to be something else than e4m3 with fixed scales.

    config: its `config.json`, at `where`.
    """
    given = config.get("quantization_config")
    said: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    algorithm, scheme = said.get("kv_cache_quant_algo"), said.get("kv_cache_scheme")
    if algorithm is not None and algorithm != "FP8":
        raise _refused(where, "kv_cache_quant_algo", algorithm)
    if scheme is None or scheme == "static":
        return
    if not isinstance(scheme, Mapping):
        raise _refused(where, "kv_cache_scheme", scheme)
    wanted = {"num_bits": (8,), "type": ("float",), "dynamic": (False,), "symmetric": (True,), "strategy": _STRATEGIES}
    for key, values in wanted.items():
        if scheme.get(key, values[0]) not in values:
            raise _refused(where, f"kv_cache_scheme with {key}", scheme[key])


def _refused(where: Path, what: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: quantization_config: {what} {shown(value)} is no FP8 with fixed scales; use --kv-cache-dtype auto,"
        " which does not quantize K/V"
    )
