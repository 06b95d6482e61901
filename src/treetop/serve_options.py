"""What callers of the front ends may choose."""

import importlib.util
import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal

from treetop.parsers.registry import ReasoningParserName, ToolParserName
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.options import option, validate

_SECONDS: dict[str, Any] = {"above": 0, "maximum": 10**6, "must": "must be a number of seconds above 0, up to 10^6"}
_WAIT: dict[str, Any] = {"minimum": 0, "below": float("inf"), "must": "must be a number of seconds"}


_OWN_PATHS = ("v1", "v2", "api", "ui", "health", "metrics")


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
    """Options of `treetop serve`, under the flags' names. Raises ConfigError with all problems at once."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on, 0 for a free one", minimum=0, maximum=65535)
    uds: str | None = option(None, "file of a Unix socket to listen on, instead of --host and --port", metavar="FILE")
    root_path: str = option(
        "",
        "path under which a proxy in front has the server, which it may strip or leave: /llm",
        check=lambda path: not path or re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path) is not None,
        must="must be a path such as /llm",
        metavar="PATH",
    )
    ssl_certfile: str | None = option(
        None, "PEM file of the server's certificate and those between it and a known one: HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "PEM file of its private key, not encrypted (default: in --ssl-certfile)", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file of authorities whose certificates clients must bring", metavar="FILE"
    )
    ssl_cert_reqs: int | None = option(
        None,
        "with --ssl-ca-certs: 2, clients must bring a certificate; 1, they may; 0, nobody asks (default: 2)",
        minimum=0,
        maximum=2,
    )
    api_workers: int | None = option(
        None, "processes for HTTP and text (default: one for each four cores, 4 at most)", minimum=1, maximum=256
    )
    dp_size: int = option(
        1,
        "engines on this machine, each with the whole model and GPUs of its own; a request goes to the one that has its"
        " prefix, or the least to do",
        minimum=1,
        maximum=256,
        aliases=("--data-parallel-size",),
    )
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may give (default: the model as it was given)", metavar="TEXT", several=True
    )
    chat_template: str | None = option(
        None, "file with a chat template, or the template itself, instead of the model's", metavar="FILE"
    )
    tool_call_parser: ToolParserName | None = option(
        None, "how outputs write tool calls (default: as the chat template says; none leaves them in the text)"
    )
    reasoning_parser: ReasoningParserName | None = option(
        None, "how outputs write reasoning (default: as the chat template says; none leaves it in the text)"
    )
    api_key: tuple[str, ...] = option((), "key that requests must bring; repeats (default: none)", metavar="TEXT")
    admin_api_key: str | None = option(
        None,
        "key that alone may put to sleep, wake, replace weights, load and unload adapters; where there are other keys"
        " and not this one, nobody may (docs/serving.md#the-admin-key; default: none)",
        metavar="TEXT",
    )
    api_keys_file: str | None = option(
        None, "YAML or JSON of keys with names and limits, read again on SIGHUP", metavar="FILE"
    )
    allow_origin: tuple[str, ...] = option(
        (), "origin whose web pages may call the server (CORS); repeats (default: none)", metavar="TEXT"
    )
    max_queued_requests: int = option(4096, "requests that may wait for a row; more get 429", minimum=0)
    max_body_bytes: int = option(16 * 2**20, "largest body of a request", minimum=1)
    max_bodies_bytes: int | None = option(
        None,
        "bytes of bodies that an API process has at a time, of requests that are not answered yet; beyond it large"
        " ones wait, then get 503 (default: 16 times --max-body-bytes)",
        minimum=1,
    )
    max_connections: int = option(
        0, "connections of an API process; others wait; 0 for what `ulimit -n` allows", minimum=0
    )
    http_read_timeout: float = option(
        30.0, "seconds in which a request's head must come, and some of its body", **_SECONDS
    )
    http_min_rate: int = option(
        8192, "bytes a second that a body must come with from its beginning on, in the mean", minimum=0, maximum=2**30
    )
    http_write_timeout: float = option(
        60.0,
        "seconds in which a client must take some of an answer that waits for it; else its connection ends",
        **_SECONDS,
    )
    timeout_keep_alive: float = option(5.0, "seconds that a connection stays without a request", **_SECONDS)
    drain_timeout: float | None = option(
        None,
        "seconds that requests may still take after SIGTERM and --shutdown-delay (default: all they need)",
        **_WAIT,
    )
    shutdown_delay: float = option(
        0.0, "seconds after SIGTERM for which new requests are still taken, while /health/ready says 503", **_WAIT
    )
    enable_update_weights: bool = option(
        False, "POST /update_weights_from_disk puts the weights of another folder of this machine into the engine"
    )
    enable_sleep_mode: bool = option(
        False, "POST /sleep gives memory back, POST /wake_up takes it again (docs/python.md)"
    )
    responses_db: str | None = option(
        None,
        "an SQLite file of responses and conversations: 30 days, 1 GiB (default: in memory, an hour, 64 MiB)",
    )
    batch_dir: str | None = option(
        None,
        "folder of /v1/files and /v1/batches, which go on after a restart (default: neither)",
        metavar="FOLDER",
    )
    batch_bytes: int = option(2**30, "most bytes of the files in --batch-dir", minimum=1)
    batch_requests: int | None = option(
        None,
        "requests of batches that an API process makes at a time (default: half of those that run at a time)",
        minimum=1,
        maximum=65536,
    )
    kv_events_config: str | None = option(
        None,
        "JSON that says where KV events are published, as vLLM has it (docs/scale.md#kv-events; default: nowhere)",
        metavar="JSON",
    )
    ignore_unknown_fields: bool = option(
        False, "leave unknown fields of requests out, and log each name once; else a 400"
    )
    no_ui: bool = option(False, "no page at /, which chats with the model")
    otlp_traces_endpoint: str | None = option(
        None,
        "collector that OpenTelemetry traces go to, as http://HOST:4317 (docs/serving.md#traces; default: none)",
        metavar="URL",
    )
    log_format: Literal["text", "json"] = option("text", "lines of the log on stderr; json: an object each")
    access_log: bool = option(False, "a log line for each answer: client, method, path, status, seconds, request id")
    request_timeout: float | None = option(
        None, "seconds that a request may take; it then ends with an error (default: all it needs)", **_SECONDS
    )
    log_interval: float = option(10.0, "seconds between two log lines; 0 for none", **_WAIT)
    engine_restarts: int = option(
        3, "how often within an hour a dead engine is started again; requests go on", minimum=0, maximum=1000
    )
    spare_engine: bool = option(
        False,
        "keep a process that has imported all that an engine needs, and becomes the next one if one dies: it is up"
        " seconds sooner",
    )
    api_restarts: int = option(
        10, "how often within an hour a dead API process of several is started again", minimum=0, maximum=1000
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds that one step or command of the engine may take before /health is 503",
        minimum=2,
        maximum=10**6,
        must="must be a number of seconds from 2 to 10^6",
    )
    watchdog_restart: bool = option(
        False, "start an engine again that takes longer than --watchdog-timeout; requests go on"
    )

    def __post_init__(self) -> None:
        validate(self, ConfigError, self._rules)

    @property
    def num_api_workers(self) -> int:
        """As asked, or one."""
        return self.api_workers or 1

    @property
    def cert_reqs(self) -> int:
        """What is asked of clients' certificates, as `ssl.VerifyMode` counts."""
        return 2 if self.ssl_cert_reqs is None else self.ssl_cert_reqs

    @property
    def bodies_bytes(self) -> int:
        """`max_bodies_bytes`, or what follows from the largest body."""
        return self.max_bodies_bytes or 16 * self.max_body_bytes

    def by_cores(self, cores: int) -> "ServeOptions":
        """With as many API processes as so many cores can do with, if nobody said how many."""
        return replace(self, api_workers=self.api_workers or min(max(cores // 4, 1), 4))

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.watchdog_restart and not self.engine_restarts,
                "--watchdog-restart: with --engine-restarts 0 no engine is started again",
            ),
            (
                self.max_bodies_bytes is not None and self.max_bodies_bytes < self.max_body_bytes,
                f"--max-bodies-bytes {self.max_bodies_bytes}: less than one body may have,"
                f" --max-body-bytes {self.max_body_bytes}",
            ),
            (
                self.ssl_certfile is None and any((self.ssl_keyfile, self.ssl_ca_certs)),
                "--ssl-keyfile, --ssl-ca-certs: only with --ssl-certfile",
            ),
            (
                self.ssl_cert_reqs is not None and self.ssl_ca_certs is None,
                "--ssl-cert-reqs: only with --ssl-ca-certs",
            ),
            (
                self.root_path.split("/")[1:2] in [[name] for name in _OWN_PATHS],
                f"--root-path {self.root_path}: the server has paths of its own that begin so; take another",
            ),
            (any(not key for key in self.api_key), "--api-key must not be empty"),
            (self.admin_api_key == "", "--admin-api-key must not be empty"),
            (
                self.admin_api_key is not None and self.admin_api_key in self.api_key,
                "--admin-api-key must be none of --api-key: whoever has that one would be an admin",
            ),
            (any(not name for name in self.served_model_name), "--served-model-name must not be empty"),
        ]


def is_installed(package: str) -> bool:
    """Whether a package of the `serve` extra can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
