"""`treetop serve` on the command line: its flags, the spellings of vLLM and SGLang, and the configuration file."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetop.disaggregation.options import DEFAULT_SLOTS, MODES, SECRET_VARIABLE, DisaggregationOptions
from treetop.server.options import ServeOptions, Unset, engine_config, is_installed
from treetop.types.config import EngineConfig, flag
from treetop.types.errors import ConfigError

if TYPE_CHECKING:
    from treetop.core.wire import ProcessOptions  # needs the serve extra

_NEEDED = ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "jinja2", "yaml")
KEY_VARIABLE = "TREETOP_API_KEY"

_SWITCHES = ("--overlap", "--compress-weights", "--enable-prefix-caching")
"""Flags that are switched off by `--no-`."""
_FLAGS = (
    *("--verbose", "--enforce-eager", "--disable-cuda-graph", "--disable-overlap-schedule"),
    "--no-enable-prefix-caching",
    *(flag(each.name) for kind in (EngineConfig, ServeOptions) for each in fields(kind) if each.default is False),
)
"""Flags without a value, which are off unless they are given."""
_ONLY_ONE = ("--pipeline-parallel-size",)

_HELP = {
    "host": "address to listen on (default %(default)s)",
    "port": "port to listen on, 0 for a free one (default %(default)s)",
    "api_workers": "processes for HTTP and text (default %(default)s)",
    "dp_size": "engines on this machine, each with the whole model and GPUs of its own; a request goes to the one that"
    " has its prefix, or the least to do (default %(default)s)",
    "served_model_name": "names that requests may give (default: the model as it was given)",
    "chat_template": "file with a chat template, or the template itself, instead of the model's",
    "api_key": f"key that requests must bring; repeats (default: ${KEY_VARIABLE}, else none)",
    "allow_origin": "origin whose web pages may call the server (CORS); repeats (default: none)",
    "max_queued_requests": "requests that may wait for a row; more get 429 (default %(default)s)",
    "max_body_bytes": "largest body of a request (default %(default)s)",
    "max_connections": "connections of an API process; others wait; 0 for what `ulimit -n` allows (default: 0)",
    "http_read_timeout": "seconds in which a request's head must come, and some of its body (default %(default)s)",
    "timeout_keep_alive": "seconds that a connection stays without a request (default %(default)s)",
    "drain_timeout": "seconds that requests may still take after SIGTERM (default: all they need)",
    "shutdown_delay": "seconds after SIGTERM for which new requests are still taken, while /health/ready says 503"
    " (default %(default)s)",
    "access_log": "a log line for each answer: client, method, path, status, seconds, request id",
    "request_timeout": "seconds that a request may take; it then ends with an error (default: all it needs)",
    "log_interval": "seconds between two log lines; 0 for none (default %(default)s)",
    "engine_restarts": "how often within an hour a dead engine is started again; requests go on (default %(default)s)",
    "api_restarts": "how often within an hour a dead API process of several is started again (default %(default)s)",
    "watchdog_timeout": "seconds that one step or command of the engine may take before /health is 503"
    " (default %(default)s)",
    "watchdog_restart": "start an engine again that takes longer than --watchdog-timeout; requests go on",
}


_DISAGGREGATION = {
    "mode": (
        ("--role",),
        "prefill computes prompts for decode workers and serves no requests, decode has them computed, null does both"
        " (docs/scale.md)",
        None,
    ),
    "listen": (("--handover-listen",), "where a prefill worker is reached by decode workers", "HOST:PORT"),
    "prefill_peers": (
        ("--prefill-peers",),
        "prefill workers that a decode worker asks; more after commas",
        "HOST:PORT,...",
    ),
    "registry": (
        ("--peer-registry",),
        "folder in which prefill workers say where they are, and decode workers look",
        "FOLDER",
    ),
    "secret_file": (
        ("--handover-secret-file",),
        f"file with what both sides know; needed beyond this machine (default: ${SECRET_VARIABLE})",
        "FILE",
    ),
    "lease": (
        ("--handover-lease",),
        "seconds without a message after which one worker gives another up; a request then goes on locally; a transfer"
        " may take half of it (default %(default)s)",
        "X",
    ),
}
"""Fields of `DisaggregationOptions`: the flag's aliases, help and metavar."""


