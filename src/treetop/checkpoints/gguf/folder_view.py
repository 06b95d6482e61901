"""A GGUF file read as a folder of the hub: its config, its tensors by the hub's names, rows in the hub's order."""

from pathlib import Path
from typing import Any

from torch import Tensor

from treetop.checkpoints.gguf.architectures import UNREAD, architecture, config_of, expert_names, hub_name
from treetop.checkpoints.gguf.header import TYPES
from treetop.checkpoints.gguf.tensors import GgufTensors
from treetop.types.errors import CheckpointError

_MAX_NAMES = 2**18
_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose rows llama.cpp interleaves, and the number of their heads."""


class GgufFolder:
    """The part of `safetensors.safe_open` that reading needs. Tensors are decoded to float32, one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as the file's head, its config and its tensors' names are checked."""
        self._file, self._path = GgufTensors(path), path
        self.config = config_of(self._file.header, path)
        self._interleaved = architecture(self._file.header, path).interleaved
        self._names: dict[str, tuple[str, int | None]] = {}
        for name, stored in self._file.header.tensors.items():
            experts = expert_names(name, stored.shape, path)
            self._names.update({each: (name, expert) for expert, each in enumerate(experts)})
            if len(self._names) > _MAX_NAMES:
                raise CheckpointError(f"{path}: holds more than {_MAX_NAMES} tensors, each expert's counted")
            if not experts and name not in UNREAD:
                self._names[hub_name(name, path)] = (name, None)

    def __enter__(self) -> "GgufFolder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._names)

    def get_tensor(self, name: str) -> Tensor:
        (file_name, expert), heads = self._names[name], self._turned(name)
        if expert is not None:
            return self._file.rows(file_name, expert, expert + 1)[0]
        tensor = self._file.get_tensor(file_name)
        return self._halves(tensor, name, self.config[heads]) if heads else tensor

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self, name)

    def stored(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type, as the file says."""
        file_name, expert = self._names[name]
        found = self._file.header.tensors[file_name]
        return found.shape if expert is None else found.shape[1:], TYPES[found.type][0]

    def part(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """A part of a tensor; of what is wanted by rows no others are read, where they lie as they are wanted."""
        rows, (file_name, expert) = at[0].indices(self.stored(name)[0][0]), self._names[name]
        if expert is not None or self._turned(name) or rows[2] != 1:
            return self.get_tensor(name)[at]
        return self._file.rows(file_name, rows[0], max(rows[0], rows[1]))[(slice(None), *at[1:])]

    def _turned(self, name: str) -> str | None:
        return _TURNED.get(name.split(".")[-2]) if self._interleaved else None

    def _halves(self, tensor: Tensor, name: str, heads: int) -> Tensor:
        """Rows of each head from pairs side by side to the first halves of all pairs, then the second."""
        if heads < 1 or len(tensor) % (2 * heads):
            raise CheckpointError(f"{self._path}: tensor {name} has {len(tensor)} rows for {heads} heads")
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class _Slice:
    """A tensor that is not read yet."""

    def __init__(self, folder: GgufFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def get_shape(self) -> list[int]:
        return list(self._folder.stored(self._name)[0])

    def get_dtype(self) -> str:
        return self._folder.stored(self._name)[1]

    def __getitem__(self, at: Any) -> Tensor:
        return self._folder.part(self._name, at if isinstance(at, tuple) else (at,))
