"""Scaled RoPE of a GGUF file. llama.cpp stores Llama 3.1's as a factor for each frequency and not what gave it."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import Header
from treetop.types.errors import CheckpointError, shown

_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
"""Of every published Llama 3.1 to 3.3."""
_TOLERANCE = 1e-4
"""Of factors, as a share: they went through float32."""
_F32 = 0


def rope_scaling(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config's `rope_scaling`, {} without one. Raises CheckpointError for what no known rule gives."""
    kind = header.metadata.get(f"{prefix}rope.scaling.type", "none")
    if kind != "none":
        raise CheckpointError(f"{path}: {prefix}rope.scaling.type: scaled RoPE {shown(kind)} is not supported")
    if _FACTORS not in header.tensors:
        return {}
    found = _stored(header, path)
    if not 1 <= config["rope_theta"] < math.inf:
        raise CheckpointError(f"{path}: {prefix}rope.freq_base {config['rope_theta']} is out of bounds")
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    factor = round(max(found), 3)
    expected = _llama3(dim, config["rope_theta"], factor)
    pairs = zip(found, expected, strict=False)
    if len(expected) != len(found) or not all(abs(one - other) <= _TOLERANCE * other for one, other in pairs):
        raise CheckpointError(f"{path}: tensor {_FACTORS} holds factors that are not those of Llama 3.1: not supported")
    said = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": _ORIGINAL}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **said}}


def _stored(header: Header, path: Path) -> tuple[float, ...]:
    tensor = header.tensors[_FACTORS]
    if tensor.type != _F32 or len(tensor.shape) != 1 or tensor.shape[0] > 2**12:
        raise CheckpointError(f"{path}: tensor {_FACTORS} must be one row of F32")
    with path.open("rb") as file:
        file.seek(tensor.start)
        return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.size))


def _llama3(dim: int, theta: float, factor: float) -> list[float]:
    """What each frequency is divided by. Source: Llama 3.1's reference, `apply_scaling`."""
    factors = []
    for index in range(dim // 2):
        turns = _ORIGINAL / (2 * math.pi * theta ** (2 * index / dim))  # in the original context
        share = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        factors.append(1 / ((1 - share) / factor + share))
    return factors
