"""Faults of several ranks, run: its guard must tell of each, in time. Ranks are threads here."""

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from treetop.debug.random_checkpoint import write_expert_target
from treetop.llm import LLM
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.errors import EngineError
from treetop.types.sampling import SamplingParams
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.faults import Fault
from treetop_debug.provoke import Finding
from treetop_debug.rank_faults import LOCKSTEP_FAULTS, RANK_FAULTS
from treetop_debug.ranks import ranks_on_threads

_TOKENS = 200
_DEADLINE_S, _LONG_S = 5.0, 120.0
"""Of a step: where the deadline is the guard, and where another is, which a busy machine must not come before."""
NAMES = (*RANK_FAULTS, *LOCKSTEP_FAULTS)
"""Of all faults of several ranks."""


def find_rank_fault(name: str) -> Finding:
    """Requests on a group with the fault, at its guard's level; no harm is looked for. Raises ConfigError without the
    serve extra.

    Ranks that share every layer run the embedded pair. Ranks that share experts run a random target that has some; the
    request goes to the first of them, and the other has none, which is what these faults are about.
    """
    if name in RANK_FAULTS:
        return _found(RANK_FAULTS[name], ranks_on_threads(), ["def area(radius):", "import os\n"], tp_size=2)
    with TemporaryDirectory(prefix="treetop-experts-") as folder:
        target = str(write_expert_target(Path(folder)))
        prompt = [(7 * i) % 96 for i in range(20)]
        options = {"model": target, "draft": None, "ep_size": 2}
        return _found(LOCKSTEP_FAULTS[name], expert_ranks_on_threads(), [prompt], **options)


def _found(fault: Fault, ranks: AbstractContextManager[Any], prompts: list[Any], **options: Any) -> Finding:
    pair = {"model": BUILTIN_MODEL, "draft": BUILTIN_DRAFT}
    sizes = {"check_level": fault.level or 0, "context_length": 256, "dtype": "float32"}
    options = {**pair, **sizes, **options, **fault.options}
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    deadline_s = _DEADLINE_S if "did not answer in" in fault.guard else _LONG_S
    found = ""
    with ranks, fault.active():
        llm = LLM(device="cpu", overlap=True, step_timeout=deadline_s, **options)
        try:
            llm.generate(prompts, params)
        except EngineError as error:
            found = str(error)
        finally:
            llm.close()
    by = "any level" if fault.level is None else f"check level {fault.level}"
    return Finding(fault, found if fault.guard in found else None, by, None)
