"""Faults of how a folder's formats of weights are told, put back by name. They do harm to some folders only
(`test_checkpoint_formats.py`)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.models.config import read_config
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch


def _of_the_copy(real: Callable[..., Any]) -> Callable[..., Any]:
    """A head's configuration with what its copy of the target's says of quantized weights."""

    def head_config(folder: Path) -> Any:
        config, nested = real(folder)
        copied = read_config(folder).get("transformer_layer_config", {}).get("quantization_config")
        return {**config, "quantization_config": copied}, nested

    return head_config


def _e4m3(real: Callable[..., Any]) -> Callable[..., Any]:
    """Scales that are powers of two, expected as e4m3 of the same shape."""

    def stored(self: Any, source: Any) -> Any:
        found = real(self, source)
        name = f"{source.name}_scale"
        return {**found, name: replace(found[name], kinds=("F8_E4M3",))}

    return stored


FORMAT_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "vllm-25883",
            "a draft head's weights are taken to be in its target's format",
            (Patch("treetop.drafts.eagle3_config:head_config", _of_the_copy),),
            "missing tensor",
            0,
        ),
        Fault(
            "vllm-28435",
            "e8m0 scales are taken for e4m3 scales of the same shape",
            (Patch("treetop.weights.fp4:Fp4.stored", _e4m3),),
            "stored as U8, expected F8_E4M3",
            0,
        ),
    )
}
