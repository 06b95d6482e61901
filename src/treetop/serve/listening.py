"""Where a server listens: an address, or a socket in the file system; and what is spoken there, HTTP or HTTPS."""

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError

log = logging.getLogger("treetop.server")

LOOK_S = 30.0
"""Between two looks at the files of a certificate."""


@contextmanager
def listening_socket(options: ServeOptions) -> Iterator[socket.socket]:
    """The socket, before anything takes time; it listens once the engine is up. Raises ConfigError.

    A socket of the file system is gone at the end, unless another server has taken its place.
    """
    if options.uds is None:
        with _bound_address(options) as listening:
            yield listening
        return
    path = Path(options.uds)
    with _bound_path(path) as listening:
        own = path.stat()
        try:
            yield listening
        finally:
            with suppress(OSError):
                if os.path.samestat(path.stat(), own):
                    path.unlink()


def _bound_address(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"--host {options.host} --port {options.port}: {error.strerror or error}") from None
    return listening


def _bound_path(path: Path) -> socket.socket:
    """What a server that was killed has left is replaced."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_listened_to(path):
            path.unlink()
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listening


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def is_for_others(options: ServeOptions) -> bool:
    """Whether others than this machine may reach the server. A name but localhost may be any address."""
    if options.uds is not None:
        return False
    try:
        return not ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return options.host != "localhost"


def address_of(listening: socket.socket, options: ServeOptions) -> str:
    """As a client is told it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if options.ssl_certfile is None else 'https'}://{shown}:{port}{options.root_path}"


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """TLS 1.2 or later; None for plain HTTP. Raises ConfigError for files that cannot be used."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    named = f"--ssl-certfile {options.ssl_certfile}"
    if options.ssl_keyfile is not None:
        named += f" --ssl-keyfile {options.ssl_keyfile}"
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_no_password)
        if options.ssl_ca_certs is not None:
            named = f"--ssl-ca-certs {options.ssl_ca_certs}"
            context.load_verify_locations(options.ssl_ca_certs)
            context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(f"{named}: {getattr(error, 'strerror', None) or error}") from None
    return context


async def renew_certificate(context: ssl.SSLContext, options: ServeOptions, look_s: float = LOOK_S) -> None:
    """For as long as it runs: connections that come after the files have changed are given the new certificate.

    Files that do not fit, as between two writes, are left for the next look.
    """
    known = _changes(options)
    while True:
        await asyncio.sleep(look_s)
        if (now := _changes(options)) == known:
            continue
        try:
            tls_context(options)  # on one of its own: half of a pair must not get into that in use
            context.load_cert_chain(str(options.ssl_certfile), options.ssl_keyfile, password=_no_password)
        except (ConfigError, OSError, ValueError) as error:
            log.warning("the certificate has changed and cannot be used yet: %s", error)
            continue
        known = now
        log.info("the certificate has changed: new connections are given it")


def _changes(options: ServeOptions) -> list[tuple[int, int] | None]:
    """What tells one version of the files from another; None of one that is not there."""
    found: list[tuple[int, int] | None] = []
    for name in (options.ssl_certfile, options.ssl_keyfile):
        try:
            told = os.stat(name) if name is not None else None
        except OSError:
            told = None
        found.append(None if told is None else (told.st_ino, told.st_mtime_ns))
    return found


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is asked for its password")
