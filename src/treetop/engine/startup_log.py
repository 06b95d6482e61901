"""What an engine says once it is up: one block for the logger `treetop`, level INFO."""

import torch

from treetop.attention.capabilities import refusal
from treetop.attention.registry import BACKENDS
from treetop.engine.build import EnginePlan
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.graphs import GraphSim, RoundLauncher
from treetop.engine.memory import MemoryUse
from treetop.engine.model_runner import ModelRunner


def start_up_block(
    engine_plan: EnginePlan, runner: ModelRunner, launcher: RoundLauncher, use: MemoryUse, start_s: float
) -> str:
    """Model, tree, memory, backend and why the others were refused, graphs; a line each. start_s: capture and proof."""
    config, layout, shape = engine_plan.config, runner.layout, engine_plan.config.shape
    place, dtype = engine_plan.place.device, engine_plan.place.dtype
    tree = f"tree S={shape.num_steps} k={shape.topk} T={shape.num_draft_tokens}" if runner.drafter else "no draft"
    shared = ""
    if config.tp_size > 1:
        shared = f", which {config.tp_size} ranks share; of rank {engine_plan.place.parallel.rank}:"
    elif config.ep_size > 1:
        shared = f", whose experts {config.ep_size} ranks share; of rank {engine_plan.place.expert_ranks.rank}:"
    refused = [(name, refusal(name, engine_plan.need)) for name in BACKENDS]
    others = [f"{name}: {problem.reason}" for name, problem in refused if problem is not None]
    rows = [
        f"model {config.model}, draft {config.draft or config.algorithm or 'none'},"
        f" {str(dtype).removeprefix('torch.')} on {_name(place)}{shared}",
        f"{tree}; {layout.max_requests} requests of {layout.max_context} tokens, pages of {layout.page_size},"
        f" prefill in steps of {layout.chunk}",
        *use.lines(),
        f"attention {runner.backend.name}" + (f"; not {'; not '.join(others)}" if others else ""),
        _graphs(launcher),
        f"overlap of host and device {'on' if layout.max_in_flight > 1 else 'off'}; capture and "
        f"capacity proof {start_s:.1f} s",
    ]
    return "\n  ".join(["treetop is up", *rows])


def _graphs(launcher: RoundLauncher) -> str:
    if isinstance(launcher, CudaGraphs):
        return f"{len(launcher)} graphs captured in {launcher.seconds:.1f} s"
    return "graphs simulated" if isinstance(launcher, GraphSim) else "rounds run eagerly"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
