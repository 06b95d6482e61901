"""PyTorch's own weight files, read as safetensors files are: names, shapes, and tensors whole or in parts.

They are pickles, so they are unpickled by `torch.load(weights_only=True)` alone, which makes tensors and plain
containers and runs nothing.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.types.errors import CheckpointError

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""


class PickledTensors:
    """The part of `safetensors.safe_open` that reading needs. Tensors stay mapped from the file while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for what is no pickle of tensors by name alone."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of newer pickle protocols: what cannot be read is an error
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_map(path))
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path}: holds more than tensors, and is not unpickled: {_first(error)}") from None
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged or truncated PyTorch file: {_first(error)}") from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
        ):
            raise CheckpointError(f"{path}: holds something else than tensors by name")
        self._tensors: dict[str, Tensor] = loaded

    def __enter__(self) -> "PickledTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self.get_tensor(name))


class _PickledSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _KINDS.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, at: Any) -> Tensor:
        return self._tensor[at]


def _can_map(path: Path) -> bool:
    """Files of PyTorch since 1.6 are archives, which can be mapped; older ones are read whole."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
