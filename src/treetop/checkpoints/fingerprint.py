"""What tells a checkpoint from another without reading all of it."""

import hashlib
from pathlib import Path

_ENDS, _BLOCKS, _BLOCK = 1 << 16, 64, 1 << 12
"""Bytes at both ends of a file that are read, and how many blocks of how many bytes between them."""
_KINDS = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_LEFT_OUT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "acceptance.json",
)
"""What does not change a row's state."""


def fingerprint(folder: Path) -> str:
    """Of a checkpoint's configuration and weights: names and sizes of the files, their ends, and blocks between them.

    Copies of a folder have one fingerprint, wherever they lie. A training step changes nearly every weight, so some
    of what is read.
    """
    found = hashlib.sha256()
    for file in read_files(folder):
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for offset, length in _samples(size):
                opened.seek(offset)
                found.update(opened.read(length))
    return found.hexdigest()[:32]


def read_files(folder: Path) -> list[Path]:
    """The files that a row's state depends on, by name."""
    files = [each for each in folder.iterdir() if each.suffix in _KINDS and each.name not in _LEFT_OUT]
    return sorted(files, key=lambda each: each.name)


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is read of a file; all of a small one."""
    if size <= 2 * _ENDS + _BLOCKS * _BLOCK:
        return [(0, size)]
    between = size - 2 * _ENDS - _BLOCK
    blocks = [(_ENDS + i * between // _BLOCKS, _BLOCK) for i in range(_BLOCKS)]
    return [(0, _ENDS), *blocks, (size - _ENDS, _ENDS)]
