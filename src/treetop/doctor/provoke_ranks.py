"""Faults of several ranks, run on the embedded pair: its guard must tell of each, in time. Ranks are threads here."""

from dataclasses import dataclass

from treetop.debug.faults import Fault
from treetop.debug.rank_faults import RANK_FAULTS
from treetop.debug.ranks import ranks_on_threads
from treetop.server.llm import LLM
from treetop.types.errors import EngineError
from treetop.types.sampling import SamplingParams

_TOKENS = 200
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class RankFinding:
    """caught: the guard's words, or None."""

    fault: Fault
    caught: str | None

    @property
    def by(self) -> str:
        return "any level" if self.fault.level is None else f"check level {self.fault.level}"


def find_rank_fault(name: str) -> RankFinding:
    """Requests on a group with the fault, at its guard's level. Raises ConfigError without the serve extra."""
    found = RANK_FAULTS[name]
    options = {"tp_size": 2, "check_level": found.level or 0, "context_length": 256, "dtype": "float32"}
    said = ""
    with ranks_on_threads(), found.active():
        llm = LLM(device="cpu", overlap=True, step_timeout=_DEADLINE_S, **{**options, **found.options})
        try:
            llm.generate(["def area(radius):", "import os\n"], SamplingParams(max_tokens=_TOKENS, ignore_eos=True))
        except EngineError as error:
            said = str(error)
        finally:
            llm.close()
    return RankFinding(found, said if found.guard in said else None)
