"""Every Triton kernel of the package, for what counts, checks or compiles them all."""

import importlib
import pkgutil
from typing import Any

import treetop.attention
import treetop.kernels
from treetop.kernels.triton_guard import _probe


def all_kernels() -> dict[str, Any]:
    """By module and name, sorted: what `jit` made and is named so. Empty without Triton."""
    found = {}
    for package in (treetop.kernels, treetop.attention):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type(_probe)) and value.__name__.endswith("_kernel"):
                    found[place_of(value)] = value
    return dict(sorted(found.items()))


def place_of(kernel: Any) -> str:
    """A kernel's module and name; two modules may use one name."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