def add_serve_flags(parser: argparse.ArgumentParser, aliases: argparse._ArgumentGroup) -> None:
    """The flags of `ServeOptions` and of the mock engine. aliases: where vLLM's and SGLang's spellings go."""
    serve = parser.add_argument_group("server")
    defaults = ServeOptions()
    for field in fields(ServeOptions):
        default = getattr(defaults, field.name)
        options: dict[str, Any] = {"help": _HELP[field.name], "default": default}
        if isinstance(default, tuple):
            repeats = "extend" if field.name == "served_model_name" else "append"
            options |= {"action": repeats, "default": None, "metavar": "TEXT"}
            options |= {"nargs": "+"} if repeats == "extend" else {}
        elif isinstance(default, bool):
            options |= {"action": "store_true"}
        else:
            options |= {"type": float if default is None and field.name != "chat_template" else type(default)}
            options |= {"type": str, "metavar": "FILE"} if field.name == "chat_template" else {"metavar": None}
        also = ("--data-parallel-size",) if field.name == "dp_size" else ()
        serve.add_argument(flag(field.name), *also, **options)
    _add_disaggregation_flags(parser)
    serve.add_argument("--config", metavar="FILE", help="YAML of flags without dashes; the command line has precedence")
    serve.add_argument(
        "--mock-engine",
        metavar="STEP_MS,TOKENS",
        help="no model runs: steps take so long and rounds give so many tokens (N, or A-B at random), for tests",
    )
    aliases.add_argument("--model", "--model-path", dest="model_flag", metavar="MODEL", help="as MODEL")
    aliases.add_argument(*_ONLY_ONE, dest="parallel_size", type=int, default=1, metavar="N", help="only 1 for now")


def _add_disaggregation_flags(parser: argparse.ArgumentParser) -> None:
    """SGLang's flags where it has them, each with what it was called here before."""
    group, defaults = parser.add_argument_group("prefill and decode in workers of their own"), DisaggregationOptions()
    for name, (aliases, words, metavar) in _DISAGGREGATION.items():
        options: dict[str, Any] = {"dest": f"disaggregation_{name}", "help": words, "metavar": metavar}
        if name == "mode":
            options |= {"type": lambda mode: "null" if mode == "both" else mode, "choices": MODES, "default": "null"}
        elif name == "lease":
            options |= {"type": float, "default": defaults.lease}
        group.add_argument(f"--disaggregation-{name.replace('_', '-')}", *aliases, **options)
    group.add_argument(
        "--disaggregation-bootstrap-port",
        type=int,
        metavar="PORT",
        help="as --disaggregation-listen, at the address of --host",
    )
    group.add_argument(
        "--disaggregation-transfer-backend",
        choices=("nixl",),
        default="nixl",
        help="what moves KV (default %(default)s)",
    )


def with_config_file(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """The command line with the flags of `--config FILE` before its own. Raises ConfigError."""
    _check_packages()
    import yaml  # noqa: PLC0415  # of the serve extra

    where = f"--config {args.config}"
    try:
        given = yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{where}: expected flags and their values, as in `context-length: 4096`")
    at = list(argv).index("serve") + 1
    return [*argv[:at], *words_of(given, where), *argv[at:]]


def words_of(given: Mapping[str, Any], where: str) -> list[str]:
    """Flags without dashes, and their values, as words of a command line. Raises ConfigError that begins with where."""
    words: list[str] = []
    for name, value in given.items():
        words += _words("--" + name.replace("_", "-"), value, where)
    return words


def _words(name: str, value: Any, where: str) -> list[str]:
    if name == "--config":
        raise ConfigError(f"{where}: config files do not nest")
    if value is True:
        return [name]
    if value is False and name in _SWITCHES:
        return [name.replace("--", "--no-", 1)]
    if value is False and name in _FLAGS:
        return []
    if value is False:
        raise ConfigError(f"{where}: {name[2:]} is no flag that can be false")
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in listed):
        raise ConfigError(f"{where}: {name[2:]} must be text, a number, true or false, or a list of these")
    return [f"{name}={each}" for each in listed]


