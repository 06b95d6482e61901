"""What a trainer's process needs to hand weights to an engine: handles of its memory, or a group to broadcast in.

    sent = ipc_tensors(dict(model.named_parameters()))  # on this machine: LLM.update_weights(sent), or `ipc_body`

    group = trainer_group("10.0.0.1", 51216, world_size=2)  # while the engine is asked to join
    sent = group_tensors(group, model.named_parameters())  # what it is told of, and while it takes them:
    broadcast_tensors(group, model.named_parameters())

It loads no engine.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from treetop.checkpoints.sent_tensors import ipc_tensors
from treetop.parallel.weight_groups import WeightGroup
from treetop.types.changes import SentTensors

__all__ = [
    "SentTensors",
    "WeightGroup",
    "broadcast_tensors",
    "group_tensors",
    "ipc_body",
    "ipc_tensors",
    "trainer_group",
]


def trainer_group(
    master_address: str,
    master_port: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
    timeout_s: float = 60.0,
) -> WeightGroup:
    """Rank 0 of a group, at this address of its own machine. world_size: one more than the ranks of all engines.

    Waits for them. Raises EngineError if they do not come.
    """
    return WeightGroup(group_name, master_address, master_port, 0, world_size, backend, timeout_s)


def group_tensors(group: WeightGroup, named: Iterable[tuple[str, Tensor]]) -> SentTensors:
    """What an engine is to be told of tensors that are about to be broadcast, in this order."""
    listed = list(named)
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in listed)
    return SentTensors(tuple(n for n, _ in listed), dtypes, tuple(tuple(t.shape) for _, t in listed), group.name)


def broadcast_tensors(group: WeightGroup, named: Iterable[tuple[str, Tensor]]) -> None:
    """Send them, one after another, to ranks that have been told of them. Raises EngineError if one has gone."""
    for _, tensor in named:
        group.broadcast(tensor.detach().contiguous())


def ipc_body(sent: SentTensors) -> Mapping[str, Any]:
    """Fields of a POST to /update_weights_from_tensor."""

    def plain(value: Any) -> Any:
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    handles = [[{name: plain(value) for name, value in asdict(each).items()} for each in of] for of in sent.handles]
    return {"names": sent.names, "dtypes": sent.dtypes, "shapes": sent.shapes, "handles": handles}
