"""A recorder of graphs that runs on a CPU."""

from dataclasses import dataclass

from treetop.engine.rounds import run_behind_draft, run_phases
from treetop.types.phase import Phase


@dataclass
class FakeGraph:
    run: object
    log: list

    def reset(self):
        pass

    def replay(self):
        self.log.append(_name(self.run))
        self.run()


class FakeRecorder:
    """Runs what it records once, as the real one does, and replays it by calling it."""

    def __init__(self):
        self.recorded, self.replayed, self.rows = [], [], []

    def record(self, run):
        run()
        self.recorded.append(_name(run))
        self.rows.append(run.args[0].buffers.row_lists.tolist())
        return FakeGraph(run, self.replayed)


def _name(run):
    """The key of a recorded round or its later part, or (phase, key) of a recorded phase."""
    _, key, _ = run.args
    return key if run.func in (run_phases, run_behind_draft) else (Phase(run.func.__name__.removesuffix("_phase")), key)
