"""The adapters of an engine that runs: all of them on the host, some in slots of the device."""

from collections.abc import Iterable
from pathlib import Path

from treetop.checkpoints.adapters import HostFactors, put, read_factors
from treetop.checkpoints.lora_folder import LoraFolder, read_lora
from treetop.engine.features.adapter_calibrations import AdapterCalibrations
from treetop.engine.startup.plan import EnginePlan
from treetop.kernels.tree.calibration import Calibration
from treetop.types.changes import Commit, LoadLora
from treetop.types.messages import AdapterEdit
from treetop.weights.adapted import Adapters


class EngineAdapters:
    """By their numbers, those of a start from 1 on, in slots as far as there are any; see `scheduler.adapters`.

    digests: `LoraFolder.digest` of each that the host has, on rank 0 where requests are handed over.
    """

    def __init__(self, engine_plan: EnginePlan, adapters: Adapters, calibration: Calibration) -> None:
        """Raises CheckpointError and ConfigError."""
        self._adapters, self._plan = adapters, engine_plan
        self.calibrations = AdapterCalibrations(calibration)
        self._params = engine_plan.place.own(engine_plan.target.params)
        self.digests = dict[int, str]()
        self._host = {number: self._read(number, folder) for number, folder in enumerate(engine_plan.adapters, 1)}
        slots = range(1, min(len(self._host), adapters.slots - 1) + 1)
        self.apply(AdapterEdit(slot, slot) for slot in slots)

    def prepare(self, asked: LoadLora) -> Commit:
        """Raises CheckpointError for what is no adapter of this model, ConfigError for one of too high a rank."""
        host = self._read(asked.number, read_lora(Path(asked.path), self._plan.target.params))
        return lambda: self._host.update({asked.number: host})

    def prepare_to_forget(self, number: int) -> Commit:
        """The host's memory of an adapter that no request has."""

        def forget() -> None:
            self._host.pop(number, None)
            self.digests.pop(number, None)
            self.calibrations.forget(number)

        return forget

    def apply(self, edits: Iterable[AdapterEdit]) -> None:
        """In their order, before a step's rows come in."""
        for edit in edits:
            put(self._adapters, edit.slot, self._host[edit.number])
            self.calibrations.enter(edit)

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of those that the host has."""
        return tuple(self._host)

    def _read(self, number: int, folder: LoraFolder) -> HostFactors:
        if self._plan.kv_transfer is not None and self._plan.place.parallel.rank == 0:
            self.digests[number] = folder.digest()
        return read_factors(self._adapters, folder, self._params, self._plan.place.device.type == "cuda")
