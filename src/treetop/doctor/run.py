"""The doctor's visit, printed. Exit code 1 if conformance fails or a fault is not caught."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from treetop.debug.faults import FAULTS
from treetop.doctor.conformance import Conformance, quick_cases
from treetop.doctor.exchange import exchange_times, links
from treetop.doctor.provoke import Finding, Provocation
from treetop.doctor.report import backends, capacity, checkpoint, machine
from treetop.engine.build import plan_engine
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Visit:
    """cases: of the quick conformance run. faults: run each named fault instead of conformance."""

    cases: int
    faults: bool


def run(model: str | None, options: dict[str, Any], visit: Visit) -> int:
    """Print the report for a configuration, then test. Raises UserError for options that cannot work."""
    console = Console(soft_wrap=True)
    config = EngineConfig.of(model, **options)
    engine_plan = plan_engine(config)
    dtype, device = engine_plan.place.dtype, engine_plan.place.device
    sums = exchange_times(config.tp_size, device.type) if config.tp_size > 1 else []
    sums += _agreement_times(config.ep_size, device.type) if config.ep_size > 1 else []
    statuses = backends(engine_plan)
    tensors = checkpoint(engine_plan)
    _print(console, "machine", ("", ""), machine(device) + sums)
    if pairs := links():
        _print(console, "links", ("between", "reaches its memory", "link"), pairs)
    if config.disaggregation_slots:
        _print(console, "KV transfer, 64 MiB", ("transport", "by", "speed"), _speeds(device.type))
    rows = [(f"{b.name} (serves)" if b.chosen else b.name, ", ".join(b.phases) or "-", b.reason) for b in statuses]
    _print(console, f"backends, {str(dtype).removeprefix('torch.')}", ("backend", "runs", "why not, or which"), rows)
    console.print("\n".join(f"{name}: {words}" for name, words in tensors), markup=False, highlight=False)
    _print(console, "capacity", ("dimension", "value", "formula", "option"), capacity(engine_plan.layout))
    console.print("memory, estimated before loading")
    console.print("\n".join(f"  {line}" for line in engine_plan.use.lines()), markup=False, highlight=False)
    if visit.faults:
        return _faults(console, device.type)
    return _conformance(console, visit.cases, device.type, config.attention_backend)


def _agreement_times(size: int, device: str) -> list[tuple[str, str]]:
    try:
        from treetop.doctor.expert_ranks import expert_rank_times  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ep-size {size} needs {error.name}: install treetop[serve]") from None
    return expert_rank_times(size, device)


def _speeds(device: str) -> list[tuple[str, str, str]]:
    try:
        from treetop.doctor.transport import transport_speeds  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        return [("none", "", f"needs {error.name}: pip install treetop[disaggregation-cu13] (or -cu12)")]
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


def _faults(console: Console, device: str) -> int:
    findings: list[Finding] = []
    with Provocation(device) as provocation, Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=len(FAULTS))
        for fault in FAULTS.values():
            findings.append(provocation.find(fault))
            progress.advance(task)
    rows = [
        (f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "", f.harm or "NO HARM SHOWN") for f in findings
    ]
    _print(console, "faults", ("fault", "guard", "what it said", "without a guard"), rows)
    missed = [f.fault.name for f in findings if not f.ok]
    console.print(
        f"faults: {len(findings) - len(missed)} of {len(findings)} caught on {device}, with harm shown without a guard"
    )
    return int(bool(missed)) | _rank_faults(console)


def _rank_faults(console: Console) -> int:
    """Those of several ranks, on the CPU."""
    try:
        from treetop.doctor.provoke_ranks import NAMES, find_rank_fault  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        console.print(f"faults of ranks: not run without {error.name}: install treetop[serve]")
        return 0
    with Progress(console=console, transient=True) as progress:
        findings = [find_rank_fault(name) for name in progress.track(NAMES, description="ranks")]
    rows = [(f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "") for f in findings]
    _print(console, "faults of ranks", ("fault", "guard", "what it said"), rows)
    num_caught = sum(f.caught is not None for f in findings)
    console.print(f"faults of ranks: {num_caught} of {len(findings)} caught")
    return int(num_caught < len(findings))


def _print(console: Console, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    table = Table(*columns, title=title, title_justify="left", show_header=any(columns))
    for row in rows:
        table.add_row(*row)
    console.print(table)
