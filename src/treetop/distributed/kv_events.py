"""KV events for routers: which pages the prefix cache has, told over zmq in vLLM's messages.

PUB   topic, sequence number (8 bytes, big endian), payload: msgpack of [time, events, data parallel rank]
ROUTER  a first sequence number -> (number, payload) of each batch from there on that is kept, then (-1, nothing)

Events are arrays: ["BlockStored", hashes, parent's hash or nil, token ids, block size, LoRA id, medium, LoRA name],
["BlockRemoved", hashes, medium], ["AllBlocksCleared"]. A block's hash is what vLLM's `sha256_cbor` gives, its last 64
bits: SHA-256 of the canonical CBOR of [parent's hash, tokens, extra keys], the first block's parent that of the seed.

Source: https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber/, RFC 8949 (CBOR).
"""

import hashlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq

from treetop.cache.prefix_cache import PageTokens
from treetop.core.wire import KVEventsOptions
from treetop.types.errors import ConfigError

log = logging.getLogger("treetop.core")

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
GPU, HOST = "GPU", "CPU"
"""Media, as vLLM names them: of the prefix cache, and of the tier on the host."""
_LOOK_S = 0.05
"""Between two looks for whoever asks for a replay, while nothing else happens."""

Change = tuple[str, bool | None, int, int, PageTokens]
"""The medium; whether a page came or went there, None for the end of all; its parent's serial number and its own; what
it holds."""


