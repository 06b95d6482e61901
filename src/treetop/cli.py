"""The command line: `treetop generate`, `serve`, `bench`, `trace`, `doctor`.

Exit codes: 0 ok; 1 a failure at run time, unequal outputs in bench, failed conformance or an uncaught
fault in doctor; 2 bad input or configuration, one line on
stderr; 130 Ctrl-C.
"""

import argparse
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from treetop.types.config import CHOICES, EngineConfig, flag
from treetop.types.errors import EngineError, InputError, PromptError, UserError
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

ENGINE_HELP = {
    "draft": "folder of the draft head, or builtin:NAME; a model without one decodes plainly (default: none, and the"
    " embedded head for the embedded model)",
    "speculative_algorithm": "NONE forbids a draft (default: what the draft's tensors are)",
    "speculative_num_steps": "levels of the tree (S)",
    "speculative_eagle_topk": "branches of each node (k); 1 is a chain",
    "speculative_num_draft_tokens": "nodes verified in one pass, root included (T)",
    "load_format": "dummy: random weights; a folder with config.json is enough; for measuring speed",
    "compress_weights": "keep weights in 12 bits too, without loss, which makes small batches faster; on by default in"
    " bfloat16 on a GPU like an H200 if that takes up to a quarter of what is left for KV pools",
    "simulate_accept_length": "tokens every round emits: the output is wrong; for measuring speed only",
    "page_size": "tokens a KV page holds",
    "max_running_requests": "requests decoded at a time",
    "context_length": "tokens a request may hold, prompt and output (default: the model's)",
    "max_total_tokens": "tokens each KV pool holds, whatever the fraction below says (default: what fits, and no more"
    " than all running requests can use)",
    "mem_fraction_static": "share of the device's memory for weights, tables and KV pools",
    "chunked_prefill_size": "prompt tokens a prefill step processes, padding counted (default: 512 on a CPU, 2048 to"
    " 8192 on a GPU by its memory)",
    "disable_radix_cache": "do not keep the K/V of prompts and outputs for prompts that begin alike",
    "attention_backend": "who computes attention",
    "overlap": "launch a round before the last one's results are known; on by default where rounds are captured",
    "graphs": "captured graphs; sim gives a CPU their semantics, for tests",
    "device": "auto is a GPU if there is one",
    "dtype": "what the model computes in; auto is float32 on a CPU and bfloat16 on a GPU",
    "check_level": "0 off, 1 host checks, 2 device probes, 3 poison and red zones",
    "tp_size": "GPUs that share the model, each with a part of every layer (docs/scale.md)",
    "step_timeout": "seconds after which a step that has not ended on every GPU ends them all; with --tp-size only",
    "seed": "each prompt draws its own seed from this one: the same seed and prompts give the same sampled tokens",
}


