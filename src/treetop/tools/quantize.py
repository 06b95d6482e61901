"""A checkpoint's weights rounded to FP8 or to 4 bits, in the layout of `compressed-tensors`, which vLLM reads too.

Round to nearest, without data: FP8 with a scale a row, as llm-compressor's FP8_DYNAMIC writes it, or 4 bits with a
scale a group, its W4A16. Output matrix, embeddings, norms and routers stay as they are, and so does what the model does
not use, such as MTP layers. A GGUF file is rounded from the float32 that it decodes to.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from treetop.checkpoints.checkpoint import open_file, tensor_files
from treetop.checkpoints.params import Param
from treetop.drafts.registry import drafter_spec
from treetop.models.config import read_config
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.weights import fp8, int4
from treetop.weights.format import CheckpointTensor
from treetop.weights.registry import read_formats

FORMATS = ("fp8", "w4a16")
_GROUPS = (128, 64, 32)
"""Numbers that share a scale, to choose from: the more, the fewer bytes."""
_LEFT = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")
"""Ends of files that are not copied."""
_OUTPUTS = ("lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """What was written.

    weights: how many were rounded.
    before, after: bytes of all tensors.
    error: the largest share of a weight's norm that rounding changed, and which weight's that is.
    group: numbers that share a scale of 4 bits; 0 where whole rows do.
    """

    weights: int
    before: int
    after: int
    error: float
    worst: str
    group: int


def quantize(folder: Path, target: Path | None, name: str, group: int | None, output: Path) -> QuantizedFolder:
    """Write a folder's checkpoint in a format to `output`, file by file, with all that lies beside the weights.

    target: of a draft head, its target's folder. name: one of `FORMATS`. group: numbers that share a scale of 4 bits; 0
    for whole rows, None for the most that divide all rows. Raises ConfigError for an output that is there,
    CheckpointError for what cannot be quantized.
    """
    if output.exists():
        raise ConfigError(f"--output {output}: it exists; name a new folder")
    config = read_config(folder)
    given = config.get("quantization_config")
    if given is not None and not (isinstance(given, dict) and given.get("quant_method") == "gguf"):
        raise CheckpointError(f"{folder}: it is quantized already; give the folder it was made from")
    files = tensor_files(folder)
    pickles = sorted({path.name for path in files.values() if path.suffix not in (".safetensors", ".gguf")})
    if pickles:
        raise CheckpointError(f"{folder}: {pickles[0]}: only safetensors and GGUF are quantized; convert it before")
    chosen = {source.name: source for source in _products(_params(folder, target))}
    if group is None:
        group = _dividing({source.shape[1] for source in chosen.values()}) if name == "w4a16" else 0
    encode = _encoder(name, group)
    said = {**config, "quantization_config": _said(name, group, _plain(files, chosen))}
    formats = read_formats(said, folder)
    try:
        for source in chosen.values():
            formats.of(source.module).stored(source)  # or it raises, before anything is written
    except CheckpointError as error:
        raise ConfigError(f"--group-size {group}: {error}") from None
    output.mkdir(parents=True)
    made = replace(_write(files, chosen, encode, output), group=group)
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(_LEFT) and path.name != "config.json":
            shutil.copy(path, output / path.name)
    (output / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return made


def _dividing(widths: Collection[int]) -> int:
    """Numbers of a group. Raises ConfigError where none divides rows of these widths."""
    found = next((group for group in _GROUPS if all(width % group == 0 for width in widths)), None)
    if found is None:
        listed = ", ".join(map(str, sorted(widths)))
        raise ConfigError(
            f"--group-size: rows of {listed} are no whole groups of 128, 64 or 32; give one, or -1 for rows"
        )
    return found


def _params(folder: Path, target: Path | None) -> Iterable[Param]:
    if target is None:
        return target_spec(folder).params
    return drafter_spec(folder, target_spec(target).config).params


def _products(params: Iterable[Param]) -> list[CheckpointTensor]:
    """What is rounded: matrices of layers, one by one."""
    return [
        source
        for param in params
        if param.kind in ("matrix", "experts")
        for source in param.sources
        if len(source.shape) == 2 and source.name.endswith(".weight") and not source.name.endswith(_OUTPUTS)
    ]


def _encoder(name: str, group: int) -> Callable[[Tensor], dict[str, Tensor]]:
    return fp8.rounded if name == "fp8" else lambda weight: int4.rounded(weight, group)


def _plain(files: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """Modules that stay as they are, which a reader could take for products."""
    kept = set(files) - set(chosen)
    return sorted({name.removesuffix(".weight") for name in kept if name.endswith(".weight")} | {"lm_head"})


def _said(name: str, group: int, plain: list[str]) -> dict[str, Any]:
    """The `quantization_config`."""
    weights: dict[str, Any] = {"dynamic": False, "symmetric": True}
    activations: dict[str, Any] | None = None
    if name == "fp8":
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    elif group:
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    else:
        weights |= {"num_bits": 4, "type": "int", "strategy": "channel"}
    stored = "float-quantized" if name == "fp8" else "pack-quantized"
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": stored}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": groups},
        "ignore": plain,
    }


def _write(
    files: dict[str, Path],
    chosen: dict[str, CheckpointTensor],
    encode: Callable[[Tensor], dict[str, Tensor]],
    output: Path,
) -> QuantizedFolder:
    """The weight files, each from one of the folder's, and an index if there are several."""
    places: dict[str, str] = {}
    before = after = 0
    worst, error = "", 0.0
    for path in sorted(set(files.values())):
        tensors: dict[str, Tensor] = {}
        with open_file(path) as opened:
            for name in (name for name, place in files.items() if place == path):
                tensor = opened.get_tensor(name)
                before += tensor.nbytes
                if name not in chosen:
                    tensors[name] = tensor
                    continue
                made = encode(_checked(tensor, name))
                changed = made.pop("error")
                if float(changed) >= error:
                    worst, error = name, float(changed)
                tensors.update({f"{chosen[name].module}.{part}": each for part, each in made.items()})
        made_of = path.name if path.suffix == ".safetensors" else "model.safetensors"
        save_file(tensors, output / made_of, {"format": "pt"})
        places.update(dict.fromkeys(tensors, made_of))
        after += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(places.items()))}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return QuantizedFolder(len(chosen), before, after, error, worst, 0)


def _checked(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not bool(tensor.isfinite().all()):
        raise CheckpointError(f"tensor {name}: {tensor.dtype} with NaN, infinite or too few bits cannot be quantized")
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
