"""Entries of a GGUF file's metadata, each of the type that it must have. Needs no PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import Header
from treetop.types.errors import CheckpointError, shown

_MUST = {int: "an integer above 0", float: "one float"}
_MAX_LAYERS = 2**10
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def entry(header: Header, key: str, type_: type, path: Path, default: float | None = None) -> Any:
    """A number. Floats are as they were before they were stored in float32.

    Raises CheckpointError, which names the key, for one that is missing without a default, or not of the type.
    """
    value = header.metadata.get(key, default)
    if type(value) is not type_ or (isinstance(value, int) and value < 1):
        raise CheckpointError(f"{path}: {key} must be {_MUST[type_]}, got {shown(value)}")
    return float(f"{value:.7g}") if type_ is float else value


def windows(
    header: Header, prefix: str, config: Mapping[str, Any], path: Path, period: int, needed: bool = True
) -> dict[str, Any]:
    """The config's `sliding_window` and `layer_types`: of so many layers the last sees everything.

    The file may say another period, or of each layer whether it has a window. needed: without a window it is an error,
    else all layers see everything.
    """
    layers, key = config["num_hidden_layers"], f"{prefix}attention.sliding_window"
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"{path}: {prefix}block_count {layers} is more than {_MAX_LAYERS}")
    if key not in header.metadata and not needed:
        return {"layer_types": [FULL_ATTENTION] * layers}
    window = entry(header, key, int, path)
    pattern = header.metadata.get(f"{key}_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = tuple(layer % pattern < pattern - 1 for layer in range(layers))
    if not isinstance(pattern, tuple) or len(pattern) != layers or not all(each in (0, 1) for each in pattern):
        raise CheckpointError(
            f"{path}: {key}_pattern must be a number of layers, or 0 or 1 for each of {layers}, got {shown(pattern)}"
        )
    return {
        "sliding_window": window,
        "layer_types": [SLIDING_ATTENTION if slides else FULL_ATTENTION for slides in pattern],
    }
