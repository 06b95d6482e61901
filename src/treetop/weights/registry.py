"""Formats: as stored, which a checkpoint asks for by the `quant_method` of its `quantization_config`; and as held."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown
from treetop.weights import compressed_tensors, fp8, ggml, int4, modelopt, mxfp4, packed, w8a8
from treetop.weights.format import HeldFormat, Packing, StoredFormat
from treetop.weights.plain import UNQUANTIZED
from treetop.weights.rules import PLAIN, Named, Rule, StoredFormats


@dataclass(frozen=True, slots=True)
class Method:
    """What reads the rest of such a `quantization_config`, whose file errors name: which modules are in which format.

    about: what it reads, for people.
    """

    read: Callable[[Mapping[str, Any], Path], tuple[Rule | Named, ...]]
    about: str


FORMATS: dict[str, Method] = {
    "awq": Method(int4.read_awq, "W4A16 of AutoAWQ, version gemm"),
    "compressed-tensors": Method(
        compressed_tensors.read, "FP8 by tensor, channel or block; W4A16; NVFP4 and MXFP4: what llm-compressor writes"
    ),
    "fp8": Method(fp8.read, "FP8 by block (`weight_block_size`: DeepSeek, Qwen3, MiniMax) or by tensor"),
    "gguf": Method(ggml.read, "Q4_0 and Q4_1 of a GGUF file, which says so itself"),
    "gptq": Method(int4.read_gptq, "W4A16 of gptqmodel and AutoGPTQ, with or without `desc_act`"),
    "modelopt": Method(modelopt.read, "FP8 by tensor, channel or block; NVFP4; MIXED_PRECISION of these"),
    "mxfp4": Method(mxfp4.read, "experts of GPT-OSS in MXFP4"),
}


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
    return StoredFormats(FORMATS[method].read(given, where), str(where))


HELD: tuple[Callable[[StoredFormat, str, Packing, bool], HeldFormat | None], ...] = (w8a8.held, packed.held)
"""What each way to hold weights makes of a stored format, of a parameter's kind, where weights may stay packed and
where inputs are to be quantized; in order of preference."""


def held_format(stored: StoredFormat, kind: str, packing: Packing, activations: bool) -> HeldFormat:
    """The first of `HELD` that holds a weight of this kind; where there is none it is decoded as it is loaded."""
    made = (each(stored, kind, packing, activations) for each in HELD)
    return next((each for each in made if each is not None), UNQUANTIZED)
