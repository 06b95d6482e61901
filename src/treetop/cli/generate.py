"""`treetop generate`: complete prompts."""

import argparse
import json
import sys
import time
from typing import Any

from treetop.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    read_prompt,
    sampling_params,
    simulation,
)
from treetop.cli.output import as_json, round_tokens, summary
from treetop.types.errors import InputError, PromptError
from treetop.types.sampling import SamplingParams

HELP = "complete prompts; streams text, then a one-line summary"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="text to complete; repeat for several")
    parser.add_argument("--prompt-file", action="append", default=[], help="file with a text to complete; repeats")
    add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout, nothing else there")
    parser.add_argument("--echo", action="store_true", help="show the prompt before its completion")
    parser.add_argument(
        "--compare-plain", action="store_true", help="also decode plainly, check that the tokens are equal, and time it"
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if args.compare_plain and (option := simulation(args)):
        raise InputError(f"--compare-plain checks outputs, and {option} makes them wrong: drop one")
    prompts = [*(args.prompt or []), *(read_prompt(name) for name in args.prompt_file)]
    if not prompts:
        raise InputError("no prompt; give --prompt TEXT or --prompt-file FILE")
    outputs, elapsed_s = _stream(args, prompts, params)
    if not args.json:
        print("\n" + summary(outputs, elapsed_s))
    failed = any(output.error is not None for output in outputs)
    if args.compare_plain:
        failed |= not _compare_plain(args, prompts, params, outputs, elapsed_s)
    return int(failed)


def _stream(args: argparse.Namespace, prompts: list[str], params: SamplingParams) -> tuple[list[Any], float]:
    """Print one prompt's text as it comes, several prompts' results in order as they end. Returns results, seconds.

    The engine is gone on return, with the memory it held.
    """
    from treetop.llm import LLM

    llm = LLM(args.model, **engine_options(args))
    outputs: dict[int, Any] = {}
    started_s, shown = time.perf_counter(), 0
    try:
        deltas = llm.stream(prompts, [params] * len(prompts))
    except PromptError as error:
        raise InputError(f"{_label(args, error.index)}: {error.reason}") from None
    if option := simulation(args):
        print(f"treetop: {option}: the output is wrong on purpose", file=sys.stderr)
    single = len(prompts) == 1 and not args.json
    if single and args.echo:
        print(prompts[0], end="", flush=True)
    for delta in deltas:
        if single:
            print(delta.text, end="", flush=True)
        if delta.output is not None:
            outputs[delta.index] = delta.output
        while shown in outputs:
            _show(args, outputs[shown], None if single else shown, prompts[shown])
            shown += 1
    return [outputs[index] for index in range(len(prompts))], time.perf_counter() - started_s


def _show(args: argparse.Namespace, output: Any, index: int | None, prompt: str) -> None:
    """Print a result that has ended. index: None if its text has been streamed already."""
    if args.json:
        print(json.dumps(as_json(output)), flush=True)
    elif index is not None:
        print(f"--- prompt {index}\n{prompt if args.echo else ''}{output.text}", flush=True)
    if output.error is not None:
        print(f"treetop: prompt {index or 0} was aborted: {output.error}", file=sys.stderr)


def _label(args: argparse.Namespace, index: int) -> str:
    """Which prompt of the command line this is: texts come before files."""
    texts = len(args.prompt or [])
    return f"--prompt-file {args.prompt_file[index - texts]}" if index >= texts else f"--prompt, number {index + 1}"


def _compare_plain(
    args: argparse.Namespace, prompts: list[str], params: SamplingParams, outputs: list[Any], elapsed_s: float
) -> bool:
    """Decode the prompts again without a draft; print how much slower that was; True if the tokens are equal."""
    from treetop.bench.equality import equal_outputs
    from treetop.bench.rounds import plain_options
    from treetop.llm import LLM

    plain = LLM(args.model, **plain_options(engine_options(args)))
    started_s = time.perf_counter()
    expected = plain.generate(prompts, params)
    plain_s = time.perf_counter() - started_s
    equality = equal_outputs(plain, expected, outputs, sampled=not params.greedy)
    rounds = sum(output.metrics.target_forwards for output in outputs)
    length = (
        f"{round_tokens(outputs) / rounds:.2f} tokens per target pass" if rounds else "no target pass after prompts"
    )
    print(
        f"{length}; {plain_s / elapsed_s:.2f}x the speed of plain decoding"
        f" in this run ({plain_s:.2f} s); {equality.sentence()}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return equality.ok
