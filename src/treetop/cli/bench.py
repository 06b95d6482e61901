"""`treetop bench`: plain against speculative decoding, and rounds against their floor."""

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from treetop.cli.options import add_engine_options, engine_options
from treetop.types.errors import InputError
from treetop.types.options import flag

HELP = "plain against speculative decoding, and rounds against their floor"


def add_options(parser: argparse.ArgumentParser) -> None:
    compare = parser.add_argument_group("plain against speculative, the default")
    compare.add_argument(
        "--prompts", help="JSON lines with a `prompt` each; the held-out prompts of nestling by default"
    )
    compare.add_argument("--num-prompts", type=int, help="(default 8)")
    compare.add_argument("--max-tokens", type=int, help="(default 128)")
    compare.add_argument("--repeats", type=int, help="timed passes over the prompts (default 5)")
    compare.add_argument("--transformers", action="store_true", help="time transformers' generate too, in the same run")
    sweep = parser.add_argument_group("rounds against their floor: with one of these, dummy weights or a forced length")
    sweep.add_argument(
        "--sweep",
        choices=("batch", "context", "tree", "table", "load"),
        help="1..64, 1k..32k, shapes, or a table; load: 1..128, --speculative-policy auto against plain and each shape",
    )
    sweep.add_argument("--shapes", nargs="+", metavar="S,k,T", help="instead of the sweep's; 0,1,1 decodes plainly")
    sweep.add_argument("--batches", nargs="+", type=int, metavar="N", help="instead of the sweep's or --batch-size")
    sweep.add_argument(
        "--inputs", nargs="+", type=int, metavar="N", help="prompt lengths, instead of the sweep's or 1024"
    )
    sweep.add_argument("--plot", metavar="FILE.html", help="also draw the sweep")
    parser.add_argument("--batch-size", type=int, help="prompts decoded together (default 1)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds to time (default 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    given_to_engine = engine_options(args)
    if args.sweep == "load":
        return _run_load(args, given_to_engine)
    if args.speculative_policy == "auto":
        raise InputError("--speculative-policy auto: a benchmark of rounds has one shape; use --sweep load")
    simulated = args.simulate_accept_length, args.simulate_acceptance
    asked = (args.sweep, args.shapes, args.batches, args.inputs, args.plot, *simulated)
    if args.load_format == "dummy" or any(each is not None for each in asked):
        return _run_sweep(args, given_to_engine)
    from treetop.bench import compare

    names = [field.name for field in fields(compare.BenchOptions)]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = compare.BenchOptions(**given)
    report = compare.run(args.model, given_to_engine, options)
    print(json.dumps(asdict(report)) if args.json else report.table())
    return int(not report.outputs_equal)


def _run_load(args: argparse.Namespace, given_to_engine: dict[str, Any]) -> int:
    """The policy against fixed shapes over batches."""
    from treetop.bench import axes, load, load_plot

    others = ("shapes", "inputs", "transformers", "num_prompts", "batch_size")
    given = [flag(name) for name in others if getattr(args, name) not in (None, False)]
    if given:
        raise InputError(f"{', '.join(given)}: not for --sweep load, whose shapes are --speculative-shapes")
    if args.plot is not None:
        axes.check_path(Path(args.plot))
    names = [field.name for field in fields(load.LoadOptions)]
    options = load.LoadOptions(**{name: value for name in names if (value := getattr(args, name)) is not None})
    tell = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    report = load.run(args.model, given_to_engine, options, tell)
    print(json.dumps(asdict(report)) if args.json else "\n".join(report.verdicts()))
    if args.plot is not None:
        Path(args.plot).write_text(load_plot.page(report), encoding="utf-8")
    return 0


def _run_sweep(args: argparse.Namespace, given_to_engine: dict[str, Any]) -> int:
    """Rounds over a grid; text as it is measured, or one JSON object."""
    from treetop.bench import axes, plot, rounds, sweeps

    compared = ["transformers", "prompts", "num_prompts", "max_tokens", "repeats"]
    given = [flag(name) for name in compared if getattr(args, name) not in (None, False)]
    if given:
        raise InputError(f"{', '.join(given)}: for comparing whole outputs, not for a sweep of rounds")
    if args.batches is not None and args.batch_size is not None:
        raise InputError("--batches and --batch-size: give one of them")
    if args.plot is not None:
        axes.check_path(Path(args.plot))
    names = [field.name for field in fields(sweeps.SweepOptions)]
    batch_size = 1 if args.batch_size is None else args.batch_size
    options = sweeps.SweepOptions(**{**{name: getattr(args, name) for name in names}, "batch_size": batch_size})
    grid = sweeps.make_grid(args.model, given_to_engine, options)
    tell = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    report = rounds.run_grid(args.model, given_to_engine, grid, tell)
    if args.json:
        print(json.dumps(report.as_json()))
    if args.plot is not None:
        Path(args.plot).write_text(plot.page(report), encoding="utf-8")
    return 0
