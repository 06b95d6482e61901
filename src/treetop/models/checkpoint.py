"""Reading weights: every expected tensor once, no other, each of its shape and kind, all finite.

From safetensors, or where a folder has none from PyTorch's files (`pickled`).
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treetop.models.json_file import not_there, read_object
from treetop.models.params import Fetch, Span, Stored
from treetop.models.pickled import PickledTensors
from treetop.types.errors import CheckpointError

Expected = Mapping[str, Stored]

_CHECKED = 2**24
"""Numbers that are looked at together, so that looking takes little memory."""


@contextmanager
def open_tensors(folder: Path, expected: Expected, ignored: Collection[str] = ()) -> Iterator[Fetch]:
    """Reads tensors of the folder's files, as stored, whole or in parts.

    ignored: names that may be present and are not read. A tensor takes memory while its reader keeps it. Raises
    CheckpointError naming the first file or tensor that is missing, unexpected, there twice, misshapen or not of a
    kind that can be read; reading, also of what is not finite.
    """
    places = _located(folder, expected, ignored)
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in sorted(set(places.values()))}
        for name, stored in expected.items():
            _check_header(files[places[name]], name, stored, places[name])

        def fetch(name: str, span: Span | None) -> Tensor:
            file, path = files[places[name]], places[name]
            if span is None:
                return _finite(file.get_tensor(name), name, path)
            before = (slice(None),) * span.axis
            return _finite(file.get_slice(name)[*before, span.start : span.stop], name, path)

        yield fetch


def check_tensors(folder: Path, expected: Expected, ignored: Collection[str] = ()) -> int:
    """Names, shapes and kinds as `open_tensors` checks them, from the files' headers. Returns how many tensors."""
    with open_tensors(folder, expected, ignored):
        return len(expected)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file: `model.safetensors`, else what the index names, else every safetensors file in the folder;
    without any, `pytorch_model.bin` or what its index names.

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
        paths = sorted(folder.glob("*.safetensors")) or _pickles(folder)
    if not paths:
        raise CheckpointError(f"{folder}: no safetensors file in it, and no pytorch_model.bin")
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


def _pickles(folder: Path) -> list[Path]:
    single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    if os.path.lexists(single):
        return [single]
    return [folder / name for name in _indexed(index)] if os.path.lexists(index) else []


def _open(path: Path) -> Any:
    """An open file, as `safe_open` gives it."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}")
        if path.suffix == ".bin":
            return PickledTensors(path)
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from None


def _located(folder: Path, expected: Expected, ignored: Collection[str]) -> dict[str, Path]:
    """The file of each expected tensor. Raises CheckpointError if one is missing or unexpected."""
    files = tensor_files(folder)
    unexpected = sorted(set(files) - set(expected) - set(ignored))
    missing = sorted(set(expected) - set(files))
    if missing:
        raise CheckpointError(f"{folder}: missing tensor {_some(missing)}")
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected tensor {_some(unexpected)}")
    return {name: files[name] for name in expected}


def _check_header(file: Any, name: str, expected: Stored, path: Path) -> None:
    header = file.get_slice(name)
    found = tuple(header.get_shape())
    if found != expected.shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {found}, expected {expected.shape}")
    if header.get_dtype() not in expected.kinds:
        known = " or ".join(expected.kinds)
        raise CheckpointError(f"{path}: tensor {name} is stored as {header.get_dtype()}, expected {known}")


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.is_floating_point():
        pieces = tensor.reshape(-1).split(_CHECKED)
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values")
    return tensor


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
