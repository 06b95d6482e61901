"""Captured graphs as a CPU has them: what one would bake in is baked in, what it would leave behind is poisoned."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import HostStep, RoundKey, phases_of, poison_undeclared
from treetop.types.phase import Phase


class GraphSim:
    """Graph semantics without a GPU.

    Capture keeps each phase with the objects and host numbers it saw: the largest bound there is. Replay first poisons
    everything that is not declared an input, state or output of the phase, and the outputs themselves, so that a value
    read before it is written, or kept as a view past the next replay, shows.
    """

    def __init__(self, runner: ModelRunner, keys: Iterable[RoundKey]) -> None:
        self._runner = runner
        max_kv_len = runner.layout.max_committed
        self._captured = {
            (key, phase): partial(function, runner, key, max_kv_len)
            for key in keys
            for phase, function in phases_of(runner, key).items()
        }

    def launch(self, key: RoundKey, max_kv_len: int, host_step: HostStep | None = None) -> None:
        assert max_kv_len <= self._runner.layout.max_committed
        key = replace(key, undrafted=key.undrafted and not key.bucket, deferred=0)  # of rows both are data
        for phase in phases_of(self._runner, key):
            poison_undeclared(self._runner, phase)
            self._captured[key, phase]()
            if phase is Phase.DRAFT and host_step is not None:
                host_step()
