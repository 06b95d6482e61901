"""What a backend can do, what an engine asks of it, and why it cannot serve: words that every backend uses."""

from dataclasses import dataclass

import torch

from treetop.types.ids import GroupName
from treetop.types.phase import Phase

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's limits, as data.

    head_dims, page_sizes: None is any.
    latents: how wide the latents of compressed attention may be, whose plane is key and value; () is none of it, None
        is any.
    rope_dims: how wide the rotary part of such a plane may be; None is any.
    compressed_only: it has no other attention; layers without compression run on the Triton kernel, and an engine that
        has none with it is refused.
    sparse: it attends to the keys that an indexer chooses (DSA).
    fp8_kv: it reads K/V in FP8.
    caps: it caps scores (softcap).
    own_windows: it applies a window by position itself, trees included; without it layers with a window run on the
        Triton kernel.
    own_prefill: it serves prompts too; without it they run on the Triton kernel.
    own_sinks: its kernel takes attention sinks; without it they come in the merge, and after `causal` from its lse.
    captures: its calls may be recorded in a CUDA graph.
    captures_first_call: also the first one, in which a library may compile or load.
    needs_host_extents: exact lengths on the host before a round (`plan_round`), so only one round may be in flight.
    phases: it serves.
    flat: it may take the nodes of trees that a budget has cut as they stand (`contract.FlatBackend`).
    exact: a query's result has the same bits in any batch, tree and chunking, as `--exactness bits` asks.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    latents: tuple[int, ...] | None = ()
    rope_dims: tuple[int, ...] | None = None
    compressed_only: bool = False
    sparse: bool = False
    fp8_kv: bool = False
    caps: bool = False
    own_windows: bool = True
    own_sinks: bool = True
    own_prefill: bool = True
    captures: bool = True
    captures_first_call: bool = False
    needs_host_extents: bool = False
    phases: tuple[Phase, ...] = tuple(Phase)
    flat: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """The layers of one KV group, as attention sees them. latent: how wide that is; None without compression. top_k:
    how many keys an indexer chooses for each query, by the last `index_dim` of the head_dim numbers that are kept; 0
    where there is none. cap: of scores."""

    name: GroupName
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None
    top_k: int = 0
    cap: float | None = None
    index_dim: int = 0

    @property
    def sparse(self) -> bool:
        return self.top_k > 0


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine asks of its backend. page_size None and no groups: not known yet.

    max_in_flight: rounds in flight.

    exact: results have the same bits in any batch: of PyTorch's on a CPU, of one that says so on a GPU.
    integers: on a CPU, and its sums are of integers, not the library's.

    fp8_kv: K/V are in FP8.

    rows, queries: of the largest phase of a round, padding included, and in each of its rows; 0 without rounds.
    """

    dtype: torch.dtype
    device: torch.device
    page_size: int | None = None
    groups: tuple[GroupNeed, ...] = ()
    max_in_flight: int = 1
    rows: int = 0
    queries: int = 0
    exact: bool = False
    fp8_kv: bool = False
    integers: bool = False


@dataclass(frozen=True, slots=True)
class BackendRefusal:
    """Why a backend cannot serve, in one sentence, and the option to change."""

    reason: str
    remedy: str