def block_hash(parent: bytes, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """32 bytes. extra_keys: the adapter's name, and of a first block the cache salt, where there are such."""
    extra = _head(4, len(extra_keys)) + b"".join(map(_text, extra_keys)) if extra_keys else b"\xf6"
    listed = b"".join(_head(0, each) for each in tokens)
    return hashlib.sha256(b"\x83" + _head(2, len(parent)) + parent + _head(4, len(tokens)) + listed + extra).digest()


def seed_hash(seed: str) -> bytes:
    """The parent of every first block."""
    return hashlib.sha256(_text(seed)).digest()


def _text(text: str) -> bytes:
    given = text.encode()
    return _head(3, len(given)) + given


def _head(major: int, value: int) -> bytes:
    """The head of a CBOR item in its shortest form. RFC 8949, 3 and 4.2.1."""
    if value < 24:
        return bytes(((major << 5) | value,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes(((major << 5) | code,)) + value.to_bytes(size, "big")
    raise ValueError(f"{value} has more than 64 bits")


class EventWriter:
    """Turns changes of a prefix cache into events.

    With a draft head pages of one text may be several, by the token after them. A router counts them as one block: it
    is stored with the first and removed with the last.
    """

    def __init__(self, page_size: int, seed: str) -> None:
        self._page_size, self._root = page_size, seed_hash(seed)
        self._stored = {medium: _Stored(self._root) for medium in (GPU, HOST)}

    def events(self, changes: Sequence[Change]) -> list[tuple[Any, ...]]:
        """Of changes in their order. Neighbours of a path are one event."""
        events: list[tuple[Any, ...]] = []
        last, at = None, GPU  # serial number of the last page of an event that may grow, and its medium
        for medium, is_stored, parent, serial, page in changes:
            known, counts = self._stored[medium].known, self._stored[medium].counts
            last, at = last if medium == at else None, medium
            if is_stored is None:
                events, last = self._cleared(medium, events), None
            elif is_stored:
                tokens = [each for each in page[: self._page_size] if isinstance(each, int)]
                above, adapter = known[parent]
                salt = page[-1] if isinstance(page[-1], str) else ""  # of a first page alone
                if "\0" in salt:
                    adapter, _, salt = salt.partition("\0")
                digest = block_hash(above, tokens, [each for each in (adapter, salt) if each])
                known[serial] = digest, adapter
                counts[digest] += 1
                if counts[digest] > 1:
                    last = None
                elif last == parent and events:
                    events[-1][1].append(_shown(digest))
                    events[-1][3].extend(tokens)
                    last = serial
                else:
                    shown_parent = _shown(above) if parent else None
                    hashes = [_shown(digest)]
                    name = adapter or None
                    events.append(("BlockStored", hashes, shown_parent, tokens, self._page_size, None, medium, name))
                    last = serial
            else:
                last, (digest, _) = None, known.pop(serial)
                counts[digest] -= 1
                if not counts[digest]:
                    del counts[digest]
                    if events and events[-1][0] == "BlockRemoved" and events[-1][2] == medium:
                        events[-1][1].append(_shown(digest))
                    else:
                        events.append(("BlockRemoved", [_shown(digest)], medium))
        return events

    def _cleared(self, medium: str, events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The events, and that a medium has nothing any more. The GPU's end is the host's, too, and is told last."""
        gone, self._stored[medium] = [*map(_shown, self._stored[medium].counts)], _Stored(self._root)
        if medium == GPU:
            return [("AllBlocksCleared",)]
        return [*events, ("BlockRemoved", gone, medium)] if gone else events


class _Stored:
    """What a medium has. known: hash and adapter, by serial number. counts: pages of each hash."""

    def __init__(self, root: bytes) -> None:
        self.known = {0: (root, "")}
        self.counts: Counter[bytes] = Counter()


class MediumWatcher:
    """A `CacheWatcher` that notes what a medium has."""

    def __init__(self, medium: str, note: Callable[[Change], None]) -> None:
        self._medium, self._note = medium, note

    def stored(self, parent: int, serial: int, page: PageTokens) -> None:
        self._note((self._medium, True, parent, serial, page))

    def removed(self, serial: int) -> None:
        self._note((self._medium, False, 0, serial, ()))

    def cleared(self) -> None:
        self._note((self._medium, None, 0, 0, ()))


def _shown(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class KVEventPublisher:
    """Tells a network what watchers note. The cache's thread only notes; another one hashes and sends.

    gpu, host: watchers of the prefix cache, and of the tier on the host.
    """

    def __init__(
        self, options: KVEventsOptions, page_size: int, rank: int, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        """rank: of this engine among those side by side; ports count up from it. Raises ConfigError."""
        self._rank, self._topic = rank, options.topic.encode()
        self._writer = EventWriter(page_size, options.hash_seed)
        self._changes: queue.Queue[Change | None] = queue.Queue(options.max_queue_size)
        self.gpu, self.host = (MediumWatcher(medium, self._changes.put) for medium in (GPU, HOST))
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=options.buffer_steps)
        self._sequence = 0
        self._pub = _opened(context, zmq.PUB, endpoint_of(options.endpoint, rank), options.hwm)
        self._replay = None
        if options.replay_endpoint is not None:
            self._replay = _opened(context, zmq.ROUTER, endpoint_of(options.replay_endpoint, rank), options.hwm, True)
        self._thread = threading.Thread(target=self._run, name="treetop-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once all that was noted is sent."""
        self._changes.put(None)
        self._thread.join()

    def _run(self) -> None:
        encoder, is_open = msgspec.msgpack.Encoder(), True
        while is_open:
            changes = [*self._waiting()]
            is_open = None not in changes
            try:
                self._publish(self._writer.events([each for each in changes if each is not None]), encoder)
                self._answer()
            except Exception:  # a bug, or a socket's: the cache goes on
                log.exception("KV events were lost")
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close()

    def _publish(self, events: list[tuple[Any, ...]], encoder: msgspec.msgpack.Encoder) -> None:
        if events:
            payload, number = encoder.encode([time.time(), events, self._rank]), self._sequence.to_bytes(8, "big")
            self._sequence += 1
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))

    def _waiting(self) -> Iterator[Change | None]:
        """What was noted: after the first whatever is there."""
        try:
            yield self._changes.get(timeout=_LOOK_S)
            while True:
                yield self._changes.get_nowait()
        except queue.Empty:
            return

    def _answer(self) -> None:
        """Whoever asks for a replay."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for a replay of KV events is none: %d frames", len(frames))
                continue
            for number, payload in self._kept:
                if number >= frames[2]:
                    self._replay.send_multipart((frames[0], b"", number, payload))
            self._replay.send_multipart((frames[0], b"", END, b""))


def endpoint_of(endpoint: str, rank: int) -> str:
    """Of an engine side by side with others: ports count up, other names get a suffix."""
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if endpoint.startswith("tcp:") else f"{endpoint}_dp{rank}"


def _opened(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, hwm: int, binds: bool = False
) -> "zmq.Socket[bytes]":
    """Bound where the endpoint is a place of this machine, else connected. Raises ConfigError."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(hwm)
    try:
        is_place = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        (socket.bind if binds or is_place else socket.connect)(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        socket.close(linger=0)
        raise ConfigError(f"--kv-events-config: {endpoint}: {error}") from None
    return socket
