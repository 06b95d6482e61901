"""What a rank of a soak does beside its work: it accounts for its rows, pages and slots, and says what it has done.

    python scripts/soaks/rank_books.py FOLDER      as `python -m treetop.distributed.engine_process`, for `roles`

Each rank renews a file of the folder: counts, memory, whether it holds nothing. Faults go to another.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from treetop.core.engine_core import EngineCore
from treetop.disaggregation.connector import KVConnector
from treetop.disaggregation.decode import DecodeMachine
from treetop.disaggregation.prefill import PrefillMachine
from treetop.distributed import engine_process
from treetop.distributed.lockstep import Lockstep
from treetop.scheduler.scheduler import Scheduler
from treetop.types.errors import InvariantError
from treetop.types.kv_transfer.scheduling import Imported, Staged
from treetop.types.messages import ExportPlan, ImportPlan, PrefillPlan, StepPlan
from treetop_debug.patching import Patch, replaced

PAGES = 16
"""Pages that a rank accounts for between two steps."""
TOLD_S = 0.3
KINDS = {PrefillPlan: "prefills", ExportPlan: "exports", ImportPlan: "imports"}


class Books:
    """What a rank has done, and whether its rows, pages and slots add up. Lives on the rank's thread."""

    def __init__(self, core: EngineCore[Any], folder: Path) -> None:
        self.core, self._folder = core, folder
        self.counts: Counter[str] = Counter()
        self.connector: KVConnector | None = None
        self._told_s = 0.0

    def noted(self, launch: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
        """The engine's `launch`, whose plans are counted."""

        def run(plan: StepPlan) -> Any:
            kind = KINDS.get(type(plan), "rounds")
            self.counts[kind] += 1
            self.counts[f"idle_{kind}"] += not plan.rows
            return launch(plan)

        return run

    def audited(self, connector: KVConnector) -> None:
        """Look between any two steps of the rank from now on."""
        self.connector, poll = connector, connector.poll

        def run(now: float) -> None:
            poll(now)
            idle = not self.core.busy
            try:
                self.core.scheduler.check_integrity(None if idle else PAGES)
                check_slots(self.core.scheduler, connector)
            except InvariantError as error:
                self._write("fault", str(error))
                raise
            self.counts["audits"] += 1
            self._tell(now, idle)

        connector.poll = run  # type: ignore[method-assign]  # of this object alone

    def _tell(self, now: float, idle: bool) -> None:
        if now - self._told_s < TOLD_S:
            return
        self._told_s, connector = now, self.connector
        assert connector is not None
        load, kv_transfer = self.core.load, connector.load
        assert kv_transfer is not None
        held = load.num_running + load.num_waiting + kv_transfer.num_requests_in_flight + kv_transfer.num_slots_busy
        said = {
            "mode": kv_transfer.mode,
            "idle": idle and held == 0 and load.kv_usage == 0,
            "counts": self.counts,
            "memory": memory(),
            "retractions": load.num_retractions,
            "kv_transfer": kv_transfer._asdict(),
        }
        self._write("json", json.dumps(said))

    def _write(self, suffix: str, text: str) -> None:
        new = self._folder / f".{id(self)}-{os.getpid()}"
        new.write_text(text)
        new.replace(self._folder / f"{id(self)}-{os.getpid()}.{suffix}")


def check_slots(scheduler: Scheduler, connector: KVConnector) -> None:
    """Raise InvariantError unless machine and scheduler, or machine and agent, name the same slots as busy."""
    kv_transfer, machine = scheduler.kv_transfer, connector.machine
    events = {each.slot for each in kv_transfer._events if isinstance(each, Imported | Staged)}
    if isinstance(machine, PrefillMachine):
        flying = {e.slot for out in scheduler.steps if isinstance(out.plan, ExportPlan) for e in out.plan.exports}
        want = {each.slot for each in kv_transfer._exports} | flying | events
        _same("staging", [s.state for s in machine.slots], want)
        owners = {slot for export in machine.exports.values() for slot in export.slots}
        offered = {i for i, slot in enumerate(machine.slots) if slot.state == "offered"}
        if not offered <= owners:
            raise InvariantError(f"slots {offered - owners} are offered, and of no export")
    elif isinstance(machine, DecodeMachine):
        flying = {e.slot for out in scheduler.steps if isinstance(out.plan, ImportPlan) for e in out.plan.imports}
        want = {each.slot for each in kv_transfer._imports} | flying | events
        states: list[str] = [s.state for s in machine.slots]
        _same("importing", states, want)
        moving = {*connector._agent._states}
        busy = {i for i, state in enumerate(states) if state in ("probing", "pulling", "quarantine")}
        if busy != moving:
            raise InvariantError(f"slots {busy} are pulled, transfers go into {moving}")


def _same(state: str, states: list[Any], want: set[int]) -> None:
    have = {i for i, each in enumerate(states) if each == state}
    if have != want:
        raise InvariantError(f"slots {have} are {state} to the state machine, {want} to the scheduler")


def memory() -> dict[str, int]:
    """Bytes of this process and of its GPU that are in use."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "allocated": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0}


@contextmanager
def audits(folder: Path) -> Iterator[None]:
    """Ranks that start inside, on threads or in this process, keep books in the folder."""
    books: dict[int, Books] = {}  # by scheduler

    def core_of(real: Callable[..., EngineCore[Any]]) -> Callable[..., EngineCore[Any]]:
        def make(runs: Lockstep[Any], engine: Any, *given: Any) -> EngineCore[Any]:
            core = real(runs, engine, *given)
            mine = books[id(core.scheduler)] = Books(core, folder)
            engine.launch = mine.noted(engine.launch)
            return core

        return make

    def open_connector(real: Callable[..., KVConnector]) -> Callable[..., KVConnector]:
        def make(scheduler: Scheduler, *rest: Any) -> KVConnector:
            connector = real(scheduler, *rest)
            books[id(scheduler)].audited(connector)
            return connector

        return make

    noted = Patch("treetop.distributed.open:core_of", core_of)
    with replaced([noted, Patch("treetop.distributed.engine_process:open_connector", open_connector)]):
        yield


def rank_main(folder: Path) -> int:
    """A rank's process, as `treetop.distributed.engine_process` is one."""
    with audits(folder):
        return engine_process.main()


if __name__ == "__main__":
    sys.exit(rank_main(Path(sys.argv[1])))
