"""Messages between rank 0 and the tensor-parallel workers: typed msgpack messages, never pickles.

rank 0 --Launch--> each worker, which launches it beside rank 0 and sends `Ended` once it has collected it
"""

from typing import Literal

import msgspec

from treetop.core.wire import AskChange
from treetop.disaggregation.agent import Connect
from treetop.disaggregation.events import Disconnect, Pull
from treetop.distributed.rank_groups import ExpertEngines
from treetop.types.config import EngineConfig
from treetop.types.kv_transfer.transport import State
from treetop.types.messages import (
    ExportPlan,
    ImportPlan,
    MixedPlan,
    NodeMasks,
    OffloadPlan,
    PrefillPlan,
    RoundPlan,
    StepPlan,
)

PlanKind = Literal["PrefillPlan", "RoundPlan", "MixedPlan", "ExportPlan", "ImportPlan", "OffloadPlan"]


class WorkerOptions(msgspec.Struct, frozen=True):
    """Options of a worker, sent on its stdin.

    folder: where the group meets, of its owner alone.
    threads: of PyTorch.
    reached: other workers reach its staging slots.
    engines: that share experts.
    """

    folder: str
    config: EngineConfig
    rank: int
    threads: int
    reached: bool = False
    engines: ExpertEngines | None = None


class LaunchStep(msgspec.Struct, frozen=True, tag=True):
    """Launch step `number`, one more than the last, in a batch of `bucket` rows: what rank 0 launches, too.

    kind: the plan's class by name; plans have no tag of their own.
    encoded: the plan.
    """

    number: int
    bucket: int
    kind: PlanKind
    encoded: msgspec.Raw

    @classmethod
    def of(cls, number: int, bucket: int, plan: StepPlan) -> "LaunchStep":
        return cls(number, bucket, _KINDS[type(plan)], msgspec.Raw(encode(plan)))

    def plan(self) -> StepPlan:
        """Raises msgspec.ValidationError for what is no plan of its kind."""
        return _plans[self.kind].decode(self.encoded)


class TreeMasksMade(msgspec.Struct, frozen=True, tag=True):
    """What may follow nodes of constrained rows' trees in the step that is being launched."""

    masks: list[NodeMasks]


class NextLogits(msgspec.Struct, frozen=True, tag=True):
    """Take part in `Engine.next_logits`, while no step is in flight."""

    ids: list[int]


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The answer of a worker to a stage of a change. error: why nothing has changed there."""

    rank: int
    error: str | None = None
    user_error: bool = False


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """A worker process has started, and joins the rendezvous."""

    rank: int


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker's engine is ready. transport: what others need to reach its staging slots."""

    rank: int
    transport: bytes = b""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker has collected step `number`. digest: of its results."""

    rank: int
    number: int
    digest: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The state of a transfer that rank 0 has ordered has changed. number: of the slot into which it goes."""

    rank: int
    number: int
    state: State


ToWorker = LaunchStep | TreeMasksMade | NextLogits | AskChange | Connect | Disconnect | Pull
FromWorker = WorkerStarted | WorkerReady | Ended | Moved | Changed

encode = msgspec.msgpack.Encoder().encode
_KINDS: dict[type[StepPlan], PlanKind] = {
    PrefillPlan: "PrefillPlan",
    RoundPlan: "RoundPlan",
    MixedPlan: "MixedPlan",
    ExportPlan: "ExportPlan",
    ImportPlan: "ImportPlan",
    OffloadPlan: "OffloadPlan",
}
_plans: dict[PlanKind, msgspec.msgpack.Decoder[StepPlan]] = {
    name: msgspec.msgpack.Decoder(kind) for kind, name in _KINDS.items()
}
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def decode_to_worker(message: bytes) -> ToWorker:
    """Raises msgspec.ValidationError for what is no message to a worker."""
    return _to_worker.decode(message)


def decode_from_worker(message: bytes) -> FromWorker:
    return _from_worker.decode(message)
