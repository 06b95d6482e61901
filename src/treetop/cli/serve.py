"""`treetop serve`: an HTTP server with OpenAI's API."""

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from treetop.cli.options import add_engine_options, add_flags, engine_options, given_options
from treetop.serve_options import ServeOptions, Unset, engine_config, is_installed
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.options import DEFAULT_SLOTS, DisaggregationOptions
from treetop.types.options import flag
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:
    from treetop.core.wire import ProcessOptions  # needs the serve extra

HELP = "an HTTP server with OpenAI's API"

_NEEDED = ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "jinja2", "yaml")
_ONLY_ONE = ("--pipeline-parallel-size",)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_serving_options(parser)
    apart = parser.add_argument_group("prefill and decode in workers of their own")
    add_flags(apart, DisaggregationOptions)
    apart.add_argument(
        "--disaggregation-bootstrap-port",
        type=int,
        metavar="PORT",
        help="as --disaggregation-listen, at the address of --host",
    )
    apart.add_argument(
        "--disaggregation-transfer-backend",
        choices=("nixl",),
        default="nixl",
        help="what moves KV (default %(default)s)",
    )


def add_serving_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Of whatever runs engines in processes behind the application. but: options of the server that it has not."""
    aliases = add_engine_options(parser)
    serve = parser.add_argument_group("server")
    add_flags(serve, ServeOptions, but)
    serve.add_argument("--config", metavar="FILE", help="YAML of flags without dashes; the command line has precedence")
    serve.add_argument(
        "--mock-engine",
        metavar="STEP_MS,TOKENS",
        help="no model runs: steps take so long and rounds give so many tokens (N, or A-B at random), for tests",
    )
    aliases.add_argument("--model", "--model-path", dest="model_flag", metavar="MODEL", help="as MODEL")
    aliases.add_argument(*_ONLY_ONE, dest="parallel_size", type=int, default=1, metavar="N", help="only 1 for now")


def run(args: argparse.Namespace) -> int:
    process, options = asked_for(args)
    from treetop.serve.serve import run as serve  # needs the serve extra

    return serve(process, options)


def asked_for(args: argparse.Namespace) -> tuple["ProcessOptions", ServeOptions]:
    """What an engine process is to run, but for its address, and how it is served. Raises ConfigError."""
    check_packages()
    given = engine_options(args)
    if args.parallel_size != 1:
        raise ConfigError(f"{', '.join(_ONLY_ONE)}: only 1 for now, got {args.parallel_size}")
    if args.model is not None and args.model_flag not in (None, args.model) and args.config is None:
        raise ConfigError(f"two models: {args.model} and --model {args.model_flag}")
    model = args.model if args.model is not None else args.model_flag
    config = engine_config(model, Unset.UNSET, given)
    options = serve_options(args)
    taken = set(options.served_model_name or (config.model,)) & set(config.adapters)
    if taken:
        raise ConfigError(f"--lora-modules: {', '.join(sorted(taken))} is the model's own name here; give another")
    disaggregation = disaggregation_options(args) if hasattr(args, "disaggregation_mode") else DisaggregationOptions()
    from treetop.core.wire import ProcessOptions, kv_events_options  # too
    from treetop.disaggregation.connector import check_disaggregation  # needs the serve extra
    from treetop.serve.mock_options import mock_options  # too

    slots = [flag(name) for name in ("disaggregation_slots", "disaggregation_slot_bytes") if name in given]
    if disaggregation.mode == "null" and slots:
        raise ConfigError(f"{', '.join(slots)}: only with --disaggregation-mode prefill or decode")
    if disaggregation.mode != "null" and not config.disaggregation_slots:
        if "disaggregation_slots" in given:
            raise ConfigError(f"--disaggregation-slots: --disaggregation-mode {disaggregation.mode} needs at least 1")
        config = replace(config, disaggregation_slots=DEFAULT_SLOTS)
    if disaggregation.mode == "prefill" and options.dp_size > 1:
        raise ConfigError("--dp-size: not with --disaggregation-mode prefill; start several, with an address each")
    process = ProcessOptions(
        "",
        config,
        mock_options(args.mock_engine, config),
        log_level=20,
        disaggregation=disaggregation,
        kv_events=kv_events_options(options.kv_events_config, config),
    )
    if disaggregation.mode != "null":
        if process.mock is not None:
            raise ConfigError(f"--disaggregation-mode {disaggregation.mode}: a mock engine has no KV to transfer")
        check_disaggregation(config, disaggregation)
    return process, options


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """The server's options that were given. Raises ConfigError."""
    return ServeOptions(**given_options(args, ServeOptions))


def disaggregation_options(args: argparse.Namespace) -> DisaggregationOptions:
    """What this worker does for others. Raises ConfigError."""
    given, port = given_options(args, DisaggregationOptions), args.disaggregation_bootstrap_port
    if port is not None and "listen" in given:
        raise ConfigError("--disaggregation-bootstrap-port and --disaggregation-listen: give one of them")
    if port is not None:
        host = args.host or ServeOptions().host
        given["listen"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return DisaggregationOptions(**given)


def check_packages() -> None:
    """Raise ConfigError, with what to install, if a package of the `serve` extra is missing."""
    missing = [name for name in _NEEDED if not is_installed(name)]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}; pip install {DISTRIBUTION}[serve]")
