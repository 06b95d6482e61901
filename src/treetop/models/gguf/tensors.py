"""A GGUF file's tensors, decoded one at a time as they are asked for, to the bits of the library `gguf`."""

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from treetop.models.gguf.header import Header, read_header
from treetop.types.errors import ConfigError

_MISSING = "GGUF files need the library gguf; pip install treetop[gguf]"


class GgufTensors:
    """Tensors by the names they have in the file. Only the one that is asked for is in memory."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a damaged file, and ConfigError without the library."""
        self._path = path
        self.header: Header = read_header(path)
        try:
            self._gguf, self._numpy = import_module("gguf"), import_module("numpy")
        except ImportError:
            raise ConfigError(_MISSING) from None

    def keys(self) -> list[str]:
        return list(self.header.tensors)

    def get_tensor(self, name: str) -> Tensor:
        """In float32, of the shape that the file says, its first dimension the one of the longest stride."""
        stored = self.header.tensors[name]
        raw = self._numpy.fromfile(self._path, dtype="uint8", count=stored.size, offset=stored.start)
        kind = self._gguf.GGMLQuantizationType(stored.type)
        if kind.name in ("F32", "F16"):
            decoded = raw.view("float32" if kind.name == "F32" else "float16").astype("float32")
        else:
            decoded = self._gguf.dequantize(
                raw.reshape(-1, stored.size // (stored.shape[0] if len(stored.shape) > 1 else 1)), kind
            )
        return torch.from_numpy(decoded.reshape(stored.shape))
