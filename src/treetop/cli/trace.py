"""`treetop trace`: a page that shows every draft tree."""

import argparse
import sys
from pathlib import Path

from treetop.cli.options import add_engine_options, add_sampling_options, engine_options, read_prompt, sampling_params
from treetop.cli.output import summary

HELP = "decode a prompt and write an HTML page that shows every draft tree"


def add_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="text to complete")
    text.add_argument("--prompt-file", help="file with the text to complete")
    parser.add_argument("--output", required=True, metavar="FILE.html", help="where the page goes")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    prompt = args.prompt if args.prompt_file is None else read_prompt(args.prompt_file)
    from treetop.tools import trace

    traced = trace.run(args.model, engine_options(args), prompt, params, Path(args.output))
    output, counted = traced.output, traced.statistics()
    elapsed_s = len(output.token_ids) / output.metrics.tokens_per_second if output.token_ids else 1.0
    print(f"{args.output} {summary([output], elapsed_s)}")
    for what, tally in (("depth", counted.by_depth), ("rank", counted.by_rank)):
        rates = (f"{at}: {accepted / max(tested, 1):.2f}" for at, (tested, accepted) in enumerate(tally, 1))
        print(f"accepted of the nodes tested, by {what}  {'  '.join(rates)}")
    if output.error is not None:
        print(f"treetop: the request was aborted: {output.error}", file=sys.stderr)
    return int(output.error is not None)
