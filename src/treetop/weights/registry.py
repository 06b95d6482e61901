"""Formats that a checkpoint can ask for, by the `quant_method` of its `quantization_config`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown
from treetop.weights import mxfp4
from treetop.weights.rules import PLAIN, Rule, StoredFormats

FORMATS: dict[str, Callable[[Mapping[str, Any], Path], tuple[Rule, ...]]] = {"mxfp4": mxfp4.read}
"""What reads the rest of such a `quantization_config`, whose file errors name: which modules are in which format."""


def read_formats(config: Mapping[str, Any], where: Path) -> StoredFormats:
    """The formats of a checkpoint's weights. config: its `config.json`.

    Raises CheckpointError for a method that is not known. A draft head's formats are what its own file says.
    """
    given = config.get("quantization_config")
    if given is None:
        return PLAIN
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{where}: quantization_config: {shown(given)} is not supported, only quant_method {' or '.join(FORMATS)}"
        )
    return StoredFormats(FORMATS[method](given, where), str(where))
