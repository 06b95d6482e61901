"""Connections of an API process: how many there may be, and how long one may take to say what it wants.

Who is silent between two requests is let go after `--timeout-keep-alive` seconds. Once a request has begun, its head
must come within `--http-read-timeout` seconds; in each such time some of its body must come, and all of it at
`--http-min-rate` bytes a second in the mean. Of an answer that waits for its client, some must be taken in each
`--http-write-timeout` seconds. When all places are taken, those who come wait in the socket's queue until one is free.
"""

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from treetop.api.errors import error_body
from treetop.api.events import WRITER
from treetop.types.errors import ConfigError

log = logging.getLogger("treetop.server")

BACKLOG = 2048
"""Connections that may wait to be accepted."""
RESERVED_FILES = 128
"""Open files that are kept for all but connections: sockets to the engine, pipes of renderers, the log."""
_FEWEST = 16
_WANTED_FILES = 2**16
_TRICKLE = 1024
"""Bytes a second that must come in each read timeout, whatever came before."""
_BYTES_ACKED = 120
"""Where `struct tcp_info` of Linux (include/uapi/linux/tcp.h, since 4.1) has `tcpi_bytes_acked`, of 64 bits."""
_AT_ONCE = 16
"""Connections that are accepted before anything else is done."""
_RETRY_S = 1.0
_GOODBYE_S = 5.0
"""How long a client of TLS has to say goodbye, which it need not."""


def most_connections(asked: int) -> int:
    """How many connections this process may have. asked: `--max-connections`, 0 for all that its open files allow.

    The soft limit of open files is first raised as far as the hard one allows. Raises ConfigError if there is no room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        soft = reachable
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    room, need = files - RESERVED_FILES, asked or _FEWEST
    if need > room:
        raise ConfigError(
            f"--max-connections {asked}: open files: need {need + RESERVED_FILES} = {need} connections +"
            f" {RESERVED_FILES}, have {files}; raise `ulimit -n`" + (" or lower it" if asked > _FEWEST else "")
        )
    return asked or room


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Of a connection with its client.

    read_s: seconds for a request's head, and for some of its body.
    idle_s: seconds without any request.
    min_rate: bytes a second of a whole body, in the mean.
    write_s: seconds for some of an answer that waits to be taken.
    """

    read_s: float
    idle_s: float
    min_rate: int
    write_s: float


class _ClientLog(logging.LoggerAdapter[logging.Logger]):
    """Warnings of the web server, with the address of whom they are about."""

    def __init__(self, logger: logging.Logger, client: tuple[str, int] | None) -> None:
        super().__init__(logger)
        self._client = "unknown" if client is None else "{}:{}".format(*client)
        self.level = logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """The address is an argument, so that `LogLimit` still sees one kind."""
        if level < logging.WARNING:
            self.logger.log(level, msg, *args, **options)
        else:
            self.logger.log(level, f"{str(msg).rstrip()} (client %s)", *args, self._client, **options)


