"""From the words of a command line to the command that runs, and from what ends it to an exit code."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from treetop.cli import bench, bench_serve, chat, doctor, generate, inspect, models, quantize, run_batch, serve, trace
from treetop.cli.environment import environment_words, warn_of_unknown, with_words
from treetop.cli.hints import short, unknown_options, with_hint
from treetop.types.default_model import VARIABLE, default_line
from treetop.types.errors import ConfigError, EngineError, UserError
from treetop.version import DISTRIBUTION, __version__


class Command(Protocol):
    """What a command's file has. HELP: what it does, in a line."""

    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Returns the exit code. Raises UserError and EngineError."""


COMMANDS: dict[str, Command] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "run-batch": run_batch,
    "bench": bench,
    "bench-serve": bench_serve,
    "trace": trace,
    "doctor": doctor,
    "inspect": inspect,
    "models": models,
    "quantize": quantize,
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, and whose options are spelled out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """`bench serve` is a command of its own, beside `bench MODEL`, for which argparse would take it."""
        args = list(sys.argv[1:] if args is None else args)
        words = ["bench-serve", *args[2:]] if args[:2] == ["bench", "serve"] else args
        known, rest = super().parse_known_args(words, namespace)
        if any(word.startswith("-") for word in rest) and not self.has_commands:
            self.error(unknown_options(rest, self._option_string_actions))
        return known, rest

    @property
    def has_commands(self) -> bool:
        return self._subparsers is not None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]}: {short(_one_line(with_hint(message)))}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch: threads that wait leave the cores to others
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of what the terminal's encoding lacks
    parser, given = build_parser(), sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    if getattr(args, "verbose", False):
        logger = logging.getLogger("treetop")
        logger.setLevel(logging.INFO)
        logger.addHandler(logging.StreamHandler(sys.stderr))
    return exit_code("treetop", lambda: _run(args, parser, given))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser, given: Sequence[str]) -> int:
    """Run a command, on engines with a bug of the past if the environment names one."""
    args = with_defaults_of_the_place(args, parser, given)
    if (
        not os.environ.get(VARIABLE)
        and getattr(args, "model", "") is None
        and getattr(args, "model_flag", None) is None
    ):
        print(f"treetop: {default_line()}", file=sys.stderr)
    args.words = [*given]  # for reports that name their command
    if not os.environ.get("TREETOP_FAULT"):
        return int(args.run(args))
    try:
        from treetop_debug.faults import environment_fault
    except ModuleNotFoundError as error:
        raise ConfigError(f"TREETOP_FAULT needs {error.name}; pip install {DISTRIBUTION}[debug]") from None
    with environment_fault(os.environ):
        return int(args.run(args))


def with_defaults_of_the_place(
    args: argparse.Namespace, parser: argparse.ArgumentParser, given: Sequence[str]
) -> argparse.Namespace:
    """With what the environment and a configuration file say, where the command line does not. Raises ConfigError."""
    if not getattr(args, "takes_engine", False):
        return args
    warn_of_unknown(os.environ)
    words = with_words(given, environment_words(args, os.environ))
    if getattr(args, "config", None) is not None:
        from treetop.cli.config_file import with_config_file

        words = with_config_file(args, words)
    return parser.parse_args(words) if len(words) > len(given) else args


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
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.HELP)
        command.add_options(of_command)
        of_command.set_defaults(run=command.run)
    return parser
