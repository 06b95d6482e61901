"""Every backend by its name, and whether it can do what an engine needs, and why not.

The name in `Backend` is the line that registers one: `NAME_backend.py` of this folder says the rest, as its `BACKEND`.
"""

from dataclasses import replace
from importlib import import_module
from typing import get_args

import torch

from treetop.attention.capabilities import BackendRefusal, Capabilities, GroupNeed, Need
from treetop.attention.contract import BackendSpec
from treetop.kernels.triton_guard import why_not
from treetop.types.config import Backend
from treetop.types.errors import ConfigError


def load(name: str) -> BackendSpec:
    """What a backend's file says of it."""
    spec: BackendSpec = import_module(f"treetop.attention.{name}_backend").BACKEND
    return spec


BACKENDS: dict[str, BackendSpec] = {name: load(name) for name in get_args(Backend) if name != "auto"}


def refusal(name: str, need: Need) -> BackendRefusal | None:
    """Why the backend called `name` cannot serve `need`; None if it can.

    The kind of device comes first, which no other option makes up for; then the limits, which cost nothing to check;
    then GPU and library, which may load or probe something.
    """
    able, probes = BACKENDS[name].capabilities, BACKENDS[name].probes
    if why_not in probes and (problem := why_not(need.device)) is not None:
        return BackendRefusal(problem, _other(name, need.device))
    if (refused := _of_numbers(able, need)) is not None:
        return refused
    if need.exact and need.device.type == "cuda" and not able.exact:
        exact = [other for other, spec in BACKENDS.items() if spec.capabilities.exact]
        remedy = "use --exactness ties" + "".join(f" or --attention-backend {other}" for other in exact)
        return BackendRefusal("its bits depend on the batch", remedy)
    if need.max_in_flight > 1 and able.needs_host_extents:
        reason = "it plans with exact lengths on the host, so only one round may be in flight"
        return BackendRefusal(reason, "use --no-overlap or --attention-backend triton")
    if able.compressed_only and need.groups and all(group.latent is None for group in need.groups):
        reason = "it has kernels for compressed attention (MLA) alone, and no layer here has that"
        return BackendRefusal(reason, f"use --attention-backend {_wider(need)}")
    for group in need.groups:
        if (refused := _of_group(able, need, group)) is not None:
            return refused
    if able.page_sizes is not None and need.page_size not in (None, *able.page_sizes):
        sizes = ", ".join(str(size) for size in able.page_sizes)
        reason = f"it serves pages of {sizes} tokens, not of {need.page_size}"
        return BackendRefusal(reason, f"use --page-size {max(able.page_sizes)} or --attention-backend triton")
    for probe in probes:
        problem = probe(need.device)
        if problem is not None:
            return BackendRefusal(problem, _other(name, need.device))
    return None


def exact_backend(need: Need) -> str | None:
    """The backend that serves `need` on a GPU with bits that depend on no batch; None if none does."""
    return next((name for name in BACKENDS if refusal(name, replace(need, exact=True)) is None), None)


def fallback(need: Need) -> str:
    """The backend that serves `auto` where there is no more to choose among."""
    if need.exact and need.device.type == "cuda":
        return exact_backend(need) or "triton"
    return "torch" if refusal("triton", need) is not None else "triton"


def _of_group(able: Capabilities, need: Need, group: GroupNeed) -> BackendRefusal | None:
    """What the layers of a KV group have against a backend."""
    if group.sparse and not able.sparse:
        reason = f"it has no kernel for sparse attention (DSA) (KV group {group.name})"
        return BackendRefusal(reason, f"use --attention-backend {_wider(need)}")
    if group.cap is not None and not able.caps:
        reason = f"it has no kernel for capped scores (softcap) (KV group {group.name})"
        return BackendRefusal(reason, "use --attention-backend torch")
    if group.latent is not None:
        if able.latents is not None and group.latent not in able.latents:
            wide = f" with latents {group.latent} wide" if able.latents else ""
            reason = f"it has no kernel for compressed attention (MLA){wide} (KV group {group.name})"
            return BackendRefusal(
                reason,
                f"use --attention-backend {'torch' if able.latents and not able.compressed_only else _wider(need)}",
            )
        rope_dim = group.head_dim - group.index_dim - group.latent
        if able.rope_dims is not None and rope_dim not in able.rope_dims:
            reason = (
                f"its latents' part with RoPE is {rope_dim} wide, and it has no kernel for that (KV group {group.name})"
            )
            return BackendRefusal(reason, f"use --attention-backend {_wider(need)}")
    elif able.head_dims is not None and group.head_dim not in able.head_dims:
        reason = f"it has no kernel for heads {group.head_dim} wide (KV group {group.name})"
        return BackendRefusal(reason, "use --attention-backend torch")
    return None


def _of_numbers(able: Capabilities, need: Need) -> BackendRefusal | None:
    """What dtypes stand against a backend."""
    if need.dtype not in able.dtypes:
        names = " and ".join(_name(dtype) for dtype in able.dtypes)
        return BackendRefusal(
            f"it computes in {names}, not in {_name(need.dtype)}",
            f"use --dtype {_name(able.dtypes[0])} or --attention-backend {_wider(need)}",
        )
    if need.fp8_kv and not able.fp8_kv:
        return BackendRefusal(
            "it reads no K/V in FP8", f"use --kv-cache-dtype auto or --attention-backend {_wider(need)}"
        )
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
