"""What each backend can do, and the one function that says whether it can do what an engine needs, and why not."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from treetop.attention import libraries
from treetop.kernels.triton_guard import why_not
from treetop.types.errors import ConfigError
from treetop.types.ids import GroupName
from treetop.types.phase import Phase

_DECODE = (Phase.DRAFT, Phase.VERIFY, Phase.EXTEND)
_ALL = (Phase.PREFILL, *_DECODE)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's limits, as data.

    head_dims, page_sizes: None is any. planes: of K/V, see `types.kv.KVFormat`. own_windows: it applies a window by
    position itself, trees included; without it layers with a window run on the Triton kernel. own_sinks: its kernel
    takes attention sinks; without it they come in the merge, and after `causal` from its lse. captures: its calls may
    be recorded in a CUDA graph. captures_first_call: also the first one, in which a library may compile or load.
    needs_host_extents: exact lengths on the host before a round (`plan_round`), so only one round may be in flight.
    phases: it serves.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    planes: tuple[int, ...] = (2,)
    own_windows: bool = True
    own_sinks: bool = True
    captures: bool = True
    captures_first_call: bool = False
    needs_host_extents: bool = False
    phases: tuple[Phase, ...] = _ALL


CAPABILITIES: dict[str, Capabilities] = {
    # PyTorch's kernels gather as many positions as the bound says: a captured round would gather the whole context.
    "torch": Capabilities((torch.float64, torch.float32, *_HALF), planes=(1, 2), captures=False),
    "triton": Capabilities(
        (torch.float32, *_HALF), head_dims=tuple(range(2, 257)), planes=(1, 2), captures_first_call=True,
    ),
    # With pages of 128 tokens and more FlashAttention-3 loads whole pages, also what nobody wrote there.
    "fa3": Capabilities(
        _HALF, head_dims=tuple(range(8, 257, 8)), page_sizes=(1, 2, 4, 8, 16, 32, 64), own_windows=False,
        own_sinks=False, captures_first_call=True,
    ),
    "flashinfer": Capabilities(
        _HALF, head_dims=(64, 128, 256), own_windows=False, own_sinks=False, needs_host_extents=True,
    ),
    "fa4": Capabilities(
        _HALF, head_dims=(64, 96, 128), page_sizes=(1, 2, 4, 8, 16, 32, 64), own_windows=False, own_sinks=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """The layers of one KV group, as attention sees them."""

    name: GroupName
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    planes: int = 2


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine asks of its backend. page_size None and no groups: not known yet. max_in_flight: rounds in flight.

    rows, queries: of the largest phase of a round, padding included, and in each of its rows; 0 without rounds.
    """

    dtype: torch.dtype
    device: torch.device
    page_size: int | None = None
    groups: tuple[GroupNeed, ...] = ()
    max_in_flight: int = 1
    rows: int = 0
    queries: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend cannot serve, in one sentence, and the option to change."""

    reason: str
    remedy: str


def refusal(name: str, need: Need) -> Refusal | None:
    """Why the backend called `name` cannot serve `need`; None if it can.

    The kind of device comes first, which no other option makes up for; then the limits, which cost nothing to check;
    then GPU and library, which may load or probe something.
    """
    able = CAPABILITIES[name]
    if why_not in _PROBES[name] and (problem := why_not(need.device)) is not None:
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
        if able.head_dims is not None and group.head_dim not in able.head_dims:
            reason = f"it has no kernel for heads {group.head_dim} wide (KV group {group.name})"
            return Refusal(reason, "use --attention-backend torch")
        if group.planes not in able.planes:
            reason = f"it has no kernel for keys that are values too (KV group {group.name})"
            return Refusal(reason, f"use --attention-backend {_wider(need)}")
    if able.page_sizes is not None and need.page_size not in (None, *able.page_sizes):
        sizes = ", ".join(str(size) for size in able.page_sizes)
        reason = f"it serves pages of {sizes} tokens, not of {need.page_size}"
        return Refusal(reason, f"use --page-size {max(able.page_sizes)} or --attention-backend triton")
    for probe in _PROBES[name]:
        problem = probe(need.device)
        if problem is not None:
            return Refusal(problem, _other(name, need.device))
    return None


def require(name: str, need: Need) -> Capabilities:
    """The backend's capabilities. Raises ConfigError with the reason and the option to change."""
    problem = refusal(name, need)
    if problem is not None:
        raise ConfigError(f"--attention-backend {name}: {problem.reason}; {problem.remedy}")
    return CAPABILITIES[name]


def _hopper(device: torch.device) -> str | None:
    """Compute capability 9, which the kernels are compiled for."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return None if major == 9 else f"its kernels are for GPUs of compute capability 9.x, this one has {major}.{minor}"


def _other(name: str, device: torch.device) -> str:
    """The nearest backend that works here."""
    works = name != "triton" and why_not(device) is None
    return f"use --attention-backend {'triton' if works else 'torch'}"


def _wider(need: Need) -> str:
    """The fastest backend that computes in this dtype here."""
    fits = need.dtype in CAPABILITIES["triton"].dtypes and why_not(need.device) is None
    return "triton" if fits else "torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PROBES: dict[str, tuple[Callable[[torch.device], str | None], ...]] = {
    "torch": (),
    "triton": (why_not,),
    # The others need Triton's kernels too: for the tail and the merge, and for layers with a window.
    "fa3": (why_not, _hopper, libraries.fa3_problem),
    "flashinfer": (why_not, libraries.flashinfer_problem),
    "fa4": (why_not, libraries.fa4_problem),
}
