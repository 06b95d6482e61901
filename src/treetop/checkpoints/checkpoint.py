"""Reading weights: every expected tensor once, no other, each of its shape and kind, all finite.

From safetensors, or where a folder has none from PyTorch's files (`pickled`) or a GGUF file (`gguf`).
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treetop.checkpoints.gguf.architectures import KEEP_CODES
from treetop.checkpoints.gguf.folder_view import GgufFolder
from treetop.checkpoints.gguf.header import TYPES
from treetop.checkpoints.gguf.open_folder import gguf_of
from treetop.checkpoints.json_file import not_there, read_object
from treetop.checkpoints.pickled import PickledTensors
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import Fetch, Span, TensorSpec

Expected = Mapping[str, TensorSpec]

_MAPPED = 2**26
"""Bytes that are read of a file before it is mapped anew, so that what was read takes no memory."""
_DECODED = frozenset(name for name, _, _ in TYPES.values())
"""Kinds of a GGUF file, which are read as F32."""
_BLOCKS = frozenset(KEEP_CODES)
"""Kinds of a GGUF file that are read as blocks where nothing else will do."""
_PIECE = 2**24
"""Numbers of stored tensors that are compared at a time."""


class _Reader:
    """Reads tensors of several files, and keeps no more than one of them mapped."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        """places: where each tensor is."""
        self._places = places
        self._path: Path | None = None
        self._file: Any = None
        self._read = 0
        self._ahead = set[Path]()
        self._as_blocks = frozenset[str]()

    def check(self, expected: Expected) -> None:
        """Raises CheckpointError unless every tensor is of its shape and of one of its kinds."""
        self._as_blocks = frozenset(name for name, each in expected.items() if _BLOCKS.issuperset(each.kinds))
        for name in sorted(expected, key=lambda name: self._places[name]):
            path, kinds = self._places[name], expected[name].kinds
            found, kind = self.header(name)
            if found not in (expected[name].shape, *expected[name].others):
                raise CheckpointError(f"{path}: tensor {name} has shape {found}, expected {expected[name].shape}")
            if kind not in kinds and not (kind in _DECODED and "F32" in kinds):
                known = " or ".join(kinds)
                raise CheckpointError(f"{path}: tensor {name} is stored as {kind}, expected {known}")

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and kind, as its file says."""
        found = self._open(name).get_slice(name)
        return tuple(found.get_shape()), found.get_dtype()

    def read(self, name: str, span: Span | None) -> Tensor:
        """A view of its file, which stays mapped for it."""
        if self._places[name] not in self._ahead:
            self._ahead.add(self._places[name])
            _read_ahead(self._places[name])
        try:
            if name in self._as_blocks:
                tensor: Tensor = self._open(name).get_blocks(name, span)
            elif span is None:
                tensor = self._open(name).get_tensor(name)
            else:
                tensor = self._open(name).get_slice(name)[*(slice(None),) * span.axis, span.start : span.stop]
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"{self._places[name]}: changed while it was read: {error}") from None
        self._read += tensor.nbytes
        return tensor

    def _open(self, name: str) -> Any:
        """The tensor's file, mapped anew after `_MAPPED` bytes: what was read of it takes no more memory."""
        if self._path != self._places[name] or self._read > _MAPPED:
            self._file = None
            self._path, self._file, self._read = self._places[name], open_file(self._places[name]), 0
        return self._file


def _read_ahead(path: Path) -> None:
    """Ask the system to read a whole file: page by page, as a mapping is touched, a disk is many times slower."""
    if hasattr(os, "posix_fadvise") and path.is_file():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


@contextmanager
def open_tensors(
    folder: Path, expected: Expected, ignored: Collection[str] = (), device: torch.device | str = "cpu"
) -> Iterator[Fetch]:
    """Reads tensors of the folder's files, as stored, whole or in parts, to a device.

    ignored: names that may be present and are not read. Files are mapped, and on a CPU a tensor is a view of its file:
    it takes memory while its reader keeps it, and until `_MAPPED` bytes more are read. Raises CheckpointError naming
    the first file or tensor that is missing, unexpected, there twice, misshapen or not of a kind that can be read;
    reading, also of what is not finite.
    """
    places = _located(folder, expected, ignored)
    reader = _Reader(places)
    reader.check({name: expected[name] for name in places})

    def fetch(name: str, span: Span | None) -> Tensor:
        return _finite(reader.read(name, span).to(device), name, places[name])

    yield fetch


def check_tensors(folder: Path, expected: Expected, ignored: Collection[str] = ()) -> int:
    """Names, shapes and kinds as `open_tensors` checks them, from the files' headers. Returns how many tensors."""
    with open_tensors(folder, expected, ignored):
        return sum(each.read for each in expected.values())


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """What a folder's weight files hold, by their headers. numbers: of each kind of safetensors, such as BF16."""

    files: int
    tensors: int
    numbers: dict[str, int]


