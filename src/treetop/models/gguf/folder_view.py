"""A GGUF file read as a folder of the hub: its config, its tensors by the hub's names, rows in the hub's order."""

from pathlib import Path

from torch import Tensor

from treetop.models.gguf.architectures import architecture, config_of, hub_name
from treetop.models.gguf.tensors import GgufTensors
from treetop.types.errors import CheckpointError

_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose rows llama.cpp interleaves, and the number of their heads."""


class GgufFolder:
    """Tensors are decoded to float32, one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as the file's head, its config and its tensors' names are checked."""
        self._file, self._path = GgufTensors(path), path
        self.config = config_of(self._file.header, path)
        self._interleaved = architecture(self._file.header, path).interleaved
        self._names = {hub_name(name, path): name for name in self._file.header.tensors}

    def keys(self) -> list[str]:
        return list(self._names)

    def get_tensor(self, name: str) -> Tensor:
        tensor, heads = self._file.get_tensor(self._names[name]), _TURNED.get(name.split(".")[-2])
        return self._halves(tensor, name, self.config[heads]) if self._interleaved and heads else tensor

    def _halves(self, tensor: Tensor, name: str, heads: int) -> Tensor:
        """Rows of each head from pairs side by side to the first halves of all pairs, then the second."""
        if heads < 1 or len(tensor) % (2 * heads):
            raise CheckpointError(f"{self._path}: tensor {name} has {len(tensor)} rows for {heads} heads")
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
