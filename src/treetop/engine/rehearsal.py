"""Kernels of the steps to come, compiled before the first of them runs: all cores at once, not one kernel at a time.

A rehearsal records steps into a CUDA graph that is never replayed. While steps are recorded nothing runs on the device,
so nothing is read or written, and our kernels are compiled instead of launched. What can be recorded depends on shapes
alone, so these are the kernels that the steps will launch. No step keeps a tensor that it makes: nothing ever fills it.
"""

from collections.abc import Iterable

import torch
from rich.console import Console

from treetop.engine.cuda_graphs import Run, no_collection
from treetop.kernels.triton_guard import compiling_ahead


@torch.inference_mode()
def rehearse(steps: Iterable[Run]) -> None:
    """Compile the kernels of `steps`, each of which can be recorded before anything ran. A terminal says so."""
    recorded = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed")
    with Console(stderr=True).status("compiling kernels"), no_collection(), compiling_ahead(), recorded:
        for step in steps:
            step()
