"""The table of operations, with all references or all kernels, whatever the device."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from treetop.engine.model_runner import ModelRunner
from treetop.kernels.table import OpContext, Ops, operations
from treetop.kernels.triton_guard import gpu_traits
from treetop_debug.patching import wrapped_runner


def reference_ops() -> Ops:
    return Ops(OpContext(torch.device("cpu"), torch.float32))


def kernel_ops(device: torch.device) -> Ops:
    """On a GPU, or in Triton's interpreter."""
    ops = reference_ops()
    vars(ops).update({name: op.on(gpu_traits(device)) for name, op in operations().items()})
    return ops


def with_op(name: str, function: Any) -> AbstractContextManager[None]:
    """Engines that are made inside have this function for an operation of their rounds."""

    def change(runner: ModelRunner) -> ModelRunner:
        ops = reference_ops()
        vars(ops).update({**vars(runner.ops), name: function})
        return replace(runner, ops=ops)

    return wrapped_runner(change)
