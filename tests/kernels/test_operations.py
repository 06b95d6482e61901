"""The table of operations: each kernel equals its reference within the row's tolerance, and nothing is left out.

Kernels run on a GPU or in the interpreted session. What each operation must do besides, and where it is hard, has tests
of its own: see `docs/testing.md`.
"""

import importlib
import pkgutil
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import treetop.attention
import treetop.kernels
from support.interpreted import DEVICE, on_gpu_or_interpreted
from support.operation_cases import CASES
from treetop.kernels.table import Op, operations
from treetop.kernels.triton_guard import _probe, gpu_traits
from treetop_debug.kernels import all_kernels, place_of


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return tensors_of([getattr(value, name) for name in value.__dataclass_fields__])
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, tuple | list) else []


def assert_within(op: Op[Any], got: Any, want: Any) -> None:
    """The row's share of the largest value, and a rounding where a result is narrower than float32."""
    pairs = list(zip(tensors_of(got), tensors_of(want), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.dtype == other.dtype or op.tolerance
        share = op.tolerance + (torch.finfo(one.dtype).eps if one.dtype in (torch.float16, torch.bfloat16) else 0)
        largest = float(other.float().abs().nan_to_num(0, 0, 0).max()) if other.is_floating_point() else 0.0
        torch.testing.assert_close(
            one, other, rtol=0, atol=share * largest, equal_nan=True, check_dtype=not op.tolerance, check_stride=False
        )


def test_every_operation_has_a_case():
    assert sorted(CASES) == sorted(operations())


def test_every_kernel_of_the_package_is_in_the_table():
    """So what compiles, counts or checks the kernels of the table leaves none out."""
    found = set()
    for package in (treetop.kernels, treetop.attention):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type(_probe)) and getattr(value, "__name__", "").endswith("_kernel"):
                    found.add(place_of(value))
    assert set(all_kernels()) == found


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_equals_its_reference(name):
    op, ends = operations()[name], []
    with DEVICE:
        for kernel in (False, True):
            torch.manual_seed(3)
            call = CASES[name](kernel)
            run = op.on(gpu_traits(DEVICE)) if kernel else op.reference
            result = run(*call.args, **(call.more if kernel else {}))
            ends.append(call.compared(call.args, result))
    assert_within(op, ends[1], ends[0])
