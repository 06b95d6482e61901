"""What this machine has, which backend runs which phase and why not, and what a configuration holds."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch

from treetop.attention import auto
from treetop.attention.registry import BACKENDS, refusal
from treetop.engine.startup.exactness import sums_words, why_not_exact
from treetop.engine.startup.plan import EnginePlan
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.layout import Layout
from treetop.types.phase import Phase
from treetop.version import __version__

LIBRARIES = (
    "torch",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
    "flashinfer-python",
    "flash-attn-3",
    "flash-attn-4",
    "nixl-cu12",
    "nixl-cu13",
)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """phases: what it can run here.
    reason: why none, or what `auto` chooses.
    chosen: it serves.
    """

    name: str
    phases: tuple[str, ...]
    reason: str
    chosen: bool


def machine(device: torch.device) -> list[tuple[str, str]]:
    """Facts of this machine, as (name, value). device: the one that is asked about."""
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [
        ("treetop", __version__),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}"),
        ("oneDNN", "packs float32 weights" if torch.backends.mkldnn.is_available() else "missing: products are slower"),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
        ("computes on", device.type),
    ]
    return rows + [(name, _version(name)) for name in LIBRARIES]


def backends(engine_plan: EnginePlan) -> list[BackendStatus]:
    """Every backend of the interface, usable or not for what this configuration needs, and what `auto` makes of them.

    Raises ConfigError with the reason if the one that `--attention-backend` names cannot serve.
    """
    need = engine_plan.need
    chosen = auto.make_backend(engine_plan.config.attention_backend, need).name
    rows = []
    for name, backend in BACKENDS.items():
        problem = refusal(name, need)
        phases = backend.capabilities.phases if problem is None else ()
        rows.append(BackendStatus(name, phases, "" if problem is None else problem.reason, name == chosen))
    usable = frozenset(row.name for row in rows if row.phases and BACKENDS[row.name].why_not_chosen(need) is None)
    choice = "torch"
    if auto.FALLBACK in usable:
        table = auto.load_table()
        choice = auto.summary(table, need, usable) if table.holds_for(gpu_traits(need.device)) else auto.FALLBACK
    return [*rows, BackendStatus("auto", tuple(Phase), choice, chosen not in BACKENDS)]


def checkpoint(engine_plan: EnginePlan) -> list[tuple[str, str]]:
    """What was looked at of each checkpoint, weights unread. Raises CheckpointError for a tensor that is wrong."""
    if engine_plan.place.dummy:
        return [("target", "random weights (--load-format dummy)")]
    words = "tensors of the right names and shapes; values unread"
    rows = [("target", f"{engine_plan.target.folder}: {engine_plan.target.check()} {words}")]
    if engine_plan.draft is not None:
        rows.append(
            (
                "draft",
                f"{engine_plan.draft.folder or engine_plan.config.algorithm}: {engine_plan.draft.check()} {words}",
            )
        )
    return rows


def capacity(layout: Layout) -> list[tuple[str, str, str, str]]:
    """Every dimension of a layout, as (name, value, formula, option)."""
    return [(d.name, str(d.value), d.formula, d.option) for d in layout.dimensions().values()]


def exactness_words(engine_plan: EnginePlan) -> str:
    """The exactness in force, and whether `bits` could be; for that its probes run."""
    config = engine_plan.config
    if config.exactness == "bits":
        return "; ".join(["exactness bits: every logit is that of plain decoding", *sums_words(engine_plan.place)])
    place, adapters = engine_plan.place, engine_plan.adapters
    problem = why_not_exact(config, engine_plan.target, place, adapters)
    bits = "--exactness bits can serve" if problem is None else f"no bits: {problem.reason}"
    return f"exactness {config.exactness}; {bits}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