_METAVAR = {int: "N", float: "X", str: "FOLDER"}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, and whose options are spelled out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]}: {_one_line(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of what the terminal's encoding lacks
    parser, given = build_parser(), sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    if args.verbose:
        logger = logging.getLogger("treetop")
        logger.setLevel(logging.INFO)
        logger.addHandler(logging.StreamHandler(sys.stderr))
    return exit_code("treetop", lambda: _run(args, parser, given))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser, given: Sequence[str]) -> int:
    """Run a command, on engines with a bug of the past if the environment names one."""
    if getattr(args, "config", None) is not None:
        from treetop.server.command import with_config_file

        args = parser.parse_args(with_config_file(args, given))
    if not os.environ.get("TREETOP_FAULT"):
        return int(args.run(args))
    from treetop.debug.faults import environment_fault

    with environment_fault(os.environ):
        return int(args.run(args))


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Run a command, or one of `scripts/`. What ends it early becomes its exit code, and one line on stderr."""
    try:
        return run()
    except UserError as error:
        print(f"{program}: {_one_line(error)}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"{program}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"{program}: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(message: object) -> str:
    """A message whose line ends and control characters, which names may hold, are escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(message))


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="treetop", description="Exact LLM inference with EAGLE tree speculative decoding.")
    parser.add_argument("--version", action="version", version=f"treetop {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=OneLineParser)

    generate = commands.add_parser("generate", help="complete prompts; streams text, then a one-line summary")
    generate.add_argument("--prompt", action="append", help="text to complete; repeat for several")
    generate.add_argument("--prompt-file", action="append", default=[], help="file with a text to complete; repeats")
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout, nothing else there")
    generate.add_argument("--echo", action="store_true", help="show the prompt before its completion")
    generate.add_argument(
        "--compare-plain", action="store_true", help="also decode plainly, check that the tokens are equal, and time it"
    )
    _add_engine(generate)
    generate.set_defaults(run=run_generate)

    _add_serve(commands.add_parser("serve", help="an HTTP server with OpenAI's API"))
    _add_bench(commands.add_parser("bench", help="plain against speculative decoding, and rounds against their floor"))

    trace = commands.add_parser("trace", help="decode a prompt and write an HTML page that shows every draft tree")
    text = trace.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="text to complete")
    text.add_argument("--prompt-file", help="file with the text to complete")
    trace.add_argument("--output", required=True, metavar="FILE.html", help="where the page goes")
    _add_sampling(trace)
    _add_engine(trace)
    trace.set_defaults(run=run_trace)

    doctor = commands.add_parser("doctor", help="what runs on this machine, capacity, and a quick conformance run")
    doctor.add_argument("--cases", type=int, default=24, help="conformance cases to run (default 24)")
    doctor.add_argument("--faults", action="store_true", help="run every named fault and say which guard caught it")
    _add_engine(doctor)
    doctor.set_defaults(run=run_doctor)
    return parser