def stored_files(folder: Path) -> StoredFiles:
    """Reads headers alone. Raises CheckpointError as `tensor_files` does."""
    places = tensor_files(folder)
    reader, numbers = _Reader(places), Counter[str]()
    for name in sorted(places, key=lambda name: places[name]):
        shape, kind = reader.header(name)
        numbers[kind] += prod(shape)
    return StoredFiles(len(set(places.values())), len(places), dict(sorted(numbers.items())))


def equal_tensors(places: Mapping[str, Path], first: str, second: str) -> bool:
    """Whether two stored tensors hold the same numbers, of whatever kind: read in pieces, to the first difference."""
    readers = {name: _Reader(places) for name in (first, second)}  # each keeps its own file mapped
    shape, *others = (readers[name].header(name)[0] for name in readers)
    if others != [shape] or not shape:
        return first == second
    step = max(1, _PIECE // max(prod(shape[1:]), 1))
    for start in range(0, shape[0], step):
        span = Span(0, start, min(start + step, shape[0]))
        one, other = (reader.read(name, span) for name, reader in readers.items())
        if one.dtype != other.dtype:
            one, other = one.double(), other.double()
        if not torch.equal(one, other):
            return False
    return True


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file: `model.safetensors`, else what the index names, else every safetensors file in the folder;
    without any, `pytorch_model.bin` or what its index names, or the GGUF file that the folder is made of.

    Raises CheckpointError if there is no folder, no file, a truncated one, or a tensor twice.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if os.path.lexists(single):
        paths = [single]
    elif os.path.lexists(index):
        return _checked_index(index)
    else:
        paths = sorted(folder.glob("*.safetensors")) or _pickles(folder) or gguf_of(folder)
    if not paths:
        raise CheckpointError(f"{folder}: no safetensors file in it, and no pytorch_model.bin")
    return _tensors_in(paths)


def _tensors_in(paths: Sequence[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        with open_file(path) as file:
            for name in list(file.keys()):
                if name in files:
                    raise CheckpointError(
                        f"{path}: tensor {shown(name)[1:-1]} is also in {files[name].name}; remove one of the files"
                    )
                files[name] = path
    return files


def _checked_index(index: Path) -> dict[str, Path]:
    """Tensor name -> file, of an index that says what its files say. Raises CheckpointError."""
    named = _indexed(index)
    files = _tensors_in([index.parent / name for name in sorted(set(named.values()))])
    for name, file in named.items():
        if name not in files or files[name].name != file:
            raise CheckpointError(f"{index}: weight_map says that {shown(name)} is in {file}, and it is not there")
    return files


def _indexed(index: Path) -> dict[str, str]:
    """Tensor name -> name of a file beside the index."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) and name.isprintable() for name in files.values()):
        raise CheckpointError(f"{index}: not a weight index: weight_map must be an object of file names")
    for name in files.values():
        if name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map names {shown(name)}, which is not a file beside the index")
    return files


def _pickles(folder: Path) -> list[Path]:
    single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    if os.path.lexists(single):
        return [single]
    return [folder / name for name in sorted(set(_indexed(index).values()))] if os.path.lexists(index) else []


def open_file(path: Path) -> Any:
    """An open weight file, as `safe_open` gives it. Raises CheckpointError for one that cannot be read."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}")
        if path.suffix == ".bin":
            return PickledTensors(path)
        if path.suffix == ".gguf":
            return GgufFolder(path)
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file: {error}") from None


def _located(folder: Path, expected: Expected, ignored: Collection[str]) -> dict[str, Path]:
    """The file of each tensor that is read. Raises CheckpointError if one is missing or unexpected."""
    files, wanted = tensor_files(folder), {name for name, each in expected.items() if each.read}
    unexpected = sorted(set(files) - set(expected) - set(ignored))
    missing = sorted(wanted - set(files))
    if missing:
        raise CheckpointError(f"{folder}: missing tensor {_some(missing)}")
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected tensor {_some(unexpected)}")
    return {name: files[name] for name in expected if name in wanted}


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.is_floating_point() and not all_finite(tensor):
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is infinite or NaN, in one pass, without a copy of 16 bits and more."""
    if not tensor.numel():
        return True
    numbers = tensor.float() if tensor.itemsize == 1 else tensor  # PyTorch has no extremes of 8 bits
    minimum, maximum = numbers.aminmax()  # both are NaN if one number is
    return bool(torch.isfinite(minimum) & torch.isfinite(maximum))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{shown(names[0])[1:-1]}{more}"
