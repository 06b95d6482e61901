"""`treetop bench`: plain against speculative decoding, and rounds against their floor."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from treetop.cli.options import add_engine_options, engine_options
from treetop.types.config import check_writable
from treetop.types.errors import InputError
from treetop.types.options import flag

HELP = "plain against speculative decoding, and rounds against their floor"


def add_options(parser: argparse.ArgumentParser) -> None:
    compare = parser.add_argument_group("plain against speculative, the default")
    compare.add_argument(
        "--prompts",
        help="JSON lines with a `prompt` each, for --sweep heads also a `kind`; the held-out prompts of nestling by"
        " default, for --sweep heads chats, code, summaries and JSON",
    )
    compare.add_argument("--num-prompts", type=int, help="(default 8; for --sweep heads 10 of each kind)")
    compare.add_argument("--max-tokens", type=int, help="(default 128)")
    compare.add_argument("--repeats", type=int, help="timed passes over the prompts (default 5)")
    compare.add_argument("--transformers", action="store_true", help="time transformers' generate too, in the same run")
    sweep = parser.add_argument_group("rounds against their floor: with one of these, dummy weights or a forced length")
    sweep.add_argument(
        "--sweep",
        choices=("batch", "context", "tree", "table", "load", "heads"),
        help="1..64, 1k..32k, shapes, or a table; load: 1..128, --speculative-policy auto against plain and each shape;"
        " heads: what a draft head is worth on whole answers, as a page and JSON (docs/heads.md)",
    )
    sweep.add_argument(
        "--shapes",
        nargs="+",
        metavar="S,k,T",
        help="instead of the sweep's; 0,1,1 decodes plainly; for --sweep heads S,k,T+learn learns a calibration",
    )
    sweep.add_argument("--batches", nargs="+", type=int, metavar="N", help="instead of the sweep's or --batch-size")
    sweep.add_argument(
        "--inputs", nargs="+", type=int, metavar="N", help="prompt lengths, instead of the sweep's or 1024"
    )
    sweep.add_argument(
        "--plot", metavar="FILE.html", help="also draw the sweep (--sweep heads: heads.html, and heads.json beside it)"
    )
    heads = parser.add_argument_group("for --sweep heads alone")
    heads.add_argument("--temperatures", nargs="+", type=float, metavar="X", help="(default 0 0.8)")
    heads.add_argument("--minutes", type=float, metavar="X", help="after these nothing more is begun (default: no end)")
    parser.add_argument("--batch-size", type=int, help="prompts decoded together (default 1)")
    parser.add_argument("--rounds", type=int, help="rounds to time (default 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    given_to_engine = engine_options(args)
    if args.sweep == "heads":
        return _run_heads(args, given_to_engine)
    _refuse(args, ("temperatures", "minutes"), "for --sweep heads alone")
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
    from treetop.bench import load, load_plot, page

    others = ("shapes", "inputs", "transformers", "num_prompts", "batch_size", "rounds")
    _refuse(args, others, "not for --sweep load, whose shapes are --speculative-shapes")
    if args.plot is not None:
        page.check_path(Path(args.plot))
    names = [field.name for field in fields(load.BatchSweepOptions)]
    options = load.BatchSweepOptions(**{name: value for name in names if (value := getattr(args, name)) is not None})
    tell = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    report = load.run(args.model, given_to_engine, options, tell)
    print(json.dumps(asdict(report)) if args.json else "\n".join(report.verdicts()))
    if args.plot is not None:
        Path(args.plot).write_text(load_plot.page(report), encoding="utf-8")
    return 0


def _run_heads(args: argparse.Namespace, given_to_engine: dict[str, Any]) -> int:
    """What a head is worth: text as it is measured, and at the end a page and JSON."""
    from treetop.bench import heads, heads_plot
    from treetop.bench.page import check_path

    _refuse(args, ("batches", "inputs", "transformers", "repeats", "rounds"), "not for --sweep heads")
    page = Path(args.plot or "heads.html")
    data = page.with_suffix(".json")
    check_path(page)
    check_writable(data, "--plot")
    there = [str(path) for path in (page, data) if args.plot is None and path.exists()]
    if there:
        raise InputError(f"{' and '.join(there)}: there from an earlier run; name another page with --plot")
    names = [field.name for field in fields(heads.HeadsOptions)]
    options = heads.HeadsOptions(**{name: value for name in names if (value := getattr(args, name)) is not None})
    progress = sys.stderr if args.json else sys.stdout
    tell = partial(print, file=progress, flush=True)
    report = heads.run(args.model, given_to_engine, options, tell, shlex.join(["treetop", *args.words]))
    text = json.dumps(report.as_json(), indent=1)
    data.write_text(text + "\n", encoding="utf-8")
    page.write_text(heads_plot.page(report), encoding="utf-8")
    for line in report.conclusions():
        tell(line)
    tell(f"wrote {page} and {data}")
    if args.json:
        print(text)
    return int(not report.ok)


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise InputError if one of these options was given."""
    given = [flag(name) for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise InputError(f"{', '.join(given)}: {why}")


def _run_sweep(args: argparse.Namespace, given_to_engine: dict[str, Any]) -> int:
    """Rounds over a grid; text as it is measured, or one JSON object."""
    from treetop.bench import page, plot, rounds, sweeps

    compared = ("transformers", "prompts", "num_prompts", "max_tokens", "repeats")
    _refuse(args, compared, "for comparing whole outputs, not for a sweep of rounds")
    if args.batches is not None and args.batch_size is not None:
        raise InputError("--batches and --batch-size: give one of them")
    if args.plot is not None:
        page.check_path(Path(args.plot))
    names = [field.name for field in fields(sweeps.SweepOptions)]
    defaults = {"batch_size": 1, "rounds": 20}
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = sweeps.SweepOptions(**{**dict.fromkeys(names), **defaults, **given})
    grid = sweeps.make_grid(args.model, given_to_engine, options)
    tell = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    report = rounds.run_grid(args.model, given_to_engine, grid, tell)
    if args.json:
        print(json.dumps(report.as_json()))
    if args.plot is not None:
        Path(args.plot).write_text(plot.page(report), encoding="utf-8")
    return 0
