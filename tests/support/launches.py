"""Launches of kernels, noted and not run: what they would be launched with, on any machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor

from treetop.kernels.table import operations


@dataclass(frozen=True)
class Launch:
    """kernel: its name. grid: programs. arguments: by name, options of the launch among them, tensors as shapes."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class _Noted:
    def __init__(self, kernel: Any, noted: list[Launch]) -> None:
        self.fn = getattr(kernel, "fn", kernel)
        self._noted = noted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            names = list(signature(self.fn).parameters)
            given = {**dict(zip(names, arguments, strict=False)), **options}
            shapes = {key: tuple(each.shape) if isinstance(each, Tensor) else each for key, each in given.items()}
            self._noted.append(Launch(self.fn.__name__, tuple(grid), shapes))

        return launch


@contextmanager
def noted_launches(patch: Any) -> Iterator[list[Launch]]:
    """Kernels of the table that are launched inside are noted and not run."""
    noted: list[Launch] = []
    with patch.context() as patched:
        for op in operations().values():
            for kernel in op.launches:
                function = getattr(kernel, "fn", kernel)
                patched.setattr(sys.modules[function.__module__], function.__name__, _Noted(kernel, noted))
        yield noted
