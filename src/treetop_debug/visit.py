"""What `treetop doctor --faults` runs and prints."""

from rich.console import Console
from rich.progress import Progress

from treetop.doctor.tables import print_table
from treetop.version import DISTRIBUTION
from treetop_debug.faults import FAULTS
from treetop_debug.policy_faults import POLICY_FAULTS
from treetop_debug.provoke import Finding, Provocation
from treetop_debug.provoke_policy import find_policy_fault


def show_faults(console: Console, device: str) -> int:
    """Put each fault back, print which guard told of it, and what it does where none looks. 1 if any is missed."""
    findings: list[Finding] = []
    with Provocation(device) as provocation, Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=len(FAULTS))
        for fault in FAULTS.values():
            findings.append(provocation.find(fault))
            progress.advance(task)
    rows = [
        (f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "", f.harm or "NO HARM SHOWN") for f in findings
    ]
    print_table(console, "faults", ("fault", "guard", "what it said", "without a guard"), rows)
    missed = [f.fault.name for f in findings if not f.ok]
    console.print(
        f"faults: {len(findings) - len(missed)} of {len(findings)} caught on {device}, with harm shown without a guard"
    )
    return int(bool(missed)) | _policy_faults(console) | _rank_faults(console)


def _policy_faults(console: Console) -> int:
    """Those of what decides which trees are verified, on the CPU."""
    with Progress(console=console, transient=True) as progress:
        findings = [find_policy_fault(name) for name in progress.track(POLICY_FAULTS, description="policy")]
    rows = [
        (f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "", f.harm or "NO HARM SHOWN") for f in findings
    ]
    print_table(console, "faults of the policy", ("fault", "guard", "what it said", "without a guard"), rows)
    num_caught = sum(f.ok for f in findings)
    console.print(f"faults of the policy: {num_caught} of {len(findings)} caught, with harm shown without a guard")
    return int(num_caught < len(findings))


def _rank_faults(console: Console) -> int:
    """Those of several ranks, on the CPU."""
    try:
        from treetop_debug.provoke_ranks import NAMES, find_rank_fault  # noqa: PLC0415  # needs an extra
    except ModuleNotFoundError as error:
        console.print(f"faults of ranks: not run without {error.name}: install {DISTRIBUTION}[serve]")
        return 0
    with Progress(console=console, transient=True) as progress:
        findings = [find_rank_fault(name) for name in progress.track(NAMES, description="ranks")]
    rows = [(f.fault.name, f.by if f.caught else "NOT CAUGHT", f.caught or "") for f in findings]
    print_table(console, "faults of ranks", ("fault", "guard", "what it said"), rows)
    num_caught = sum(f.caught is not None for f in findings)
    console.print(f"faults of ranks: {num_caught} of {len(findings)} caught")
    return int(num_caught < len(findings))
