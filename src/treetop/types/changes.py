"""What changes an engine that runs, between two of its steps: one value each, which every rank and replica is given.

All read and check first (`prepare`), and nothing has changed if one refuses; then all take it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from treetop.types.errors import InputError, shown

InFlight = Literal["abort", "retract", "wait"]
"""What becomes of requests that are alive: they end; or are put back and go on with the new weights (both in SGLang's
words of `pause_generation`); or end on the old ones before these go, while new ones wait (vLLM's word of `/pause`)."""
IN_FLIGHT: tuple[str, ...] = get_args(InFlight)
Commit = Callable[[], object]
"""Puts what was prepared in force. It is dropped by not being called, and by telling `drop` of who prepared it."""


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """Where a tensor lies in the memory of a GPU that another process of this machine has; see `weight_transfer`.

    device_uuid: of the GPU. offset, stride: in numbers. The rest is what PyTorch's reductions say of the storage.
    """

    device_uuid: str
    offset: int
    stride: tuple[int, ...]
    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


@dataclass(frozen=True, slots=True)
class SentTensors:
    """Whole tensors that a trainer has, by the names of a checkpoint.

    dtypes: as PyTorch calls them, such as bfloat16.
    group: whose first rank broadcasts them in this order; "" where handles say where they lie.
    handles: of each tensor one a GPU that has it; the nearest is read.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group: str = ""
    handles: tuple[tuple[IpcHandle, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raises InputError for what does not say one thing of each tensor."""
        lengths = {len(self.names), len(self.dtypes), len(self.shapes), *(() if self.group else (len(self.handles),))}
        if len(lengths) > 1 or len(set(self.names)) < len(self.names):
            raise InputError(
                f"tensors: {len(self.names)} names, all different, need as many dtypes and shapes, and a group or as"
                f" many handles; got {len(self.dtypes)}, {len(self.shapes)} and {len(self.handles)}"
            )


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Go on with the weights of other folders, of None with those in force, read again; or with tensors instead.

    model_tensors, draft_tensors: of a trainer, for the model of the folder in force.
    more: they are kept until those come that complete them. makes_room: K/V are dropped for them before they come.
    """

    model: str | None = None
    draft: str | None = None
    in_flight: InFlight = "abort"
    model_tensors: SentTensors | None = None
    draft_tensors: SentTensors | None = None
    more: bool = False
    makes_room: bool = False

    @property
    def is_sent(self) -> bool:
        return self.model_tensors is not None or self.draft_tensors is not None


@dataclass(frozen=True, slots=True)
class InitWeightsUpdateGroup:
    """Meet a trainer, who is rank 0 of `world_size`. rank_offset: the first engine's rank. engine: which this is."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"
    engine: int = 0


@dataclass(frozen=True, slots=True)
class DestroyWeightsUpdateGroup:
    """Leave it."""

    name: str


@dataclass(frozen=True, slots=True)
class LoadLora:
    """An adapter that requests may name from now on. number: by which the core tells it from every other, ever."""

    name: str
    path: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class UnloadLora:
    """No request may name this adapter any more. Those that have named it go on with it to their end.

    number: the core's, once no request has it.
    """

    name: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back. K/V are dropped; weights are kept on the host (level 1) or dropped, too (level 2)."""

    level: int = 1


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Have it again: what these of `TAGS` name, None for all that sleeps."""

    tags: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tags: Sequence[str] | None) -> "WakeUp":
        """Raises InputError for a text, whose letters are no tags."""
        if isinstance(tags, str):
            raise InputError(f"tags: give a list, as of {' and '.join(TAGS)}, got the text {shown(tags)}")
        return cls(None if tags is None else tuple(tags))


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget every prefix, on the device and on the host. Requests that run are put back, and go on by a prefill."""


TAGS = ("weights", "kv_cache")
"""What sleeps, and wakes by itself."""
Change = (
    UpdateWeights
    | InitWeightsUpdateGroup
    | DestroyWeightsUpdateGroup
    | LoadLora
    | UnloadLora
    | Sleep
    | WakeUp
    | FlushCache
)
CHANGES: dict[str, type[Change]] = {
    "update_weights": UpdateWeights,
    "init_weights_update_group": InitWeightsUpdateGroup,
    "destroy_weights_update_group": DestroyWeightsUpdateGroup,
    "load_lora": LoadLora,
    "unload_lora": UnloadLora,
    "sleep": Sleep,
    "wake_up": WakeUp,
    "flush_cache": FlushCache,
}
"""By what an `LLM` calls them."""


def given(change: UpdateWeights) -> set[str]:
    """Of "model" and "draft", what a change brings."""
    of = {"model": (change.model, change.model_tensors), "draft": (change.draft, change.draft_tensors)}
    return {kind for kind, each in of.items() if each != (None, None)}


def check_in_flight(given: object) -> None:
    """Raises InputError for what is none of `IN_FLIGHT`."""
    if given not in IN_FLIGHT:
        raise InputError(f"in_flight: must be {', '.join(IN_FLIGHT[:-1])} or {IN_FLIGHT[-1]}, got {shown(given)}")


def asked_as(change: Change) -> str:
    """What an `LLM` calls a change."""
    return next(name for name, kind in CHANGES.items() if isinstance(change, kind))
