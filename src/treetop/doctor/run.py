"""The doctor's visit, printed. Exit code 1 if conformance fails or a fault is not caught."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from treetop.doctor.conformance import Conformance, quick_cases
from treetop.doctor.exactness import show_exactness
from treetop.doctor.exchange import exchange_times, links
from treetop.doctor.report import backends, capacity, checkpoint, exactness_words, machine
from treetop.doctor.tables import print_table
from treetop.engine.startup.plan import plan_engine
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.version import DISTRIBUTION


@dataclass(frozen=True, slots=True)
class Visit:
    """cases: of the quick conformance run.
    faults: run each named fault instead of conformance.
    exactness: compare bits with those of plain decoding instead.
    """

    cases: int
    faults: bool
    exactness: bool = False


def run(model: str | None, options: dict[str, Any], visit: Visit) -> int:
    """Print the report for a configuration, then test. Raises UserError for options that cannot work."""
    show_faults = _of_the_extra() if visit.faults else None
    console = Console(soft_wrap=True)
    config = EngineConfig.of(model, **options)
    engine_plan = plan_engine(config)
    dtype, device = engine_plan.place.dtype, engine_plan.place.device
    sums = exchange_times(config.tp_size, device.type) if config.tp_size > 1 else []
    sums += _agreement_times(config.ep_size, device.type) if config.ep_size > 1 else []
    statuses = backends(engine_plan)
    tensors = checkpoint(engine_plan)
    print_table(console, "machine", ("", ""), machine(device) + sums)
    if pairs := links():
        print_table(console, "links", ("between", "reaches its memory", "link"), pairs)
    if config.disaggregation_slots:
        print_table(console, "KV transfer, 64 MiB", ("transport", "by", "speed"), _speeds(device.type))
    rows = [(f"{b.name} (serves)" if b.chosen else b.name, ", ".join(b.phases) or "-", b.reason) for b in statuses]
    print_table(
        console, f"backends, {str(dtype).removeprefix('torch.')}", ("backend", "runs", "why not, or which"), rows
    )
    console.print("\n".join(f"{name}: {words}" for name, words in tensors), markup=False, highlight=False)
    print_table(console, "capacity", ("dimension", "value", "formula", "option"), capacity(engine_plan.layout))
    console.print("memory, estimated before loading")
    console.print("\n".join(f"  {line}" for line in engine_plan.use.lines()), markup=False, highlight=False)
    console.print(exactness_words(engine_plan), markup=False, highlight=False)
    if show_faults is not None:
        return show_faults(console, device.type)
    if visit.exactness:
        return show_exactness(console, engine_plan, model, options)
    return _conformance(console, visit.cases, device.type, config.attention_backend)


def _of_the_extra() -> Callable[[Console, str], int]:
    try:
        from treetop_debug.visit import show_faults  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--faults needs {error.name}; pip install {DISTRIBUTION}[debug]") from None
    return show_faults


def _agreement_times(size: int, device: str) -> list[tuple[str, str]]:
    try:
        from treetop.doctor.expert_ranks import expert_rank_times  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {size} needs {error.name}: install {DISTRIBUTION}[serve]") from None
    return expert_rank_times(size, device)


def _speeds(device: str) -> list[tuple[str, str, str]]:
    try:
        from treetop.doctor.transport import transport_speeds  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        return [("none", "", f"needs {error.name}: pip install {DISTRIBUTION}[disaggregation-cu13] (or -cu12)")]
    return transport_speeds(device)


def _conformance(console: Console, count: int, device: str, backend: str) -> int:
    failed = rounds = ties = 0
    cases = quick_cases(count, gpu=device == "cuda", backend=backend)
    ran = ", ".join(sorted({case.backend for case in cases}))
    if backend not in ("auto", ran):
        console.print(
            f"conformance: {backend} computes in 16 bits only, which the oracle does not judge; it runs {ran}"
        )
    with Conformance() as conformance, Progress(console=console, transient=True) as progress:
        task = progress.add_task("conformance", total=count)
        for case in cases:
            outcome = conformance.run(case, device=device)
            rounds, ties = rounds + outcome.rounds, ties + outcome.ties
            if outcome.failure is not None:
                failed += 1
                console.print(f"FAILED {case}\n       {outcome.failure}")
            progress.advance(task)
    agree = f"{count - failed} of {count} cases agree with the dense oracle"
    console.print(f"conformance: {agree} in {rounds} rounds, on {ran}")
    if ties:
        console.print(f"             {ties} near ties of float32 excused")
    return int(failed > 0)
