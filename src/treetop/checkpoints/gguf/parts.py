"""A GGUF file, or the parts that it lies in: `NAME-00001-of-00003.gguf` and so on. Needs no PyTorch.

Metadata are those of the first part. Source: llama.cpp's `gguf-split`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from treetop.checkpoints.gguf.header import Header, TensorInfo, read_header
from treetop.types.errors import CheckpointError, shown

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)

File = tuple[Path, int, int]
"""A file as it is: its bytes, and when it was written."""


def split_name(stem: str) -> tuple[str, int, int]:
    """Of a file's name without the ending: the whole's, which part it is, from 1, and of how many; 0 if it is whole."""
    found = _PART.fullmatch(stem)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return stem, 1, 0
    return found[1], int(found[2]), int(found[3])


def part_names(name: str, count: int) -> list[str]:
    """The names of all files, the first first. name, count: of `split_name`."""
    numbers = range(1, count + 1)
    return [f"{name}-{number:05}-of-{count:05}.gguf" for number in numbers] if count else [f"{name}.gguf"]


def missing_part(names: Iterable[str], there: Iterable[str]) -> str | None:
    found = set(there)
    return next((name for name in names if name not in found), None)


def files_of(path: Path) -> tuple[File, ...]:
    """The file, or all parts of which this is the first. Raises CheckpointError for another, or if one is missing."""
    whole, number, count = split_name(path.stem)
    if number != 1:
        raise CheckpointError(f"{path}: part {number} of {count}; give the first, {part_names(whole, count)[0]}")
    return tuple(_as_it_is(path.with_name(name)) for name in part_names(whole, count))


def _as_it_is(path: Path) -> File:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: not readable as GGUF: {error.strerror}") from None
    return path, found.st_size, found.st_mtime_ns


def kept_header(path: Path) -> Header:
    """Of a file or of all its parts, once while they are as they were: a large vocabulary takes a second.

    Raises CheckpointError as `files_of` and `read_header`, and for parts that are not of one file.
    """
    return _header(files_of(path))


@lru_cache(maxsize=2)
def _header(files: tuple[File, ...]) -> Header:
    paths = [path for path, _, _ in files]
    headers = [read_header(path) for path in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _check(header, path, number, len(paths))
        for name, stored in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {shown(name)} is also in {tensors[name].path.name}")
            tensors[name] = stored
    said = {header.metadata.get("split.tensors.count", len(tensors)) for header in headers}
    if said != {len(tensors)}:
        listed = ", ".join(sorted(map(shown, said)))
        raise CheckpointError(f"{paths[0]}: split.tensors.count {listed}: its parts have {len(tensors)} tensors")
    return Header(headers[0].metadata, tensors)


def _check(header: Header, path: Path, number: int, count: int) -> None:
    """number: from 0."""
    said = header.metadata.get("split.count", 1) or 1, header.metadata.get("split.no", 0)
    if said != (count, number):
        raise CheckpointError(
            f"{path}: split.count {shown(said[0])} and split.no {shown(said[1])}, but by its name part {number + 1} of"
            f" {count}"
        )
