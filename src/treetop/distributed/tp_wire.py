"""What rank 0 and the other ranks of a worker group say to each other: typed msgpack messages, never pickles.

rank 0 --Launch--> each worker, which launches it beside rank 0 and says `Ended` once it has collected it
"""

import msgspec

from treetop.disaggregation.agent import Connect
from treetop.disaggregation.events import Disconnect, Pull
from treetop.disaggregation.transport import State
from treetop.types.config import EngineConfig
from treetop.types.messages import ExportPlan, ImportPlan, PrefillPlan, RoundPlan, StepPlan


class WorkerOptions(msgspec.Struct, frozen=True):
    """What a worker is told on stdin. folder: where the group meets, of its owner alone. threads: of PyTorch.

    reached: other workers reach its staging slots.
    """

    folder: str
    config: EngineConfig
    rank: int
    threads: int
    reached: bool = False


class LaunchPrefill(msgspec.Struct, frozen=True, tag=True):
    """Launch step `number`, one more than the last, in a batch of `bucket` rows: what rank 0 launches, too."""

    number: int
    bucket: int
    plan: PrefillPlan


class LaunchRound(msgspec.Struct, frozen=True, tag=True):
    """As `LaunchPrefill`."""

    number: int
    bucket: int
    plan: RoundPlan


class LaunchExport(msgspec.Struct, frozen=True, tag=True):
    """As `LaunchPrefill`, of as many pieces."""

    number: int
    bucket: int
    plan: ExportPlan


class LaunchImport(msgspec.Struct, frozen=True, tag=True):
    """As `LaunchExport`."""

    number: int
    bucket: int
    plan: ImportPlan


class NextLogits(msgspec.Struct, frozen=True, tag=True):
    """Take part in `Engine.next_logits`, while no step is in flight."""

    ids: list[int]


class Here(msgspec.Struct, frozen=True, tag=True):
    """A worker is there, and will meet the others."""

    rank: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """A worker's engine is up. transport: what others need to reach its staging slots."""

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


Launch = LaunchPrefill | LaunchRound | LaunchExport | LaunchImport
ToWorker = LaunchPrefill | LaunchRound | LaunchExport | LaunchImport | NextLogits | Connect | Disconnect | Pull
FromWorker = Here | Up | Ended | Moved

encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def launch_of(number: int, bucket: int, plan: StepPlan) -> Launch:
    match plan:
        case PrefillPlan():
            return LaunchPrefill(number, bucket, plan)
        case RoundPlan():
            return LaunchRound(number, bucket, plan)
        case ExportPlan():
            return LaunchExport(number, bucket, plan)
        case ImportPlan():
            return LaunchImport(number, bucket, plan)


def decode_to_worker(message: bytes) -> ToWorker:
    """Raises msgspec.ValidationError for what is no message to a worker."""
    return _to_worker.decode(message)


def decode_from_worker(message: bytes) -> FromWorker:
    return _from_worker.decode(message)
