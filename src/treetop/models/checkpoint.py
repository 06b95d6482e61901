"""Reading weights: safetensors only, every expected tensor once, no other, each of its shape and kind, all finite."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treetop.models.json_file import not_there, read_object
from treetop.types.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = ("F64", "F32", "F16", "BF16")
_STORED = {"d2t": ("I64",), "t2d": ("BOOL", "U8", "I8", "I32", "I64")}
"""How safetensors may hold a tensor; every other one is floating point. Fewer bits would need scales."""


def read_tensors(folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """All tensors of `shapes` from the folder's safetensors files, as stored.

    shapes: name -> shape. ignored: names that may be present and are not read. Nothing is unpickled. Raises
    CheckpointError naming the first file or tensor that is missing, unexpected, there twice, misshapen, not of a kind
    that can be read, or not finite.
    """
    files = _located(folder, shapes, ignored)
    tensors: dict[str, Tensor] = {}
    for path in sorted({files[name] for name in shapes}):
        with _open(path) as file:
            for name in (name for name in shapes if files[name] == path):
                _check_header(file, name, shapes[name], path)
                tensors[name] = _finite(file.get_tensor(name), name, path)
    return tensors


def check_tensors(folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> int:
    """Names, shapes and kinds as `read_tensors` checks them, from the files' headers. Returns how many tensors."""
    files = _located(folder, shapes, ignored)
    for path in sorted({files[name] for name in shapes}):
        with _open(path) as file:
            for name in (name for name in shapes if files[name] == path):
                _check_header(file, name, shapes[name], path)
    return len(shapes)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file: `model.safetensors`, else what the index names, else every one in the folder.

    Raises CheckpointError if there is no folder, no file, a truncated one, or a tensor twice.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if os.path.lexists(single):
        paths = [single]
    elif os.path.lexists(index):
        paths = [folder / name for name in _indexed(index)]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = " (only pickled weights, which are never loaded)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder}: no safetensors file in it{pickled}")
    files: dict[str, Path] = {}
    for path in paths:
        with _open(path) as file:
            for name in list(file.keys()):
                if name in files:
                    raise CheckpointError(
                        f"{path}: tensor {name} is also in {files[name].name}; remove one of the files"
                    )
                files[name] = path
    return files


def _indexed(index: Path) -> list[str]:
    """The files that a weight index names."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) and name.isprintable() for name in files.values()):
        raise CheckpointError(f"{index}: not a weight index: weight_map must be an object of file names")
    return sorted(set(files.values()))


def _open(path: Path) -> safe_open:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}")
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from None


def _located(folder: Path, shapes: Shapes, ignored: Collection[str]) -> dict[str, Path]:
    """The file of each tensor. Raises CheckpointError if one is missing or unexpected."""
    files = tensor_files(folder)
    unexpected = sorted(set(files) - set(shapes) - set(ignored))
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise CheckpointError(f"{folder}: missing tensor {_some(missing)}")
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected tensor {_some(unexpected)}")
    return files


def _check_header(file: Any, name: str, shape: tuple[int, ...], path: Path) -> None:
    header, known = file.get_slice(name), _STORED.get(name, _FLOATS)
    found = tuple(header.get_shape())
    if found != shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {found}, expected {shape}")
    if header.get_dtype() not in known:
        raise CheckpointError(f"{path}: tensor {name} is stored as {header.get_dtype()}, expected {' or '.join(known)}")


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values")
    return tensor


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