class Connection(H11Protocol):
    """A connection that ends when its client is too slow: with 408 if a request had begun, else without a word.

    Writing is paused while the system takes no more bytes, until all that waits here has been taken: so whoever does
    not read costs one write, and what waits does not grow.

    It is the `BodyWriter` of its requests.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: uvicorn.server.ServerState,
        timeouts: ClientTimeouts,
        ended: Callable[[], None],
    ) -> None:
        """ended: called once the connection is gone."""
        super().__init__(config, state, {WRITER: self})
        self._patience, self._ended = timeouts, ended
        self._timer: asyncio.TimerHandle | None = None
        self.resumed: Callable[[], None] | None = None
        self._num_bytes = self._bytes_before = self._request_bytes_before = 0
        self._waited_s = 0.0  # for the body that is coming
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)
        self.logger = _ClientLog(self.logger, self.client)  # type: ignore[assignment]  # all of a logger that is used
        self.timeout_keep_alive_task = self.loop.call_later(self._patience.idle_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._watch(False)
        self._forget_unread()
        super().connection_lost(exc)
        self._ended()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        self._watch(self._is_open)

    @property
    def is_paused(self) -> bool:
        return self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()
        if self.resumed is not None:
            self.resumed()

    def _wait_for_reader(self) -> None:
        self._unread = self.loop.call_later(self._patience.write_s, self._read_late, self._waiting())

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _waiting(self) -> tuple[int, ...]:
        """Numbers one of which falls when the client's system takes a byte, and none while it takes nothing.

        They are the bytes that wait here and in the kernel, which must both be looked at: the kernel asks for more only
        once a good part of its queue, of up to megabytes, is free. Of TCP on Linux also less the bytes that the peer
        has acknowledged: exact, also where TLS keeps a buffer between the two. Elsewhere what TLS keeps is not seen.

        A system tells what its client has read in steps: TCP of a segment or of a 16th of its receive buffer (64 KiB
        over loopback), a Unix socket of what was one write. Who takes less than a step in the time looks silent: before
        that nothing in `tcp_info` moves, for a receiver tells of no small opening (RFC 1122, section 4.2.3.3).
        """
        waiting, own = [self.transport.get_write_buffer_size()], self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed already
            waiting += struct.unpack("i", fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, bytes(4)))
        with contextlib.suppress(OSError, AttributeError, struct.error):  # not of TCP, not on Linux, or an old one
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
            waiting.append(-struct.unpack_from("Q", info, _BYTES_ACKED)[0])
        return tuple(waiting)

    def _read_late(self, before: tuple[int, ...]) -> None:
        """The write timeout has passed. before: `_waiting` when it began. Also of what is closing already."""
        if any(now < then for now, then in zip(self._waiting(), before, strict=False)):
            self._wait_for_reader()
            return
        self._unread = None
        self.logger.warning("an answer was not read for %g seconds (--http-write-timeout)", self._patience.write_s)
        self.transport.abort()

    def write_body(self, data: bytes) -> None:
        """As `BodyWriter`. The body has no length: it comes in chunks, or, to a client of HTTP/1.0, ends with the
        connection; h11 is told of its end alone."""
        if not data or self.transport.is_closing():
            return
        version = self.conn.their_http_version
        chunked = version is not None and version >= b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self._is_open)

    @property
    def _is_open(self) -> bool:
        """Whether a request has begun and not ended."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _watch(self, is_open: bool) -> None:
        if self._timer is not None and not is_open:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and is_open and not self.transport.is_closing():
            self._waited_s, self._request_bytes_before = 0.0, self._num_bytes
            self._wait()

    def _wait(self) -> None:
        self._bytes_before = self._num_bytes
        self._timer = self.loop.call_later(self._patience.read_s, self._late)

    def _comes(self) -> bool:
        """Whether a body comes fast enough. Time in which this side does not read is not its client's."""
        if self.flow.read_paused:
            return True
        self._waited_s += self._patience.read_s
        some = self._num_bytes - self._bytes_before >= self._patience.read_s * _TRICKLE
        return some and self._num_bytes - self._request_bytes_before >= self._waited_s * self._patience.min_rate

    def _late(self) -> None:
        """The read timeout has passed within one request."""
        self._timer = None
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY and not answered and self._comes():
            self._wait()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._say_late()
        self.transport.close()

    def _say_late(self) -> None:
        message = (
            f"the request came too slowly: within {self._patience.read_s:g} seconds its head and some of its body"
            f" (--http-read-timeout), all of it at {self._patience.min_rate} bytes a second (--http-min-rate)"
        )
        body = msgspec.json.encode(error_body(408, message))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
        for each in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(each) or b"")


class LimitedListener:
    """Accepts connections, so many at a time, from a socket that other processes may share."""

    def __init__(
        self,
        listening: socket.socket,
        maximum: int,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
        handshake_s: float = 30.0,
    ) -> None:
        """make: the protocol of a connection, which calls what it is given once it is gone.

        handshake_s: seconds that a client has for that of TLS.
        """
        self._secured: dict[str, Any] = {}
        if tls is not None:
            self._secured = {"ssl": tls, "ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": _GOODBYE_S}
        self._socket, self._maximum, self._make = listening, maximum, make
        self._loop = asyncio.get_running_loop()
        self._num_open, self._accepting, self._closed = 0, False, False
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._go_on()

    def close(self) -> None:
        """Accept nobody any more. Connections stay."""
        self._pause()
        self._closed = True
        self._socket.close()

    def _go_on(self) -> None:
        if not (self._accepting or self._closed) and self._num_open < self._maximum:
            self._loop.add_reader(self._socket, self._accept)
            self._accepting = True

    def _pause(self) -> None:
        if self._accepting:
            self._loop.remove_reader(self._socket)
            self._accepting = False

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self._num_open >= self._maximum:
                log.warning("all %d connections are taken: others wait (--max-connections)", self._maximum)
                self._pause()
                return
            try:
                accepted, client = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no open file or no memory is left
                log.warning("no connection can be accepted: %s", error.strerror)
                self._pause()
                self._loop.call_later(_RETRY_S, self._go_on)
                return
            self._num_open += 1
            accepted.setblocking(False)
            with contextlib.suppress(OSError):  # its client has gone already
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
            opening = self._loop.create_task(self._open(accepted, client))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, client: Any) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._make(self._ended), accepted, **self._secured)
        except OSError as error:  # of the handshake: no protocol has heard of this connection
            log.warning("no TLS with client %s: %s", client, error.strerror or error)
            self._ended()

    def _ended(self) -> None:
        self._num_open -= 1
        self._go_on()


class ApiServer(uvicorn.Server):
    """uvicorn behind a `LimitedListener`. Leaves signals alone: whoever runs it has handlers of its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        listening: socket.socket,
        maximum: int,
        timeouts: ClientTimeouts,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config)

        def make(ended: Callable[[], None]) -> asyncio.Protocol:
            return Connection(config, self.server_state, timeouts, ended)

        self._listener = LimitedListener(listening, maximum, make, tls, timeouts.read_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._listener.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        await super().shutdown(sockets=[])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_within(self, seconds: float | None) -> None:
        """Stop listening, and cut the connections that are left after so long; None waits for all of them."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]  # seconds of any kind
        self.should_exit = True
