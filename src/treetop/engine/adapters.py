"""The adapters of an engine that runs: all of them on the host, some in slots of the device."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treetop.checkpoints.adapters import HostFactors, put, read_factors
from treetop.checkpoints.lora_folder import LoraFolder, read_lora
from treetop.engine.features.adapter_calibrations import AdapterCalibrations
from treetop.engine.startup.plan import EnginePlan
from treetop.kernels.tree.calibration import Calibration
from treetop.types.changes import Commit, LoadLora
from treetop.types.errors import ConfigError
from treetop.types.messages import AdapterEdit
from treetop.weights.adapted import Adapters

log = logging.getLogger("treetop")


@dataclass(frozen=True, slots=True)
class _OnHost:
    """What an adapter puts beside the target's products, and beside the draft head's."""

    target: HostFactors
    draft: HostFactors


class EngineAdapters:
    """By their numbers, those of a start from 1 on, in slots as far as there are any; see `scheduler.adapters`.

    digests: `LoraFolder.digest` of each that the host has, where requests are handed over or what is learned is kept.
    """

    def __init__(
        self, engine_plan: EnginePlan, adapters: Adapters, draft_adapters: Adapters | None, calibration: Calibration
    ) -> None:
        """Raises CheckpointError and ConfigError."""
        self._adapters, self._draft_adapters, self._plan = adapters, draft_adapters, engine_plan
        draft = () if engine_plan.draft is None else engine_plan.draft.params
        self._params, self._draft_params = (engine_plan.place.own(each) for each in (engine_plan.target.params, draft))
        self.digests = dict[int, str]()
        self.calibrations = AdapterCalibrations(calibration, self.digests)
        self._host = {number: self._read(number, folder) for number, folder in enumerate(engine_plan.adapters, 1)}
        slots = range(1, min(len(self._host), adapters.slots - 1) + 1)
        self.apply(AdapterEdit(slot, slot) for slot in slots)

    def prepare(self, asked: LoadLora) -> Commit:
        """Raises CheckpointError for what is no adapter of this model, ConfigError for one of too high a rank."""
        draft = () if self._plan.draft is None else self._plan.draft.params
        folder = read_lora(Path(asked.path), self._plan.target.params, draft)
        if folder.draft is not None and not self._plan.config.enable_draft_lora:
            raise ConfigError(
                f"{folder.draft.path}: the draft head of this engine takes no adapter while it runs; start with"
                " --enable-draft-lora, or remove that folder"
            )
        host = self._read(asked.number, folder)
        return lambda: self._host.update({asked.number: host})

    def prepare_to_forget(self, number: int) -> Commit:
        """The host's memory of an adapter that no request has."""

        def forget() -> None:
            self._host.pop(number, None)
            self.calibrations.forget(number)
            self.digests.pop(number, None)

        return forget

    def apply(self, edits: Iterable[AdapterEdit]) -> None:
        """In their order, before a step's rows come in."""
        for edit in edits:
            host = self._host[edit.number]
            put(self._adapters, edit.slot, host.target)
            if self._draft_adapters is not None:
                put(self._draft_adapters, edit.slot, host.draft)
            self.calibrations.enter(edit)

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of those that the host has."""
        return tuple(self._host)

    def _read(self, number: int, folder: LoraFolder) -> _OnHost:
        if folder.unread is not None:
            log.info("%s is not read: there is no draft head that it could be beside", folder.unread)
        if self._plan.kv_transfer is not None or self._plan.config.speculative_calibration_dir is not None:
            self.digests[number] = folder.digest()
        pinned, draft = self._plan.place.device.type == "cuda", self._draft_adapters
        target = read_factors(self._adapters, folder, self._params, pinned)
        if draft is None or folder.draft is None:
            return _OnHost(target, {})
        return _OnHost(target, read_factors(draft, folder.draft, self._draft_params, pinned))
