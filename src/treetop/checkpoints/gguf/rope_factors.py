"""Scaled RoPE of a GGUF file: linear and YaRN as metadata say. Needs no PyTorch.

llama.cpp stores Llama 3.1's as a factor for each frequency and not what gave it.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import Header
from treetop.checkpoints.gguf.metadata import entry
from treetop.types.errors import CheckpointError, shown

_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
"""Of every published Llama 3.1 to 3.3."""
_KINDS: dict[str, dict[str, tuple[str, type]]] = {
    "none": {},
    "linear": {"factor": ("factor", float)},
    "yarn": {
        "factor": ("factor", float),
        "original_context_length": ("original_max_position_embeddings", int),
        "yarn_beta_fast": ("beta_fast", float),
        "yarn_beta_slow": ("beta_slow", float),
    },
}
"""Of a kind, the keys of its numbers, and what the hub calls them."""
_DEFAULTS: dict[str, float] = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_log_multiplier": 1.0}
_SAYING_NOTHING = ("type", "finetuned", "original_context_length")
"""Keys that change no number, whatever the kind."""
_TOLERANCE = 1e-4
"""Of factors, as a share: they went through float32."""
_F32 = 0


def rope_scaling(
    header: Header, prefix: str, config: Mapping[str, Any], path: Path, yarn: Mapping[str, tuple[str, type]]
) -> dict[str, Any]:
    """The config's `rope_scaling`, {} without one. yarn: keys of it that this architecture has beyond others.

    Raises CheckpointError for what no known rule gives.
    """
    said = f"{prefix}rope.scaling."
    kind = header.metadata.get(f"{said}type", "linear" if f"{said}factor" in header.metadata else "none")
    if kind not in _KINDS:
        raise CheckpointError(
            f"{path}: {said}type: scaled RoPE {shown(kind)} is not supported, only {', '.join(_KINDS)}"
        )
    if kind != "none":
        if _FACTORS in header.tensors:
            raise CheckpointError(f"{path}: {said}type {kind} beside a tensor {_FACTORS} is not supported")
        keys = {**_KINDS[kind], **(yarn if kind == "yarn" else {})}
        return {"rope_scaling": {"rope_type": kind, **_numbers(header, said, keys, path)}}
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
    of_rule = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": _ORIGINAL}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **of_rule}}


def _numbers(header: Header, said: str, keys: Mapping[str, tuple[str, type]], path: Path) -> dict[str, Any]:
    """Those of a kind. A key that it does not have, such as a factor of the scores, is refused by name."""
    for key in header.metadata:
        if key.startswith(said) and key.removeprefix(said) not in (*keys, *_SAYING_NOTHING):
            raise CheckpointError(f"{path}: {key}: {shown(header.metadata[key])} is not supported")
    return {ours: entry(header, said + key, type_, path, _DEFAULTS.get(key)) for key, (ours, type_) in keys.items()}


def _stored(header: Header, path: Path) -> tuple[float, ...]:
    tensor = header.tensors[_FACTORS]
    if tensor.type != _F32 or len(tensor.shape) != 1 or tensor.shape[0] > 2**12:
        raise CheckpointError(f"{path}: tensor {_FACTORS} must be one row of F32")
    with tensor.path.open("rb") as file:
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
