"""`treetop doctor`: what runs on this machine. With `--exactness`, whether bits are those of plain decoding here."""

import argparse

from treetop.cli.options import add_engine_options, engine_options
from treetop.types.errors import InputError

HELP = "what runs on this machine, capacity, and a quick conformance run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=24, help="conformance cases to run (default 24)")
    parser.add_argument("--faults", action="store_true", help="run every named fault and say which guard caught it")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.cases < 1:
        raise InputError(f"--cases must be at least 1, got {args.cases}")
    from treetop.doctor.run import Visit
    from treetop.doctor.run import run as run_doctor

    visit = Visit(args.cases, args.faults, args.exactness is not None)
    return run_doctor(args.model, engine_options(args), visit)