def run_serve(args: argparse.Namespace, engine_options: dict[str, Any]) -> int:
    """Serve. engine_options: those that were given. Raises UserError and EngineError."""
    process, options = asked_for(args, engine_options)
    from treetop.server.serve import run  # noqa: PLC0415  # needs the serve extra

    return run(process, options)


def asked_for(args: argparse.Namespace, engine_options: dict[str, Any]) -> tuple["ProcessOptions", ServeOptions]:
    """What an engine process is to run, but for its address, and how it is served. Raises ConfigError."""
    _check_packages()
    if args.parallel_size != 1:
        raise ConfigError(f"{', '.join(_ONLY_ONE)}: only 1 for now, got {args.parallel_size}")
    if args.model is not None and args.model_flag not in (None, args.model) and args.config is None:
        raise ConfigError(f"two models: {args.model} and --model {args.model_flag}")
    model = args.model if args.model is not None else args.model_flag
    config = engine_config(model, Unset.UNSET, engine_options)
    options = serve_options(args)
    handover = disaggregation_options(args)
    from treetop.core.wire import ProcessOptions  # noqa: PLC0415  # too
    from treetop.disaggregation.connector import check_disaggregation  # noqa: PLC0415  # needs the serve extra
    from treetop.server.mock_options import mock_options  # noqa: PLC0415  # too

    slots = [flag(name) for name in ("disaggregation_slots", "disaggregation_slot_bytes") if name in engine_options]
    if handover.mode == "null" and slots:
        raise ConfigError(f"{', '.join(slots)}: only with --disaggregation-mode prefill or decode")
    if handover.mode != "null" and not config.disaggregation_slots:
        if "disaggregation_slots" in engine_options:
            raise ConfigError(f"--disaggregation-slots: --disaggregation-mode {handover.mode} needs at least 1")
        config = replace(config, disaggregation_slots=DEFAULT_SLOTS)
    if handover.mode == "prefill" and options.dp_size > 1:
        raise ConfigError("--dp-size: not with --disaggregation-mode prefill; start several, with an address each")
    process = ProcessOptions("", config, mock_options(args.mock_engine, config), log_level=20, handover=handover)
    if handover.mode != "null":
        if process.mock is not None:
            raise ConfigError(f"--disaggregation-mode {handover.mode}: a mock engine has no KV to transfer")
        check_disaggregation(config, handover)
    return process, options


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """The server's options that were given. Raises ConfigError."""
    given = {field.name: getattr(args, field.name) for field in fields(ServeOptions)}
    if given["api_key"] is None and os.environ.get(KEY_VARIABLE):
        given["api_key"] = [os.environ[KEY_VARIABLE]]
    for name in ("served_model_name", "api_key", "allow_origin"):
        given[name] = tuple(given[name] or ())
    return ServeOptions(**given)


def disaggregation_options(args: argparse.Namespace) -> DisaggregationOptions:
    """What this worker does for others. Raises ConfigError."""
    given = {name: getattr(args, f"disaggregation_{name}") for name in _DISAGGREGATION}
    peers, port = given["prefill_peers"] or "", args.disaggregation_bootstrap_port
    given["prefill_peers"] = tuple(each.strip() for each in peers.split(",") if each.strip())
    if port is not None and given["listen"] is not None:
        raise ConfigError("--disaggregation-bootstrap-port and --disaggregation-listen: give one of them")
    if port is not None:
        given["listen"] = f"[{args.host}]:{port}" if ":" in args.host else f"{args.host}:{port}"
    return DisaggregationOptions(**given)


def _check_packages() -> None:
    missing = [name for name in _NEEDED if not is_installed(name)]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}; pip install treetop[serve]")
