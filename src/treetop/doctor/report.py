"""What this machine has, which backend runs which phase and why not, and what a configuration holds."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch

from treetop.attention import auto
from treetop.attention.capabilities import CAPABILITIES, Need, refusal
from treetop.attention.registry import BACKENDS
from treetop.kernels.triton_guard import gpu_traits
from treetop.models.loader import compute_device
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
)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """phases: what it can run here; reason: why none, or what `auto` chooses."""

    name: str
    phases: tuple[str, ...]
    reason: str


def machine() -> list[tuple[str, str]]:
    """Facts of this machine, as (name, value)."""
    features = torch.backends.cpu.get_cpu_capability()
    rows = [
        ("treetop", __version__),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {features}"),
        ("oneDNN", "packs float32 weights" if torch.backends.mkldnn.is_available() else "missing: products are slower"),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    return rows + [(name, _version(name)) for name in LIBRARIES]


def backends() -> list[BackendStatus]:
    """Every backend of the interface, usable or not, and what `auto` makes of them on this machine."""
    device = compute_device("auto")
    rows = []
    for name in BACKENDS:
        able = CAPABILITIES[name]
        problem = refusal(name, Need(able.dtypes[0], device))  # whether it runs at all, whatever the options
        phases = tuple(able.phases) if problem is None else ()
        rows.append(BackendStatus(name, phases, "" if problem is None else problem.reason))
    usable = frozenset(row.name for row in rows if row.phases)
    choice = "torch"
    if auto.FALLBACK in usable:
        table = auto.load_table()
        choice = auto.summary(table, usable) if gpu_traits(device).num_sms == table.num_sms else auto.FALLBACK
    return [*rows, BackendStatus("auto", tuple(Phase), choice)]


def capacity(layout: Layout) -> list[tuple[str, str, str, str]]:
    """Every dimension of a layout, as (name, value, formula, option)."""
    return [(d.name, str(d.value), d.formula, d.option) for d in layout.dimensions().values()]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
