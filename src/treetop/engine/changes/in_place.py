"""New numbers in the memory of a model that runs: captured rounds read them there, and are kept.

Two models of one architecture, made the same way, are alike but for their numbers. Where one object of them is not,
such as a weight whose outliers fit no list of its copy in 12 bits, nothing is copied.
"""

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.gemm.lossless_weights import LosslessWeight
from treetop.kernels.table import Ops
from treetop.types.errors import ConfigError
from treetop.weights.format import UpdatedInPlace

_ONE_ONLY = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, type, functools._lru_cache_wrapper, Ops)
"""What both share."""
_SHARED = ("treetop.parallel", "treetop.distributed", "torch", "triton")
"""Packages whose objects are both's."""
_VALUES = (str, bytes, int, float, complex, slice, Enum, torch.dtype, torch.device, type(None))
Copies = list[tuple[Tensor, Tensor]]


def copies_between(old: Any, new: Any) -> Copies | None:
    """Pairs of tensors, of which each first is to have the second's numbers; None where something else differs."""
    walk = _SideBySide()
    return walk.copies if walk.alike(old, new) else None


@torch.no_grad()
def copy_all(copies: Copies) -> None:
    for old, new in copies:
        old.copy_(new)


class _SideBySide:
    """Two objects, side by side."""

    def __init__(self) -> None:
        self.copies: Copies = []
        self._seen = dict[int, tuple[Any, Any]]()  # holds both, so that no number is given twice

    def alike(self, old: Any, new: Any) -> bool:
        """Whether they differ in numbers of tensors alone."""
        stack = [(old, new)]
        while stack:
            old, new = stack.pop()
            if old is new or isinstance(old, _ONE_ONLY):
                if old is not new and not isinstance(old, Ops):
                    return False
                continue
            if id(old) in self._seen:
                if self._seen[id(old)][1] is not new:
                    return False
                continue
            if type(old) is not type(new):
                return False
            self._seen[id(old)] = old, new
            inner = self._inside(old, new)
            if inner is None:
                return False
            stack += inner
        return True

    def _inside(self, old: Any, new: Any) -> list[tuple[Any, Any]] | None:
        """What two objects of one type hold; None if they differ themselves."""
        if isinstance(old, PurePath):  # where the numbers were read
            return []
        if isinstance(old, Tensor):
            return self._tensors(old, new)
        if isinstance(old, UpdatedInPlace):
            return old.beside(new)
        if isinstance(old, LosslessWeight):
            return self._compressed(old, new)
        if isinstance(old, _VALUES):
            return [] if old == new else None
        if isinstance(old, Mapping):
            return [(old[key], new[key]) for key in old] if [*old] == [*new] else None
        if isinstance(old, Sequence):
            return [*zip(old, new, strict=True)] if len(old) == len(new) else None
        if isinstance(old, set | frozenset):
            return [] if old == new else None
        if isinstance(old, types.FunctionType):
            cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (old, new)]
            return (
                [*zip(*cells, strict=True), (old.__defaults__, new.__defaults__)]
                if old.__code__ is new.__code__
                else None
            )
        if isinstance(old, types.MethodType):
            return [(old.__self__, new.__self__)] if old.__func__ is new.__func__ else None
        if isinstance(old, functools.partial):
            return [(old.func, new.func), (old.args, new.args), (old.keywords, new.keywords)]
        if type(old).__module__.startswith(_SHARED) and not isinstance(old, torch.nn.Module):
            return [] if old == new else None
        return self._members(old, new)

    def _members(self, old: Any, new: Any) -> list[tuple[Any, Any]] | None:
        """A text that no comparison counts says where numbers were read, as a path does."""
        told = {each.name for each in fields(old) if not each.compare} if is_dataclass(old) else set[str]()
        slots = [name for kind in type(old).__mro__ for name in _slots(kind)]
        mine, theirs = (
            {**{name: getattr(each, name, None) for name in slots}, **getattr(each, "__dict__", {})}
            for each in (old, new)
        )
        if [*mine] != [*theirs]:
            return None
        return [(mine[name], theirs[name]) for name in mine if not (name in told and isinstance(mine[name], str))]

    def _tensors(self, old: Tensor, new: Tensor) -> list[tuple[Any, Any]] | None:
        if old.layout is not torch.strided or new.layout is not torch.strided:  # a library's own order
            return None
        alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
        if not alike or old.stride() != new.stride():
            return None
        if old.data_ptr() != new.data_ptr():
            self.copies.append((old, new))
        return []

    def _compressed(self, old: LosslessWeight, new: LosslessWeight) -> list[tuple[Any, Any]] | None:
        """Its lists have room for more than they hold. Which launches serve stays as it is."""
        count = int(new.starts[-1])
        if old.gated is not new.gated or count > len(old.lines):
            return None
        for name in ("lines", "columns", "values"):
            self.copies.append((getattr(old, name)[:count], getattr(new, name)[:count]))
        return [(getattr(old, name), getattr(new, name)) for name in ("words", "scale", "starts")]


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    named = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def check_room(need: int, free: int) -> None:
    """Raises ConfigError where new weights do not fit beside those in force, nor in the place of K/V.

    need, free: bytes. free: with all that may go for them.
    """
    if need > free:
        raise ConfigError(
            f"update_weights: the new weights need {need / 2**30:.1f} GiB beside those in force, have"
            f" {free / 2**30:.1f}; lower --mem-fraction-static, or sleep before and wake the weights alone"
        )
