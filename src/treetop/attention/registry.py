"""Every backend by its name, and whether it can do what an engine needs, and why not.

The name in `Backend` is the line that registers one: `NAME_backend.py` of this folder says the rest, as its `BACKEND`.
"""

from importlib import import_module
from typing import get_args

import torch

from treetop.attention.capabilities import Capabilities, Need, Refusal
from treetop.attention.contract import BackendSpec
from treetop.kernels.triton_guard import why_not
from treetop.types.config import Backend
from treetop.types.errors import ConfigError


def load(name: str) -> BackendSpec:
    """What a backend's file says of it."""
    spec: BackendSpec = import_module(f"treetop.attention.{name}_backend").BACKEND
    return spec


BACKENDS: dict[str, BackendSpec] = {name: load(name) for name in get_args(Backend) if name != "auto"}


def refusal(name: str, need: Need) -> Refusal | None:
    """Why the backend called `name` cannot serve `need`; None if it can.

    The kind of device comes first, which no other option makes up for; then the limits, which cost nothing to check;
    then GPU and library, which may load or probe something.
    """
    able, probes = BACKENDS[name].capabilities, BACKENDS[name].probes
    if why_not in probes and (problem := why_not(need.device)) is not None:
        return Refusal(problem, _other(name, need.device))
    if need.dtype not in able.dtypes:
        names = " and ".join(_name(dtype) for dtype in able.dtypes)
        return Refusal(
            f"it computes in {names}, not in {_name(need.dtype)}",
            f"use --dtype {_name(able.dtypes[0])} or --attention-backend {_wider(need)}",
        )
    if need.max_in_flight > 1 and able.needs_host_extents:
        reason = "it plans with exact lengths on the host, so only one round may be in flight"
        return Refusal(reason, "use --no-overlap or --attention-backend triton")
    for group in need.groups:
        if group.sparse and not (able.sparse and need.device.type == "cpu"):
            reason = f"sparse attention (DSA) has no kernel for a GPU yet (KV group {group.name})"
            return Refusal(reason, "use --device cpu --attention-backend torch")
        if group.latent is not None:
            if able.latents is not None and group.latent not in able.latents:
                wide = f" with latents {group.latent} wide" if able.latents else ""
                reason = f"it has no kernel for compressed attention (MLA){wide} (KV group {group.name})"
                return Refusal(reason, f"use --attention-backend {'torch' if able.latents else _wider(need)}")
        elif able.head_dims is not None and group.head_dim not in able.head_dims:
            reason = f"it has no kernel for heads {group.head_dim} wide (KV group {group.name})"
            return Refusal(reason, "use --attention-backend torch")
    if able.page_sizes is not None and need.page_size not in (None, *able.page_sizes):
        sizes = ", ".join(str(size) for size in able.page_sizes)
        reason = f"it serves pages of {sizes} tokens, not of {need.page_size}"
        return Refusal(reason, f"use --page-size {max(able.page_sizes)} or --attention-backend triton")
    for probe in probes:
        problem = probe(need.device)
        if problem is not None:
            return Refusal(problem, _other(name, need.device))
    return None


def require(name: str, need: Need) -> Capabilities:
    """The backend's capabilities. Raises ConfigError with the reason and the option to change."""
    problem = refusal(name, need)
    if problem is not None:
        raise ConfigError(f"--attention-backend {name}: {problem.reason}; {problem.remedy}")
    return BACKENDS[name].capabilities


def _other(name: str, device: torch.device) -> str:
    """The nearest backend that works here."""
    works = name != "triton" and why_not(device) is None
    return f"use --attention-backend {'triton' if works else 'torch'}"


def _wider(need: Need) -> str:
    """The fastest backend that computes in this dtype here."""
    fits = need.dtype in BACKENDS["triton"].capabilities.dtypes and why_not(need.device) is None
    return "triton" if fits else "torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