def run_generate(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    if args.compare_plain and args.simulate_accept_length is not None:
        raise InputError("--compare-plain checks outputs, and --simulate-accept-length makes them wrong: drop one")
    prompts = [*(args.prompt or []), *(_read_text(name) for name in args.prompt_file)]
    if not prompts:
        raise InputError("no prompt; give --prompt TEXT or --prompt-file FILE")
    outputs, elapsed_s = _stream(args, prompts, params)
    if not args.json:
        print("\n" + _summary(outputs, elapsed_s))
    failed = any(output.error is not None for output in outputs)
    if args.compare_plain:
        failed |= not _compare_plain(args, prompts, params, outputs, elapsed_s)
    return int(failed)


def _stream(args: argparse.Namespace, prompts: list[str], params: SamplingParams) -> tuple[list[Any], float]:
    """Print one prompt's text as it comes, several prompts' results in order as they end. Returns results, seconds.

    The engine is gone on return, with the memory it held.
    """
    from treetop.server.llm import LLM

    llm = LLM(args.model, **_engine_options(args))
    outputs: dict[int, Any] = {}
    started_s, shown = time.perf_counter(), 0
    try:
        deltas = llm.stream(prompts, [params] * len(prompts))
    except PromptError as error:
        raise InputError(f"{_label(args, error.index)}: {error.reason}") from None
    if args.simulate_accept_length is not None:
        print("treetop: --simulate-accept-length: the output is wrong on purpose", file=sys.stderr)
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
        print(json.dumps(_as_json(output)), flush=True)
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
    from treetop.server.llm import LLM

    plain = LLM(args.model, **plain_options(_engine_options(args)))
    started_s = time.perf_counter()
    expected = plain.generate(prompts, params)
    plain_s = time.perf_counter() - started_s
    equality = equal_outputs(plain, expected, outputs, sampled=not params.greedy)
    rounds = sum(output.metrics.target_forwards for output in outputs)
    length = (
        f"{_round_tokens(outputs) / rounds:.2f} tokens per target pass" if rounds else "no target pass after prompts"
    )
    print(
        f"{length}; {plain_s / elapsed_s:.2f}x the speed of plain decoding"
        f" in this run ({plain_s:.2f} s); {equality.sentence()}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return equality.ok


def run_bench(args: argparse.Namespace) -> int:
    engine_options = _engine_options(args)
    asked = (args.sweep, args.shapes, args.batches, args.inputs, args.plot, args.simulate_accept_length)
    if args.load_format == "dummy" or any(each is not None for each in asked):
        return _run_sweep(args, engine_options)
    from treetop.bench.compare import BenchOptions, run

    names = [field.name for field in fields(BenchOptions)]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = BenchOptions(**given)
    report = run(args.model, engine_options, options)
    print(json.dumps(asdict(report)) if args.json else report.table())
    return int(not report.outputs_equal)


def _run_sweep(args: argparse.Namespace, engine_options: dict[str, Any]) -> int:
    """Rounds over a grid; text as it is measured, or one JSON object."""
    from treetop.bench import plot, rounds, sweeps

    compared = ["transformers", "prompts", "num_prompts", "max_tokens", "repeats"]
    given = [flag(name) for name in compared if getattr(args, name) not in (None, False)]
    if given:
        raise InputError(f"{', '.join(given)}: for comparing whole outputs, not for a sweep of rounds")
    if args.batches is not None and args.batch_size is not None:
        raise InputError("--batches and --batch-size: give one of them")
    if args.plot is not None:
        plot.check_path(Path(args.plot))
    names = [field.name for field in fields(sweeps.SweepOptions)]
    batch_size = 1 if args.batch_size is None else args.batch_size
    options = sweeps.SweepOptions(**{**{name: getattr(args, name) for name in names}, "batch_size": batch_size})
    grid = sweeps.make_grid(args.model, engine_options, options)
    tell = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    report = rounds.run_grid(args.model, engine_options, grid, tell)
    if args.json:
        print(json.dumps(report.as_json()))
    if args.plot is not None:
        Path(args.plot).write_text(plot.page(report), encoding="utf-8")
    return 0


def run_trace(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    prompt = args.prompt if args.prompt_file is None else _read_text(args.prompt_file)
    from treetop.trace import run

    output = run(args.model, _engine_options(args), prompt, params, Path(args.output)).output
    elapsed_s = len(output.token_ids) / output.metrics.tokens_per_second if output.token_ids else 1.0
    print(f"{args.output} {_summary([output], elapsed_s)}")
    if output.error is not None:
        print(f"treetop: the request was aborted: {output.error}", file=sys.stderr)
    return int(output.error is not None)


def run_doctor(args: argparse.Namespace) -> int:
    from treetop.doctor.run import Visit, run

    if args.cases < 1:
        raise InputError(f"--cases must be at least 1, got {args.cases}")
    return run(args.model, _engine_options(args), Visit(args.cases, args.faults))


def _add_serve(serve: argparse.ArgumentParser) -> None:
    from treetop.server import command

    _add_engine(serve, command.ENGINE_ALIASES)
    command.add_serve_flags(serve)
    serve.set_defaults(run=lambda args: command.run_serve(args, _engine_options(args)))


def _add_bench(bench: argparse.ArgumentParser) -> None:
    compare = bench.add_argument_group("plain against speculative, the default")
    compare.add_argument(
        "--prompts", help="JSON lines with a `prompt` each; the held-out prompts of nestling by default"
    )
    compare.add_argument("--num-prompts", type=int, help="(default 8)")
    compare.add_argument("--max-tokens", type=int, help="(default 128)")
    compare.add_argument("--repeats", type=int, help="timed passes over the prompts (default 5)")
    compare.add_argument("--transformers", action="store_true", help="time transformers' generate too, in the same run")
    sweep = bench.add_argument_group("rounds against their floor: with one of these, dummy weights or a forced length")
    sweep.add_argument(
        "--sweep", choices=("batch", "context", "tree", "table"), help="1..64, 1k..32k, shapes, or a table"
    )
    sweep.add_argument("--shapes", nargs="+", metavar="S,k,T", help="instead of the sweep's; 0,1,1 decodes plainly")
    sweep.add_argument("--batches", nargs="+", type=int, metavar="N", help="instead of the sweep's or --batch-size")
    sweep.add_argument(
        "--inputs", nargs="+", type=int, metavar="N", help="prompt lengths, instead of the sweep's or 1024"
    )
    sweep.add_argument("--plot", metavar="FILE.html", help="also draw the sweep")
    bench.add_argument("--batch-size", type=int, help="prompts decoded together (default 1)")
    bench.add_argument("--rounds", type=int, default=20, help="rounds to time (default 20)")
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    _add_engine(bench)
    bench.set_defaults(run=run_bench)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    default = SamplingParams()
    parser.add_argument("--max-tokens", type=int, help=f"tokens to generate at most (default {default.max_tokens})")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default 0)")
    parser.add_argument("--top-k", type=int, help="the most likely tokens to choose from; 0 is off (default 0)")
    parser.add_argument("--top-p", type=float, help="their probability together; 1 is off (default 1)")
    parser.add_argument("--min-p", type=float, help="least share of the most likely token's; 0 is off (default 0)")
    parser.add_argument("--stop", action="append", help="text that ends the completion; repeats")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past an end-of-sequence token")


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options that were given. `--seed` is the engine's: each prompt draws its own from it."""
    names = [field.name for field in fields(SamplingParams) if field.name != "seed"]
    try:
        return SamplingParams(**{name: value for name in names if (value := getattr(args, name, None)) is not None})
    except InputError as error:  # its sentences begin with the parameter's name
        raise InputError(re.sub(rf"(^|; )({'|'.join(names)})\b", lambda m: m[1] + flag(m[2]), str(error))) from None


def _add_engine(parser: argparse.ArgumentParser, aliases: Mapping[str, Sequence[str]] | None = None) -> None:
    """Flags of all engine options. aliases: more spellings of some."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of the target; the embedded pair by default")
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what the engine is made of")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        known = field.default is not None and not isinstance(field.default, bool)
        words = ENGINE_HELP[field.name] + (f" (default {field.default})" if known else "")
        options: dict[str, Any] = {"dest": field.name, "default": None, "help": words}
        if isinstance(field.default, bool):
            options["action"] = "store_true"
        elif bool in getattr(hints[field.name], "__args__", ()):
            options["action"] = argparse.BooleanOptionalAction
        else:
            kinds = (hints[field.name], *getattr(hints[field.name], "__args__", ()))
            options["type"] = next((kind for kind in (int, float) if kind in kinds), str)
            options["choices"] = CHOICES.get(field.name)
            options["metavar"] = None if field.name in CHOICES else _METAVAR[options["type"]]
        parser.add_argument(flag(field.name), *(aliases or {}).get(field.name, ()), **options)


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given; the others keep their defaults."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null byte in the name
        raise InputError(f"--prompt-file {name}: {error}") from None


def _as_json(output: Any) -> dict[str, object]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(output.token_ids)},
        "metrics": {
            "accept_length": output.metrics.accept_length,
            "target_forwards": output.metrics.target_forwards,
            "tokens_per_second": output.metrics.tokens_per_second,
        },
    }


def _summary(outputs: list[Any], elapsed_s: float) -> str:
    tokens = sum(len(output.token_ids) for output in outputs)
    rounds = sum(output.metrics.target_forwards for output in outputs)
    reasons = ", ".join(sorted({output.finish_reason for output in outputs}))
    length = f", accept length {_round_tokens(outputs) / rounds:.2f}" if rounds else ""
    return f"[{tokens} tokens, {rounds} target passes{length}, {tokens / elapsed_s:.0f} tokens/s, {reasons}]"


def _round_tokens(outputs: list[Any]) -> int:
    return sum(output.round_tokens for output in outputs)


if __name__ == "__main__":
    sys.exit(main())
