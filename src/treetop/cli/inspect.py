"""`treetop inspect`: what a checkpoint is, and whether it fits."""

import argparse
import json

from treetop.cli.options import add_engine_options, engine_options
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError

HELP = "what a folder or a model of the hub is, what it takes, and whether it fits; reads no weights"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if it fits, 2 if not."""
    from treetop.tools.inspect import as_json, as_text, inspect

    if args.load_format == "dummy":
        raise InputError("--load-format dummy: inspect says what files hold; leave it out")
    report = inspect(EngineConfig.of(args.model, **engine_options(args)))
    print(json.dumps(as_json(report)) if args.json else as_text(report))
    return 0 if report.fits else 2
