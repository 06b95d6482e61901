"""What callers of the front ends may choose."""

import importlib.util
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError


class Unset(Enum):
    """`draft` was not given, which is not the same as None."""

    UNSET = auto()


def engine_config(model: str | Path | None, draft: str | Path | Unset | None, options: dict[str, Any]) -> EngineConfig:
    """The configuration of what a caller gave. Raises ConfigError."""
    chosen = {} if isinstance(draft, Unset) else {"draft": _folder(draft)}
    return EngineConfig.of(_folder(model), **options, **chosen)


def _folder(name: str | Path | None) -> str | None:
    """What the options hold; what is neither text nor a path is left for them to refuse."""
    return str(name) if isinstance(name, Path) else name


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `treetop serve`, under the flags' names. Raises ConfigError with all problems at once.

    dp_size: engines that share the requests, each with the whole model. served_model_name: names that requests may
    give; none is the model as it was given. max_queued_requests: that wait for a row; more are refused with 429.
    max_body_bytes: of a request. max_connections: of an API process, 0 for what its open files allow.
    http_read_timeout: seconds for a request's head, and for some of its body. timeout_keep_alive: seconds that a
    connection stays without a request. drain_timeout: seconds that requests may still take after SIGTERM and
    shutdown_delay, None for all they need. shutdown_delay: seconds after SIGTERM for which new requests are still
    taken, while readiness says that there is none. access_log: a log line for each answer. request_timeout: seconds
    that a request may take, None for all it needs; one may ask for less. log_interval: seconds between two log lines, 0
    for none. engine_restarts: how often within an hour an engine that has died is started again; 0 ends the server with
    it. api_restarts: likewise of API processes, where there are several. watchdog_timeout: seconds that one step or
    command of the engine may take before health says so. watchdog_restart: the engine is then started again.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_workers: int = 1
    dp_size: int = 1
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    api_key: tuple[str, ...] = ()
    allow_origin: tuple[str, ...] = ()
    max_queued_requests: int = 4096
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 0
    http_read_timeout: float = 30.0
    timeout_keep_alive: float = 5.0
    drain_timeout: float | None = None
    shutdown_delay: float = 0.0
    access_log: bool = False
    request_timeout: float | None = None
    log_interval: float = 10.0
    engine_restarts: int = 3
    api_restarts: int = 10
    watchdog_timeout: float = 300.0
    watchdog_restart: bool = False

    def __post_init__(self) -> None:
        rules = [
            (not 0 <= self.port < 2**16, f"--port must lie between 0 and 65535, got {self.port}"),
            (not 1 <= self.api_workers <= 256, f"--api-workers must lie between 1 and 256, got {self.api_workers}"),
            (not 1 <= self.dp_size <= 256, f"--dp-size must lie between 1 and 256, got {self.dp_size}"),
            (self.max_queued_requests < 0, f"--max-queued-requests must be at least 0, got {self.max_queued_requests}"),
            (self.max_body_bytes < 1, f"--max-body-bytes must be at least 1, got {self.max_body_bytes}"),
            (self.max_connections < 0, f"--max-connections must be at least 0, got {self.max_connections}"),
            *(
                (not 0 < seconds <= 10**6, f"{name} must be a number of seconds above 0, up to 10^6, got {seconds}")
                for name, seconds in (
                    ("--http-read-timeout", self.http_read_timeout),
                    ("--timeout-keep-alive", self.timeout_keep_alive),
                )
            ),
            (
                self.drain_timeout is not None and not 0 <= self.drain_timeout < float("inf"),
                f"--drain-timeout must be a number of seconds, got {self.drain_timeout}",
            ),
            (
                not 0 <= self.shutdown_delay < float("inf"),
                f"--shutdown-delay must be a number of seconds, got {self.shutdown_delay}",
            ),
            (
                self.request_timeout is not None and not 0 < self.request_timeout <= 10**6,
                f"--request-timeout must be a number of seconds above 0, up to 10^6, got {self.request_timeout}",
            ),
            (
                not 0 <= self.log_interval < float("inf"),
                f"--log-interval must be a number of seconds, got {self.log_interval}",
            ),
            (
                not 0 <= self.engine_restarts <= 1000,
                f"--engine-restarts must lie between 0 and 1000, got {self.engine_restarts}",
            ),
            (
                not 0 <= self.api_restarts <= 1000,
                f"--api-restarts must lie between 0 and 1000, got {self.api_restarts}",
            ),
            (
                not 2 <= self.watchdog_timeout <= 10**6,
                f"--watchdog-timeout must be a number of seconds from 2 to 10^6, got {self.watchdog_timeout}",
            ),
            (
                self.watchdog_restart and not self.engine_restarts,
                "--watchdog-restart: with --engine-restarts 0 no engine is started again",
            ),
            (any(not key for key in self.api_key), "--api-key must not be empty"),
            (any(not name for name in self.served_model_name), "--served-model-name must not be empty"),
        ]
        problems = [text for bad, text in rules if bad]
        if problems:
            raise ConfigError("; ".join(problems))


def is_installed(package: str) -> bool:
    """Whether a package of the `serve` extra can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
