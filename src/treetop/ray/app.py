"""An application of Ray Serve: the HTTP API in front, replicas of the engine behind it.

client --HTTP--> Ray's proxy --> Api (--api-workers of them) --PrefixRequestRouter--> Replica, Replica, ...
                                 tokenizer, templates,                                 engine process each
                                 stop strings, what each stream has received
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import ray
from click import ClickException
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from treetop.api.api_state import ApiState, check_files
from treetop.api.app import make_app
from treetop.core.wire import ProcessOptions
from treetop.distributed.in_flight import InFlightCounter
from treetop.distributed.supervisor import Watchdog
from treetop.ray.core import RayClient
from treetop.ray.replica import Replica
from treetop.ray.router import PrefixRequestRouter
from treetop.serve.run import first_seed, log_load
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError, UserError

_ROWS = 64
"""Requests that an engine runs at a time at most, if it chooses itself."""
_ALL_S = 86400.0
"""Seconds, for a drain without a limit: Ray needs one."""
_STANDING_S = 1.0
"""Seconds after which a replica says again whether it serves."""
_MAX_REQUESTS = 10**5
"""Of one `Api`, which has limits of its own."""


class RefusedError(UserError, ClickException):
    """What cannot work, as Ray's command line shows it: in one line."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas: from least, when little waits, to most. queue_bound: see `PrefixRouter`."""

    minimum: int = 1
    maximum: int = 1
    queue_bound: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(f"replicas: must be N or A-B with 1 <= A <= B, got {self.minimum}-{self.maximum}")
        if self.queue_bound is not None and self.queue_bound < 0:
            raise ConfigError(f"queue-bound: must be at least 0, got {self.queue_bound}")


class Api:
    """The HTTP API of `treetop serve` over all replicas. Ray calls what is named after it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, replicas: Any, options: ServeOptions, model: str
    ) -> None:
        logging.getLogger("treetop").setLevel(logging.INFO)
        core = RayClient(replicas, await replicas.info.remote())
        self._api = ApiState(core, options, model, first_seed(None), InFlightCounter())
        self._logging = asyncio.ensure_future(log_load(self._api, None))

    def __serve_build_asgi_app__(self) -> Any:  # Ray's name for it
        return make_app(self._api)

    async def __del__(self) -> None:
        if hasattr(self, "_logging"):
            self._logging.cancel()
            self._api.core.close()
            self._api.close()


def build_app(process: ProcessOptions, options: ServeOptions, scale: Scale) -> Any:
    """The application, for `serve.run`. process: what each replica's engine is told, but for its address.

    Raises UserError for options that are not an application's, and for files of the model that the API could not read:
    they lie here as they do on all machines.
    """
    defaults, config = ServeOptions(), process.config
    for name in ("host", "port"):
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(f"--{name}: Ray's proxy listens; give it to `serve start --http-{name}`")
    if options.uds is not None or options.ssl_certfile is not None:
        raise ConfigError("--uds, --ssl-certfile: Ray's proxy listens; give it its own")
    if options.batch_dir is not None:
        raise ConfigError("--batch-dir: replicas share no folder; use treetop run-batch, or one server")
    if options.shutdown_delay:
        raise ConfigError("--shutdown-delay: Ray's proxy is asked for readiness, and Ray drains what leaves; drop it")
    if process.disaggregation.mode == "prefill":
        raise ConfigError(
            "--disaggregation-mode prefill: a prefill worker serves no requests, so replicas of it would answer none"
        )
    if config.seed is not None:
        raise ConfigError("--seed: which replica gets a request is Ray's choice; give requests a seed of their own")
    if options.dp_size != 1:
        raise ConfigError("--dp-size: Ray starts replicas; give their number as `replicas`")
    check_files(config.model, options)
    watchdog = Watchdog(options.watchdog_timeout, options.watchdog_restart)
    drain_s = _ALL_S if options.drain_timeout is None else options.drain_timeout
    rows = config.max_running_requests or _ROWS
    replica = serve.deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=2 * rows,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 1, "num_gpus": _gpus(process)},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRequestRouter,
            request_router_kwargs={"queue_bound": scale.queue_bound},
            request_routing_stats_period_s=_STANDING_S,
        ),
        **_scaling(scale, rows),
    )
    api = serve.deployment(serve.ingress()(Api)).options(
        name="Api",
        num_replicas=options.num_api_workers,
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )
    return api.bind(replica.bind(process, options.engine_restarts, watchdog), options, config.model)


def _scaling(scale: Scale, rows: int) -> dict[str, Any]:
    """Ray adds replicas while each has more than three quarters of the requests that it runs at a time."""
    if scale.minimum == scale.maximum:
        return {"num_replicas": scale.minimum}
    target = max(rows * 3 // 4, 1)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.minimum, max_replicas=scale.maximum, target_ongoing_requests=target
        )
    }


def _gpus(process: ProcessOptions) -> int:
    """GPUs of one replica: what `--device auto` finds is what Ray gives it."""
    config = process.config
    if process.mock is not None or config.device == "cpu":
        return 0
    has_gpus = config.device != "auto" or (ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    return config.tp_size * config.ep_size if has_gpus else 0
