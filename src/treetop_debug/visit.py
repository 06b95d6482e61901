"""What `treetop doctor --faults` runs and prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from treetop.doctor.tables import print_table
from treetop.version import DISTRIBUTION
from treetop_debug.faults import FAULTS
from treetop_debug.policy_faults import POLICY_FAULTS
from treetop_debug.provoke import Finding, Provocation, find_in_scene


def show_faults(console: Console, device: str) -> int:
    """Put each fault back, print which guard told of it, and what it does where none looks. 1 if any is missed."""
    with Provocation(device) as provocation, Progress(console=console, transient=True) as progress:
        found = [provocation.find(each) for each in progress.track(FAULTS.values(), description="faults")]
    return _told(console, "faults", found, f" on {device}") | _policy_faults(console) | _rank_faults(console)


def _policy_faults(console: Console) -> int:
    """Those of what decides which trees are verified, on the CPU."""
    with Progress(console=console, transient=True) as progress:
        found = [find_in_scene(each) for each in progress.track(POLICY_FAULTS.values(), description="policy")]
    return _told(console, "faults of the policy", found)


def _rank_faults(console: Console) -> int:
    """Those of several ranks, on the CPU."""
    try:
        from treetop_debug.provoke_ranks import NAMES, find_rank_fault  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        console.print(f"faults of ranks: not run without {error.name}: install {DISTRIBUTION}[serve]")
        return 0
    with Progress(console=console, transient=True) as progress:
        found = [find_rank_fault(name) for name in progress.track(NAMES, description="ranks")]
    return _told(console, "faults of ranks", found, harm=False)


def _told(console: Console, title: str, findings: Sequence[Finding], where: str = "", harm: bool = True) -> int:
    """A row a fault, and how many were caught. harm: they were looked at without a guard, too. 1 if any is missed."""
    rows = [
        (f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "", f.harm or "NO HARM SHOWN") for f in findings
    ]
    head, shown = ("fault", "guard", "what it said", "without a guard"), 4 if harm else 3
    print_table(console, title, head[:shown], [row[:shown] for row in rows])
    caught = sum(f.ok if harm else f.caught is not None for f in findings)
    with_harm = ", with harm shown without a guard" if harm else ""
    console.print(f"{title}: {caught} of {len(findings)} caught{where}{with_harm}")
    return int(caught < len(findings))
