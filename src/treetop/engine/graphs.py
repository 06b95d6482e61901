"""How the phases of a round are launched: eagerly, or as graphs.

Both launch the same functions on the same buffers. `GraphSim` gives a CPU the semantics of captured graphs: what a
graph would bake in is baked in, and what a graph would leave behind is poisoned.
"""

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from treetop.checks.poison import poison
from treetop.engine.device import Device
from treetop.engine.rounds import RoundKey, phases_of
from treetop.types.phase import Phase


class RoundLauncher(Protocol):
    """Runs the phases of one round over what the buffers hold."""

    def launch(self, key: RoundKey, bound: int) -> None: ...


class Eager:
    """Calls each phase with the batch's own bound."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def launch(self, key: RoundKey, bound: int) -> None:
        for phase, run in phases_of(self._device).items():
            if self._device.check_level >= 3:
                poison_undeclared(self._device, phase)
            run(self._device, key, bound)


class GraphSim:
    """Graph semantics without a GPU.

    Capture keeps each phase with the objects and host numbers it saw: the largest bound there is. Replay first poisons
    everything that is not declared an input, state or output of the phase, and the outputs themselves, so that a value
    read before it is written, or kept as a view past the next replay, shows.
    """

    def __init__(self, device: Device, keys: Iterable[RoundKey]) -> None:
        self._device = device
        bound, phases = device.layout.max_committed, phases_of(device)
        self._captured = {
            (key, phase): partial(function, device, key, bound) for key in keys for phase, function in phases.items()
        }

    def launch(self, key: RoundKey, bound: int) -> None:
        assert bound <= self._device.layout.max_committed
        for phase in phases_of(self._device):
            poison_undeclared(self._device, phase)
            self._captured[key, phase]()


def poison_undeclared(device: Device, phase: Phase) -> None:
    """Poison scratch and outputs of a phase: whatever they hold before it runs must not matter."""
    buffers = device.buffers
    tails = [*buffers.draft_tails.values(), *buffers.verify_tails.values(), *buffers.extend_tails.values()]
    tree = [getattr(buffers.tree, name) for name in buffers.tree.__dataclass_fields__]
    accepted = [getattr(buffers.accepted, name) for name in buffers.accepted.__dataclass_fields__]
    outputs = {
        Phase.DRAFT: [*tree, *accepted, *buffers.features],
        Phase.VERIFY: [*accepted, *buffers.features],
        Phase.EXTEND: [],
    }
    for tensor in (*tails, *outputs[phase]):
        poison(tensor)
