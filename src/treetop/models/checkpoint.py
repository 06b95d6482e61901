"""Reading weights: safetensors only, every expected tensor present, no other, each of its shape, all finite."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treetop.types.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def read_tensors(folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """All tensors of `shapes` from the folder's safetensors files, as stored.

    shapes: name -> shape. ignored: names that may be present and are not read. Nothing is unpickled. Raises
    CheckpointError naming the first file or tensor that is missing, unexpected, misshapen or not finite.
    """
    files = _located(folder, shapes, ignored)
    tensors: dict[str, Tensor] = {}
    for path in sorted({files[name] for name in shapes}):
        with _open(path) as file:
            for name in (name for name in shapes if files[name] == path):
                tensors[name] = _checked(file.get_tensor(name), name, shapes[name], path)
    return tensors


def check_tensors(folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> int:
    """Names and shapes as `read_tensors` checks them, from the files' headers alone. Returns how many tensors."""
    files = _located(folder, shapes, ignored)
    for path in sorted({files[name] for name in shapes}):
        with _open(path) as file:
            for name in (name for name in shapes if files[name] == path):
                _check_shape(tuple(file.get_slice(name).get_shape()), name, shapes[name], path)
    return len(shapes)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file. Raises CheckpointError if there is no folder, no file, or a truncated one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a weight index: {error}") from None
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not paths:
        pickled = " (only pickled weights, which are never loaded)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder}: no safetensors file in it{pickled}")
    files: dict[str, Path] = {}
    for path in paths:
        with _open(path) as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: named by the weight index, but missing") from None
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


def _check_shape(found: tuple[int, ...], name: str, shape: tuple[int, ...], path: Path) -> None:
    if found != shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {found}, expected {shape}")


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    _check_shape(tuple(tensor.shape), name, shape, path)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values")
    return tensor


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
