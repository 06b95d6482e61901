"""What an engine says once it is up: one block for the logger `treetop`, level INFO."""

from typing import Any

import torch

from treetop.attention.auto import AutoBackend
from treetop.attention.capabilities import Need
from treetop.attention.contract import AttentionBackend
from treetop.attention.registry import BACKENDS, refusal
from treetop.checkpoints.params import about_activations
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.graphs import GraphSim
from treetop.engine.memory import MemoryUse
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundLauncher
from treetop.engine.startup.exactness import sums_words
from treetop.engine.startup.plan import EnginePlan
from treetop.types.layout import Layout
from treetop.weights.cpu_products import ChosenProduct


def start_up_block(
    engine_plan: EnginePlan,
    runner: ModelRunner,
    products: tuple[ChosenProduct, ...],
    launcher: RoundLauncher,
    use: MemoryUse,
    start_s: float,
) -> str:
    """Model, tree, memory, whose sums, backend and those that do not serve, graphs; a line each. start_s: capture and
    proof."""
    config, layout, shape = engine_plan.config, runner.layout, engine_plan.config.shape
    place, dtype = engine_plan.place.device, engine_plan.place.dtype
    tree = f"tree S={shape.num_steps} k={shape.topk} T={shape.num_draft_tokens}" if runner.drafter else "no draft"
    if shape.node_budget:
        tree += f", {shape.node_budget} nodes of all rows"
    whole = engine_plan.place
    shared = f", which {config.tp_size} ranks share" if config.tp_size > 1 else ""
    if config.ep_size > 1:
        shared += f", whose experts {config.ep_size} engines share; of engine {whole.expert_ranks.rank}:"
    elif config.tp_size > 1:
        shared += f"; of rank {whole.parallel.rank}:"
    rows = [
        f"model {config.model}, draft {config.draft or config.algorithm or 'none'},"
        f" {str(dtype).removeprefix('torch.')} on {_name(place)}{shared}",
        f"{tree}; {layout.max_requests} requests of {layout.max_context} tokens, pages of {layout.page_size},"
        f" prefill in steps of {layout.chunk}",
        *([engine_plan.rows] if engine_plan.rows else []),
        *use.lines(),
        "; ".join([f"exactness {config.exactness}", *sums_words(engine_plan.place, products)]),
        *([about] if (about := about_activations(whole.held(engine_plan.target.params))) else []),
        attention_words(serving_words(runner.backend), engine_plan.need),
        _graphs(launcher),
        *([_checkpoints(layout)] if layout.state_groups else []),
        f"overlap of host and device {'on' if layout.max_in_flight > 1 else 'off'}; capture and "
        f"self-tests {start_s:.1f} s",
    ]
    return "\n  ".join(["treetop is up", *rows])


def serving_words(backend: AttentionBackend[Any, Any]) -> str:
    """A backend's name, and of `auto` those that it composes."""
    return f"auto ({' and '.join(backend.parts)})" if isinstance(backend, AutoBackend) else backend.name


def attention_words(serving: str, need: Need) -> str:
    """The backend that serves, those that cannot, and why where that is the size of a page, which costs nothing."""
    refused = {name: why for name in BACKENDS if (why := refusal(name, need)) is not None}
    words = f"attention {serving}"
    if refused:
        words += f"; not {', '.join(refused)} (treetop doctor says why)"
    by_page = [f"; {name}: {why.reason}" for name, why in refused.items() if "--page-size" in why.remedy]
    return words + "".join(by_page)


def _checkpoints(layout: Layout) -> str:
    if not layout.checkpoints:
        return "prefix cache off: no checkpoints of recurrent layers' states are kept"
    return f"prefix cache: {layout.checkpoints} checkpoints of states, one every {layout.checkpoint_every} tokens"


def _graphs(launcher: RoundLauncher) -> str:
    if isinstance(launcher, CudaGraphs):
        memory = "" if launcher.memory is None else f": {launcher.memory}"
        return f"{len(launcher)} graphs captured in {launcher.seconds:.1f} s{memory}"
    return "graphs simulated" if isinstance(launcher, GraphSim) else "rounds run eagerly"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
