"""The KV connector: a worker's part in disaggregated prefill, beside a core and on its thread.

scheduler, sockets, agent --events--> state machine --effects--> scheduler, sockets, agent

All of it happens between the core's steps, and none of it waits.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import zmq

from treetop.disaggregation.agent import Agent, OtherRanks, RankAgent
from treetop.disaggregation.decode import DecodeMachine
from treetop.disaggregation.events import (
    Cancel,
    Connected,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    FinishExport,
    Log,
    PrefillLocally,
    Pull,
    Send,
    Start,
    Tick,
)
from treetop.disaggregation.nixl import check_installed
from treetop.disaggregation.prefill import PrefillMachine
from treetop.disaggregation.registry import Registry
from treetop.disaggregation.sockets import (
    Client,
    Context,
    Handshake,
    Listener,
    check_curve,
    check_listening,
)
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, UserError
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.layout import Staging
from treetop.types.kv_transfer.options import (
    SECRET_VARIABLE,
    Deadlines,
    DisaggregationOptions,
    is_loopback,
    parse_address,
    read_secret,
    zmq_address,
)
from treetop.types.kv_transfer.scheduling import Dropped, Recv, SchedulerEvent, Stage
from treetop.types.kv_transfer.transport import Memory, Transport
from treetop.types.requests import EngineRequest, KVTransferStats

log = logging.getLogger("treetop.core")

IDLE_MS = 250
"""How long a loop that has nothing to do may wait."""


class Connector(Protocol):
    """What a core's loop knows of disaggregation.

    asks: whether requests are to be prefilled elsewhere.
    refuses: why no client's request is taken, if so.
    stuck: why the worker should be started anew, once it has nothing to do.
    wait_ms: how long the loop may wait, if it does not have to do anything else.
    """

    @property
    def asks(self) -> bool: ...

    @property
    def refuses(self) -> str | None: ...

    @property
    def stuck(self) -> str | None: ...

    @property
    def wait_ms(self) -> int: ...

    @property
    def load(self) -> KVTransferStats | None: ...

    def sockets(self) -> Sequence[Any]: ...

    def poll(self, now: float) -> None:
        """Do all that there is to do, without waiting. now: seconds of a clock that never goes back."""
        ...

    def close(self) -> None: ...


class SchedulerHooks(Protocol):
    """What a scheduler does for a connector; see `scheduler/kv_transfer.py`."""

    @property
    def has_events(self) -> bool: ...

    def take_events(self) -> list[SchedulerEvent]: ...

    def recv(self, recv: Recv) -> None: ...

    def prefill_locally(self, request_id: RequestId) -> None: ...

    def stage(self, stage: Stage) -> None: ...


class KVScheduler(Protocol):
    """The scheduler, as a connector knows it."""

    @property
    def kv_transfer(self) -> SchedulerHooks: ...

    def add(self, asked: EngineRequest, *, export_from: int | None, digest: str) -> object: ...

    def finish_export(self, request_id: RequestId) -> None: ...

    def abort(self, request_id: RequestId) -> object: ...


class KVConnector:
    """Joins a side's state machine with its scheduler, sockets and transfer agent; it decides nothing itself.

    discover: called every `discover_s` seconds: who is there is looked up, or told.
    """

    def __init__(
        self,
        machine: DecodeMachine | PrefillMachine,
        sockets: Client | Listener,
        agent: Agent,
        scheduler: KVScheduler,
        discover: Callable[[], None],
        discover_s: float,
    ) -> None:
        self.machine, self.refuses = machine, machine.refuses
        self._sockets, self._agent, self._scheduler = sockets, agent, scheduler
        self._discover, self._discover_s, self._discovered_s = discover, discover_s, float("-inf")

    @property
    def asks(self) -> bool:
        return self.machine.asks

    @property
    def stuck(self) -> str | None:
        return self.machine.stuck

    @property
    def wait_ms(self) -> int:
        if self._scheduler.kv_transfer.has_events:
            return 0
        return self._agent.wait_ms if self.machine.active else IDLE_MS

    @property
    def load(self) -> KVTransferStats:
        return self.machine.load._replace(num_dropped_messages=self._sockets.num_dropped_messages)

    def sockets(self) -> Sequence[Any]:
        return self._sockets.sockets()

    def poll(self, now: float) -> None:
        if now - self._discovered_s >= self._discover_s:
            self._discovered_s = now
            self._discover()
        for event in self._events(now):
            self._handle(event, now)

    def close(self) -> None:
        self._sockets.close()
        self._agent.close()

    def _events(self, now: float) -> Iterator[Event]:
        """What has happened since the last poll. An effect of one event may bring another."""
        for event in self._sockets.poll(now):
            if isinstance(event, Connected) and not self._agent.connect(event.peer, event.metadata.transports):
                self._sockets.disconnect(event.peer, "its memory cannot be reached", now)
                continue
            if isinstance(event, Disconnected):
                self._agent.disconnect(event.peer)
            yield event
        yield from self._agent.poll()
        yield from self._scheduler.kv_transfer.take_events()
        yield Tick()

    def _handle(self, event: Event, now: float) -> None:
        for effect in self.machine.handle(event, now):
            self._do(effect, now)

    def _do(self, effect: Effect, now: float) -> None:
        scheduler = self._scheduler
        match effect:
            case Send(peer, message):
                self._sockets.send(peer, message)  # type: ignore[arg-type]  # a machine sends what its side does
            case Disconnect(peer):
                self._sockets.disconnect(peer, "it is given up: silent for too long, or no transfer works", now)
            case Pull():
                self._agent.pull(effect)
            case Recv():
                scheduler.kv_transfer.recv(effect)
            case Stage():
                scheduler.kv_transfer.stage(effect)
            case Start():
                self._start(effect, now)
            case FinishExport(request_id):
                scheduler.finish_export(request_id)
            case Cancel(request_id):
                scheduler.abort(request_id)
            case PrefillLocally(request_id, reason):
                log.warning("request %d is prefilled locally: %s", request_id, reason)
                scheduler.kv_transfer.prefill_locally(request_id)
            case Log(text):
                log.info("%s, over %s", text, self._agent.name)

    def _start(self, start: Start, now: float) -> None:
        request_id, start_at, prompt = start
        try:
            self._scheduler.add(prompt.request(request_id), export_from=start_at, digest=prompt.digest)
        except UserError as error:
            log.warning("a decode worker asked for what cannot be prefilled here: %s", error)
            self._handle(Dropped(request_id, str(error)), now)


# ---------------------------------------------------------------- from options


def check_disaggregation(config: EngineConfig, options: DisaggregationOptions) -> None:
    """Raise ConfigError, before anything is started, for what cannot work."""
    check_installed()
    check_curve()
    secret = read_secret(os.environ, options.secret_file)
    if options.listen is not None:
        host, port = _allowed(options.listen, "--disaggregation-listen", secret)
        if options.registry is not None and (not port or host in ("0.0.0.0", "::")):
            raise ConfigError(
                "--disaggregation-listen: with --disaggregation-registry it is the address that others reach, port too"
            )
        if port + config.ep_size > 2**16:
            raise ConfigError(f"--disaggregation-listen: {config.ep_size} ranks need a port each from {port} on")
        for rank in range(config.ep_size if port else 0):
            check_listening(zmq_address(host, port + rank))
    for peer in options.prefill_peers:
        _allowed(peer, "--disaggregation-prefill-peers", secret)
    if options.registry is not None:
        Registry(options.registry, 0.0)


def open_connector(
    scheduler: KVScheduler,
    staging: Staging,
    options: DisaggregationOptions,
    make_transport: Callable[[Memory], Transport],
    others: OtherRanks | None = None,
) -> KVConnector:
    """A worker's connector. others: its ranks but this one, if there are any. Raises ConfigError."""
    secret, deadlines = read_secret(os.environ, options.secret_file), Deadlines.of(options.lease)
    registry = None
    if options.registry is not None:
        registry = Registry(options.registry, deadlines.lease_s)
    agent = Agent(RankAgent(make_transport(staging.memory), staging), others)
    handshake = Handshake(secret, staging.schema, agent.metadata)
    slots, tokens, layout = staging.num_slots, staging.tokens_per_slot, staging.layout
    context: Context = zmq.Context.instance()
    try:
        if options.mode == "decode":
            client = Client(context, handshake, deadlines.connect_s)
            receiver = DecodeMachine(slots, staging.slot_bytes, tokens, layout, deadlines)

            def look() -> None:
                client.look_for(_addresses(options.prefill_peers, registry, secret))

            return KVConnector(receiver, client, agent, scheduler, look, 1.0)
        assert options.listen is not None
        host, port = _allowed(options.listen, "--disaggregation-listen", secret)
        listener = Listener(context, handshake, zmq_address(host, port), 2 * deadlines.lease_s)
        sender = PrefillMachine(slots, tokens, layout, staging.schema.vocab_size, deadlines)

        def announce() -> None:
            if registry is not None:
                registry.announce(options.listen or "")

        return KVConnector(sender, listener, agent, scheduler, announce, deadlines.renew_s)
    except BaseException:
        agent.close()
        raise


def _addresses(given: Sequence[str], registry: Registry | None, secret: bytes) -> list[str]:
    """Where prefill workers are now, as zmq has it. What the registry says is checked as what is given."""
    found = list(given) if registry is None else [*given, *registry.addresses()]
    addresses = []
    for text in dict.fromkeys(found):
        try:
            addresses.append(zmq_address(*_allowed(text, "--disaggregation-registry", secret)))
        except ConfigError:
            continue  # what was given has been checked
    return addresses


def _allowed(text: str, option: str, secret: bytes) -> tuple[str, int]:
    """Host and port. Raises ConfigError for one beyond this machine without a secret."""
    host, port = parse_address(text, option)
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"{option} {text}: without a secret only addresses of this machine; give ${SECRET_VARIABLE} or"
            " --disaggregation-secret-file on both sides"
        )
    return host, port
