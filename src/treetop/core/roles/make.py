"""From options to a worker's part in handing requests over."""

import os
from collections.abc import Callable, Sequence

import zmq

from treetop.core.roles.decode_role import DecodeRole
from treetop.core.roles.links import Links, OtherRanks, RankLinks
from treetop.core.roles.prefill_role import PrefillRole
from treetop.core.roles.role import Role, Staging
from treetop.core.wire import ProcessOptions
from treetop.scheduler.scheduler import Scheduler
from treetop.transfer.events import Deadlines
from treetop.transfer.network import Caller, Common, Reception, check_listening
from treetop.transfer.nixl import check_installed
from treetop.transfer.registry import Registry
from treetop.transfer.session import is_loopback, parse_address, read_secret, zmq_address
from treetop.transfer.transport import Memory, Transport
from treetop.types.errors import ConfigError
from treetop.types.roles import SECRET_VARIABLE, HandoverOptions


def check_handover(process: ProcessOptions) -> None:
    """Raise ConfigError, before anything is started, for what cannot work."""
    config, options = process.config, process.handover
    if process.mock is not None:
        raise ConfigError(f"--role {options.role}: a mock engine has nothing to hand over")
    check_installed()
    secret = read_secret(os.environ, options.handover_secret_file)
    if options.handover_listen is not None:
        host, port = _allowed(options.handover_listen, "--handover-listen", secret)
        if options.peer_registry is not None and (not port or host in ("0.0.0.0", "::")):
            raise ConfigError("--handover-listen: with --peer-registry it is the address that others reach, port too")
        if port + config.ep_size > 2**16:
            raise ConfigError(f"--handover-listen: {config.ep_size} ranks need a port each from {port} on")
        for rank in range(config.ep_size if port else 0):
            check_listening(zmq_address(host, port + rank))
    for peer in options.prefill_peers:
        _allowed(peer, "--prefill-peers", secret)
    if options.peer_registry is not None:
        Registry(options.peer_registry, 0.0)


def open_role(
    scheduler: Scheduler,
    staging: Staging,
    options: HandoverOptions,
    make_transport: Callable[[Memory], Transport],
    others: OtherRanks | None = None,
) -> Role:
    """The part that the options give a worker. others: its ranks but this one, if there are any. Raises ConfigError."""
    secret, deadlines = read_secret(os.environ, options.handover_secret_file), Deadlines.of(options.handover_lease)
    registry = None
    if options.peer_registry is not None:
        registry = Registry(options.peer_registry, deadlines.lease_s)
    links = Links(RankLinks(make_transport(staging.memory), staging), others)
    common = Common(secret, staging.schema, links.metadata)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    try:
        if options.role == "decode":
            find = _finder(options.prefill_peers, registry, secret)
            caller = Caller(context, common, deadlines.connect_s)
            return DecodeRole(scheduler, staging, links, caller, deadlines, find)
        assert options.handover_listen is not None
        host, port = _allowed(options.handover_listen, "--handover-listen", secret)
        reception = Reception(context, common, zmq_address(host, port), 2 * deadlines.lease_s)
        return PrefillRole(scheduler, staging, links, reception, deadlines, registry, options.handover_listen)
    except BaseException:
        links.close()
        raise


def _finder(given: Sequence[str], registry: Registry | None, secret: bytes) -> Callable[[], list[str]]:
    """Where prefill workers are now, in zmq's words. What the registry says is checked as what is given."""

    def find() -> list[str]:
        found = list(given) if registry is None else [*given, *registry.addresses()]
        addresses = []
        for text in dict.fromkeys(found):
            try:
                addresses.append(zmq_address(*_allowed(text, "--peer-registry", secret)))
            except ConfigError:
                continue  # what was given has been checked
        return addresses

    return find


def _allowed(text: str, option: str, secret: bytes) -> tuple[str, int]:
    """Host and port. Raises ConfigError for one beyond this machine without a secret."""
    host, port = parse_address(text, option)
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"{option} {text}: without a secret only addresses of this machine; give ${SECRET_VARIABLE} or"
            " --handover-secret-file on both sides"
        )
    return host, port
