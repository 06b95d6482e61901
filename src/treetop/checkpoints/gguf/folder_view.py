"""A GGUF file read as a folder of the hub: its config, its tensors by the hub's names, rows in the hub's order."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from treetop.checkpoints.gguf.architectures import architecture, config_of
from treetop.checkpoints.gguf.parts import File, files_of
from treetop.checkpoints.gguf.tensors import GgufTensors, View
from treetop.checkpoints.gguf.views import views
from treetop.weights.format import Span


class GgufFolder:
    """The part of `safetensors.safe_open` that reading needs. Tensors are decoded to float32, one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as the file's head, its config and its tensors' names are checked."""
        self.config, self._views = _opened(files_of(path))

    def __enter__(self) -> "GgufFolder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._views)

    def get_tensor(self, name: str) -> Tensor:
        view = self._views[name]
        return view.rows(0, view.shape[0])

    def get_blocks(self, name: str, span: Span | None) -> Tensor:
        """Of a tensor [n, k] that keeps its codes, or a part: blocks [n, k / 32, bytes] uint8."""
        view = self._views[name]
        if view.blocks is None:
            raise KeyError(name)
        if span is None or span.axis == 1:
            blocks = view.blocks(0, view.shape[0])
            each = view.shape[1] // blocks.shape[1]
            return blocks if span is None else blocks[:, span.start // each : -(-span.stop // each)]
        return view.blocks(span.start, span.stop)

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self._views[name])


@lru_cache(maxsize=2)
def _opened(files: tuple[File, ...]) -> tuple[dict[str, Any], dict[str, View]]:
    """Config and tensors, once while the file is as it was: it may have a view for each of 20,000 experts' tensors."""
    path = files[0][0]
    file = GgufTensors(path)
    config = config_of(file.header, path)
    return config, views(file, architecture(file.header, path), config, path)


class _Slice:
    """A tensor that is not read yet. Of what is wanted by rows no others are read, where they lie so in the file."""

    def __init__(self, view: View) -> None:
        self._view = view

    def get_shape(self) -> list[int]:
        return list(self._view.shape)

    def get_dtype(self) -> str:
        return self._view.kind

    def __getitem__(self, at: slice | tuple[slice, ...]) -> Tensor:
        first, *others = at if isinstance(at, tuple) else (at,)
        start, stop, step = first.indices(self._view.shape[0])
        if step != 1:
            return self._view.rows(0, self._view.shape[0])[(first, *others)]
        return self._view.rows(start, max(start, stop))[(slice(None), *others)]
