"""A GGUF file's tensors, decoded one at a time as they are asked for, to the bits of the library `gguf`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.checkpoints.gguf.header import TYPES, Header, TensorInfo
from treetop.checkpoints.gguf.parts import kept_header
from treetop.types.errors import CheckpointError, ConfigError
from treetop.version import DISTRIBUTION

_MISSING = f"GGUF files need the library gguf; pip install {DISTRIBUTION}[gguf]"


@dataclass(frozen=True)
class View:
    """A tensor as a folder of the hub has it, not read yet.

    kind: as it is stored, in the words of safetensors or of the file.
    rows: those from one to another along the first dimension.
    blocks: the same as they are stored, uint8 [rows, blocks, bytes], of what keeps its codes.
    """

    shape: tuple[int, ...]
    kind: str
    rows: Callable[[int, int], Tensor]
    blocks: Callable[[int, int], Tensor] | None = None


class GgufTensors:
    """Tensors by the names they have in the file. Only the one that is asked for is in memory."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a damaged file, and ConfigError without the library."""
        self.path = path
        self.header: Header = kept_header(path)
        try:
            self._gguf, self._numpy = import_module("gguf"), import_module("numpy")
        except ImportError:
            raise ConfigError(_MISSING) from None

    def keys(self) -> list[str]:
        return list(self.header.tensors)

    def get_tensor(self, name: str) -> Tensor:
        """In float32, of the shape that the file says, its first dimension the one of the longest stride."""
        return self.rows(name, 0, self.header.tensors[name].shape[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Those along the first dimension, as `get_tensor` gives them, without reading others."""
        stored = self.header.tensors[name]
        if len(stored.shape) == 1:  # blocks may lie across numbers
            return self._decoded(stored, 0, 1, stored.size).view(-1)[start:stop]
        size = stored.size // stored.shape[0]
        return self._decoded(stored, start, stop - start, size).view(-1, *stored.shape[1:])

    def blocks(self, name: str, start: int, stop: int) -> Tensor:
        """Those rows as they are stored, uint8 [rows, ..., blocks, bytes of a block], of two dimensions or more."""
        stored = self.header.tensors[name]
        size = stored.size // stored.shape[0]
        _, numbers, width = TYPES[stored.type]
        raw = self._read(stored, start * size, (stop - start) * size)
        return torch.from_numpy(raw).view(stop - start, *stored.shape[1:-1], stored.shape[-1] // numbers, width)

    def _decoded(self, stored: TensorInfo, start: int, rows: int, size: int) -> Tensor:
        """Rows of so many bytes each, from one of the tensor's on."""
        raw = self._read(stored, start * size, rows * size)
        kind: Any = self._gguf.GGMLQuantizationType(stored.type)
        if kind.name in ("F32", "F16"):
            return torch.from_numpy(raw.view("float32" if kind.name == "F32" else "float16").astype("float32"))
        return torch.from_numpy(self._gguf.dequantize(raw.reshape(rows, size), kind))

    def _read(self, stored: TensorInfo, start: int, size: int) -> Any:
        """Bytes of the file, as an array of its own."""
        raw = self._numpy.fromfile(stored.path, dtype="uint8", count=size, offset=stored.start + start)
        if raw.size != size:
            raise CheckpointError(
                f"{stored.path}: changed while it was read: it ends at {stored.start + start + raw.size}"
            )
        return raw
