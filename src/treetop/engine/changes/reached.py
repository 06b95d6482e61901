"""Memory of a GPU that objects reach."""

import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.table import Ops

Storage = torch.UntypedStorage


def storages_of(*models: Any) -> list[Storage]:
    """Memory of a GPU that these objects reach, once each; not what is an operation's or a group's of ranks."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(models)}
    return [storage for at, storage in found.items() if at and storage.device.type == "cuda"]


_SHUT = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, type, functools._lru_cache_wrapper, Ops)


def _tensors(roots: Any) -> Iterator[Tensor]:
    """All that objects, containers, closures and partial functions lead to."""
    seen, stack = set[int](), [roots]
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, _SHUT):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, types.FunctionType):
            stack.extend(cell.cell_contents for cell in each.__closure__ or ())
            stack.extend(each.__defaults__ or ())
        elif isinstance(each, types.MethodType):
            stack += [each.__self__, each.__func__]
        elif isinstance(each, functools.partial):
            stack += [each.func, each.args, each.keywords]
        elif not type(each).__module__.startswith(("treetop.parallel", "treetop.distributed", "torch", "triton")):
            stack.extend(gc.get_referents(each))
