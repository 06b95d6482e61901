"""The head of a GGUF file: metadata and where each tensor lies, every count checked against the file's own size.

A file may be anybody's. Nothing is taken on its word: a length is compared with the bytes that are left before
anything of that length is read. Source: the GGUF specification, versions 2 and 3. Needs no PyTorch.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown

_MAX_ENTRIES = 2**16
"""Of metadata, and of tensors."""
_MAX_NAME = 2**16 - 1
"""Bytes of a key or of a tensor's name."""
_MAX_DIMENSIONS = 4
_MAX_NUMBERS = 2**48
"""Of a tensor."""
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata by number, as `struct` calls them."""

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Types of tensors that are read, by number: name, numbers a block, bytes a block."""
MXFP4 = 39


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: type by number, shape with the longest stride first, byte where it starts, bytes, file."""

    type: int
    shape: tuple[int, ...]
    start: int
    size: int
    path: Path


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors. A list of metadata is a tuple."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Raises CheckpointError, which names the file and what is wrong in it, before memory is taken for it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).header()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as GGUF: {error}") from None


class _Walk:
    """From a file's first byte to its last tensor's entry."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._take(4, "magic") != b"GGUF":
            raise self._wrong("does not begin with GGUF")
        if (version := self._scalar("I", "version")) not in (2, 3):
            raise self._wrong(f"version {version} is not supported, only 2 and 3 in little-endian order")
        tensors = self._count("tensors", _MAX_ENTRIES)
        entries = self._count("entries of metadata", _MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string("a key", _MAX_NAME)
            if key in metadata:
                raise self._wrong(f"metadata {shown(key)} is there twice")
            metadata[key] = self._value(self._scalar("I", key), key)
        listed = [self._entry() for _ in range(tensors)]
        return Header(metadata, self._placed(listed, self._alignment(metadata)))

    def _placed(self, listed: list[tuple[str, int, tuple[int, ...], int]], alignment: int) -> dict[str, TensorInfo]:
        begin = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, type_, shape, offset in listed:
            if name in placed:
                raise self._wrong(f"tensor {shown(name)} is there twice")
            _, numbers, size = TYPES[type_]
            stored = TensorInfo(type_, shape, begin + offset, prod(shape) // numbers * size, self._path)
            if offset % alignment:
                raise self._wrong(f"tensor {shown(name)}: offset {offset} is no multiple of {alignment}")
            if stored.start + stored.size > len(self._data):
                raise self._wrong(
                    f"tensor {shown(name)}: ends at byte {stored.start + stored.size} of {len(self._data)}"
                )
            placed[name] = stored
        self._check_apart(placed)
        return placed

    def _check_apart(self, placed: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for name, stored in sorted(placed.items(), key=lambda item: item[1].start):
            if stored.start < end:
                raise self._wrong(f"tensors {shown(before)} and {shown(name)} overlap")
            end, before = stored.start + stored.size, name

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """A tensor's name, type, shape and offset."""
        name = self._string("a tensor's name", _MAX_NAME)
        dimensions = self._scalar("I", name)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._wrong(f"tensor {shown(name)}: {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._scalar("Q", name) for _ in range(dimensions))[::-1]
        if min(shape) < 1 or prod(shape) > _MAX_NUMBERS:
            raise self._wrong(f"tensor {shown(name)}: shape {shape} is out of bounds")
        type_ = self._scalar("I", name)
        if type_ not in TYPES:
            known = ", ".join(kind for kind, _, _ in TYPES.values())
            raise self._wrong(f"tensor {shown(name)}: type {type_} is not supported, only {known}")
        if shape[-1] % TYPES[type_][1]:
            raise self._wrong(f"tensor {shown(name)}: rows of {shape[-1]} are no whole blocks of {TYPES[type_][0]}")
        return name, type_, shape, self._scalar("Q", name)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if type(value) is not int or not 8 <= value <= 2**16 or value & (value - 1):
            raise self._wrong(f"general.alignment must be a power of two from 8 to 65536, got {shown(value)}")
        return value

    def _value(self, type_: int, key: str) -> Any:
        if type_ == _STRING:
            return self._string(key, len(self._data))
        if type_ in _SCALARS:
            return self._scalar(_SCALARS[type_], key)
        if type_ != _ARRAY:
            raise self._wrong(f"metadata {shown(key)}: unknown type {type_}")
        inner = self._scalar("I", key)
        if inner == _STRING:
            count = self._count(f"strings of {key}", (len(self._data) - self._at) // 8)
            return tuple(self._string(key, len(self._data)) for _ in range(count))
        if inner not in _SCALARS:
            raise self._wrong(f"metadata {shown(key)}: lists of type {inner} are not supported")
        width = struct.calcsize("<" + _SCALARS[inner])
        count = self._count(f"values of {key}", (len(self._data) - self._at) // width)
        return struct.unpack(f"<{count}{_SCALARS[inner]}", self._take(count * width, key))

    def _count(self, what: str, most: int) -> int:
        count: int = self._scalar("Q", what)
        if count > most:
            raise self._wrong(f"{count} {shown(what)}, more than {most}")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._scalar("Q", what)
        if length > most:
            raise self._wrong(f"{shown(what)}: a string of {length} bytes, more than {most}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{shown(what)}: not UTF-8") from None

    def _scalar(self, kind: str, what: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind), what))[0]

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._data) - self._at:
            raise self._wrong(
                f"{shown(what)}: ends after {len(self._data)} bytes, {size} more are needed at {self._at}"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: damaged or unsupported GGUF file: {what}")
