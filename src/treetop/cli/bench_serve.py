"""`treetop bench serve` on the command line."""

import argparse
import json
import os
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from treetop.bench import serve, serve_compare
from treetop.bench.arrivals import ARRIVALS
from treetop.bench.lengths import SPECIFICATION
from treetop.bench.page import check_path
from treetop.bench.serve import LoadOptions
from treetop.bench.serve_plot import page
from treetop.types.errors import ConfigError
from treetop.types.options import flag

KEY_VARIABLE = "OPENAI_API_KEY"

HELP = "load on a server over HTTP, and how fast it answers; spelled `bench serve`"

_WORDS = {
    "base_url": "the server (default %(default)s)",
    "endpoint": "completions or chat (default %(default)s)",
    "model": "name to ask for (default: the first of /v1/models)",
    "api_key": f"key to bring (default: ${KEY_VARIABLE})",
    "num_prompts": "conversations of a run (default %(default)s)",
    "num_turns": "turns of each; a turn's prompt holds those before it and their answers (default %(default)s)",
    "shared_prefix_words": "random words that all begin with (default %(default)s)",
    "input_words": "random words of a turn, instead of prompts of a file",
    "prompts_per_client": "conversations of a run for each that is had at a time, instead of --num-prompts",
    "input_len": f"tokens of a prompt of random ids, instead: {SPECIFICATION}",
    "lengths": "JSON lines with `input_len` and `output_len`, such as those of real requests, instead",
    "prompts": "JSON lines with a `prompt` each (default: the embedded model's held-out prompts)",
    "output_len": "most tokens of an answer (default %(default)s)",
    "ignore_eos": "go on past an end-of-sequence token; servers of their own kind take this field",
    "return_token_ids": "ask for token ids in every event, for a server that has no tokenizer",
    "temperature": "(default %(default)s)",
    "request_rate": "conversations begun in a second (default: all at once)",
    "arrivals": f"how they come at that rate: {', '.join(ARRIVALS)} (default %(default)s)",
    "burst_size": "of bursts (default %(default)s)",
    "max_concurrency": "conversations at a time; several numbers are several runs (default: no limit)",
    "goodput": "NAME:MS with ttft, tpot, itl or e2e: count the requests a second that kept to all of these",
    "request_timeout": "seconds after which a request has failed (default %(default)s)",
    "seed": "of prompts and arrivals (default %(default)s)",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for each in fields(LoadOptions):
        default: Any = each.default if each.default is not MISSING else None
        options: dict[str, Any] = {"help": _WORDS[each.name], "default": default}
        if each.name in ("ignore_eos", "return_token_ids"):
            options["action"] = "store_true"
        elif each.name in ("max_concurrency", "goodput"):
            options |= {"nargs": "+", "metavar": "N" if each.name == "max_concurrency" else "NAME:MS"}
            options |= {"type": int} if each.name == "max_concurrency" else {}
        elif each.name in ("request_rate", "input_words", "prompts_per_client"):
            options["type"] = float if each.name == "request_rate" else int
        else:
            options["type"] = str if default is None else type(default)
        parser.add_argument(flag(each.name), **options)
    parser.add_argument("--plot", metavar="FILE.html", help="also draw tokens/s of a user against tokens/s of all")
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="[NAME=]FILE",
        help="load nothing: show what several servers' --json said side by side, with --plot as a page",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    parser.set_defaults(verbose=False)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a request failed. Raises UserError and EngineError."""
    plot = Path(args.plot) if args.plot is not None else None
    if plot is not None:
        check_path(plot)
    if args.compare:
        return _compare(args.compare, plot)
    given = {each.name: getattr(args, each.name) for each in fields(LoadOptions)}
    given["max_concurrency"] = tuple(given["max_concurrency"] or ())
    given["goodput"] = dict(_limit(each) for each in given["goodput"] or ())
    given["api_key"] = given["api_key"] or os.environ.get(KEY_VARIABLE)
    options = LoadOptions(**given)
    report = serve.run(options, (lambda text: None) if args.json else (lambda text: print(text, flush=True)))
    if args.json:
        print(json.dumps(asdict(report)))
    if plot is not None:
        plot.write_text(page(report), encoding="utf-8")
    return int(report.failed > 0)


def _compare(files: list[str], plot: Path | None) -> int:
    """Exit code 1 if a request of any has failed."""
    reports = serve_compare.read_reports(files)
    print(serve_compare.text(reports))
    if plot is not None:
        plot.write_text(serve_compare.page(reports), encoding="utf-8")
    return int(any(report.failed for report in reports.values()))


def _limit(given: str) -> tuple[str, float]:
    name, _, maximum = given.partition(":")
    try:
        return name, float(maximum)
    except ValueError:
        raise ConfigError(f"--goodput {given}: expected NAME:MILLISECONDS") from None
