"""How the phases of a round are launched: eagerly, or as graphs.

Both launch the same functions on the same buffers. `GraphSim` gives a CPU the semantics of captured graphs: what a
graph would bake in is baked in, and what a graph would leave behind is poisoned.
"""

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from treetop.checks.poison import poison
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey, phases_of
from treetop.types.phase import Phase


class RoundLauncher(Protocol):
    """Runs the phases of one round over what the buffers hold."""

    def launch(self, key: RoundKey, max_kv_len: int) -> None: ...


class Eager:
    """Calls each phase with the batch's own bound."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, key: RoundKey, max_kv_len: int) -> None:
        for phase, run in phases_of(self._runner).items():
            if self._runner.check_level >= 3:
                poison_undeclared(self._runner, phase)
            run(self._runner, key, max_kv_len)


class GraphSim:
    """Graph semantics without a GPU.

    Capture keeps each phase with the objects and host numbers it saw: the largest bound there is. Replay first poisons
    everything that is not declared an input, state or output of the phase, and the outputs themselves, so that a value
    read before it is written, or kept as a view past the next replay, shows.
    """

    def __init__(self, runner: ModelRunner, keys: Iterable[RoundKey]) -> None:
        self._runner = runner
        max_kv_len, phases = runner.layout.max_committed, phases_of(runner)
        self._captured = {
            (key, phase): partial(function, runner, key, max_kv_len)
            for key in keys
            for phase, function in phases.items()
        }

    def launch(self, key: RoundKey, max_kv_len: int) -> None:
        assert max_kv_len <= self._runner.layout.max_committed
        for phase in phases_of(self._runner):
            poison_undeclared(self._runner, phase)
            self._captured[key, phase]()


def poison_undeclared(runner: ModelRunner, phase: Phase) -> None:
    """Poison scratch and outputs of a phase: whatever they hold before it runs must not matter."""
    buffers = runner.buffers
    tails = [*buffers.draft_tails.values(), *buffers.verify_tails.values(), *buffers.extend_tails.values()]
    drafted = [getattr(value, name) for value in (buffers.tree, buffers.places) for name in value.__dataclass_fields__]
    verified = [getattr(buffers.accepted, name) for name in buffers.accepted.__dataclass_fields__]
    verified += [buffers.logprobs.values, buffers.logprobs.ids, buffers.aux_hidden]
    outputs = {
        Phase.DRAFT: [*drafted, *verified],
        Phase.VERIFY: verified,
        Phase.EXTEND: [],
    }
    for tensor in (*tails, *outputs[phase]):
        poison(tensor)
