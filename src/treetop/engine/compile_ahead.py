"""Kernels of the steps to come, compiled before the first of them runs: all cores at once, not one kernel at a time.

A rehearsal records steps into a CUDA graph that is never replayed. While steps are recorded nothing runs on the device,
so nothing is read or written, and our kernels are compiled instead of launched. What can be recorded depends on shapes
alone, so the steps will launch these kernels; but for few that also depend on how large the pools become, which are
compiled then. No step keeps a tensor that it makes: nothing ever fills it.
"""

from collections.abc import Iterable
from functools import partial

import torch
from rich.console import Console

from treetop.engine.cuda_graphs import Run, greedy_keys
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import run_phases
from treetop.engine.worst_steps import worst_steps
from treetop.kernels.triton_guard import compile_ahead
from treetop.types.sampling import Choice


def rehearse(runner: ModelRunner) -> None:
    """Compile the kernels of the worst steps and of all greedy rounds."""
    max_kv_len = runner.layout.max_committed
    worst = [step for choice in (Choice.FILTER, Choice.LOGPROBS) for step in worst_steps(runner, choice)]
    compile_steps([*worst, *(partial(run_phases, runner, key, max_kv_len) for key in greedy_keys(runner))])


@torch.inference_mode()
def compile_steps(steps: Iterable[Run]) -> None:
    """Compile the kernels of `steps`, each of which can be recorded before anything ran. A terminal says so.

    Relaxed: what runs for the first time may load and allocate while it is recorded.
    """
    recorded = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="relaxed")

    def record() -> None:
        with recorded:
            for step in steps:
                step()

    with Console(stderr=True).status("compiling kernels"):
        compile_ahead(record)
