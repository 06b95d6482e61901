"""Sessions between workers: nothing forged, changed, repeated or of another secret gets in, and nothing can be read."""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
import zmq

from support.handover_sessions import ANSWERS, MESSAGES, OF_DECODE, OF_PREFILL, SCHEMA, SECRET, Ends, Tapped, kind
from treetop.disaggregation import sockets
from treetop.disaggregation.events import Connected, Disconnected, Received
from treetop.disaggregation.sockets import check_curve, listener_keys
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer import wire
from treetop.types.kv_transfer.options import is_loopback, parse_address, read_secret, zmq_address
from treetop.types.kv_transfer.scheduling import Prompt
from treetop.types.kv_transfer.transport import PeerId, Probe
from treetop.types.sampling import SamplingParams


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(sockets, "_PAUSE_S", 0.05)
    both = Ends()
    yield both
    both.close()


def test_another_secret_is_refused_and_said(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    """Also none on one side: the handshake fails, and nobody has a session."""
    others = [ends.listen(secret=b"another secret of some length"), ends.listen(secret=b"")]
    ends.look_for(*(each.port for each in others))
    for each in others:
        ends.logged(caplog, f"127.0.0.1:{each.port}: the handshake failed: the secrets differ")
    assert not ends.seen
    assert all(each.num_dropped_messages > 0 for each in others)


def test_strangers_and_junk_disturb_nobody(ends: Ends) -> None:
    """Bytes that are no zmq, messages without CURVE, under another key, and junk of one who knows the secret."""
    listener = ends.listen()
    address = zmq_address("127.0.0.1", listener.port)
    with socket.create_connection(("127.0.0.1", listener.port)) as raw:
        raw.sendall(os.urandom(4000))
    strangers = []
    for keys in (None, listener_keys(b"another secret of some length"), listener_keys(SECRET)):
        stranger = ends.context.socket(zmq.DEALER)
        strangers.append(stranger)
        stranger.linger = 0
        if keys is not None:
            stranger.curve_serverkey = keys[0]
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(address)
        for frames in ([b""], [b"x", b"y"], [wire.encode(wire.Renew(()))], [os.urandom(200)]):
            stranger.send_multipart(frames)
    ends.look_for(listener.port)
    there, here = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    ends.client.send(there, wire.Renew(()))
    assert ends.until(kind(Received)) == Received(here, wire.Renew(()))
    ends.wait(lambda: listener.num_dropped_messages >= 6)
    assert not ends.seen
    for stranger in strangers:
        stranger.close()


@pytest.fixture
def tapped(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tapped]:
    """A listener behind a relay."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 0)  # else what is sent is not the messages alone
    relay = Tapped(ends.listen(silent_s=5.0).port)  # what is recorded is silent, too
    yield relay
    relay.close()


def test_a_message_that_is_changed_on_its_way_ends_the_session_and_does_not_arrive(ends: Ends, tapped: Tapped) -> None:
    """A bit of it, anywhere in what is sent for it."""
    rng, flipped = random.Random(0), list[int]()
    for _ in range(8):
        ends.look_for(tapped.port)
        there, _ = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
        flipped.clear()

        def flip(_: int, data: bytes) -> bytes:
            at = rng.randrange(len(data))
            flipped.append(at)
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]

        tapped.change = flip
        ends.client.send(there, wire.Abort(1, 2))
        ends.look_for()
        ends.wait(lambda: bool(flipped))  # the relay has a thread of its own
        if _stays(ends, there):
            ends.client.disconnect(there, "for a test", time.monotonic())
        tapped.change = lambda _, data: data
        assert not any(isinstance(event, Received) for event in ends.seen)
        ends.seen.clear()


def _stays(ends: Ends, peer: PeerId) -> bool:
    """Whether a session is still open after a moment: a length that was changed waits for bytes that never come."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        ends.poll()
        if Disconnected(peer) in ends.seen:
            return False
        time.sleep(0.005)
    return True


def test_what_is_sent_again_does_not_arrive_again(ends: Ends, tapped: Tapped) -> None:
    """A message twice in its connection, and a whole recorded session in a connection of its own."""
    ends.look_for(tapped.port)
    there, here = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    tapped.change = lambda _, data: data + data
    ends.client.send(there, wire.Abort(1, 2))
    assert ends.until(kind(Received)) == Received(here, wire.Abort(1, 2))
    assert ends.until(kind(Disconnected)) == Disconnected(there)
    tapped.change = lambda _, data: data
    ends.look_for()
    dropped = ends.listeners[0].num_dropped_messages
    recorded = tapped.sent[0]
    with socket.create_connection(("127.0.0.1", ends.listeners[0].port)) as again:
        again.settimeout(0.2)
        for data in recorded:
            with suppress(OSError):  # the listener waits for what it has asked for, or has hung up
                again.sendall(data)
                again.recv(2**16)
        ends.wait(lambda: ends.listeners[0].num_dropped_messages > dropped)
    assert not any(isinstance(event, Received | Connected) for event in ends.seen)


def test_nothing_of_a_message_can_be_read_on_its_way(ends: Ends, tapped: Tapped) -> None:
    ends.look_for(tapped.port)
    there, _ = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    ends.client.send(there, wire.Prefill(1, 1, 0, Prompt((7,) * 200, SamplingParams(stop=("PLAINTEXT",)), 0), 8))
    ends.until(kind(Received))
    sent = b"".join(tapped.sent[0])
    assert len(sent) > 400
    assert b"PLAINTEXT" not in sent
    assert b"\x07" * 8 not in sent
    assert b"target" not in sent


def test_a_zmq_without_curve_is_refused_by_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_curve()
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="pip install pyzmq"):
        check_curve()


def test_messages_are_read_as_they_were_written_and_no_bytes_make_a_reader_raise() -> None:
    """Random bytes, messages with bytes changed, and msgpack of anything."""
    bodies = [wire.encode(message) for message in (*MESSAGES, *ANSWERS, wire.Hello(SCHEMA, OF_DECODE))]
    for message in MESSAGES:
        assert wire.decode_to_prefill(wire.encode(message)) == message
    for answer in ANSWERS:
        assert wire.decode_to_decode(wire.encode(answer)) == answer
    rng = random.Random(3)
    for turn in range(3000):
        if turn % 3 == 0:
            junk = rng.randbytes(rng.randrange(80))
        elif turn % 3 == 1:
            changed = bytearray(rng.choice(bodies))
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            junk = bytes(changed)
        else:
            kind = rng.choice(["Offer", "Prefill", 7])
            junk = msgspec.msgpack.encode({"type": kind, "request": rng.choice([None, "x"])})
        wire.decode_to_prefill(junk)
        wire.decode_to_decode(junk)
    assert wire.decode_to_prefill(bodies[0].replace(b"max_tokens\xcc\x80", b"max_tokens\x00")) is None


def _fields(kind: object, found: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Names of the fields of a message, and of all that it holds."""
    for part in get_args(kind):
        _fields(part, found)
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    names = tuple(names or getattr(kind, "__dataclass_fields__", ()))
    if isinstance(kind, type) and names and kind.__name__ not in found:
        found[kind.__name__] = names
        for hint in get_type_hints(kind).values():
            _fields(hint, found)
    return found


def test_a_change_of_the_messages_is_a_change_of_their_version() -> None:
    """msgpack drops fields that it does not know: an older worker would ignore a new sampling parameter."""
    fields = _fields(wire.ToPrefill | wire.ToDecode, {})
    assert {"Prefill", "SamplingParams", "KVChunk", "Schema"} <= {*fields}
    digest = sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]
    assert (wire.WIRE_VERSION, digest) == (9, "b9fe5c74c5be83e8"), "raise WIRE_VERSION, and write the digest here"


def test_secrets_come_from_a_file_of_its_owner_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert read_secret({}, str(file)) == SECRET
    assert read_secret({"TREETOP_DISAGGREGATION_SECRET": "0123456789abcdef"}, None) == b"0123456789abcdef"
    assert read_secret({"TREETOP_HANDOVER_SECRET": "as it was called before"}, None) == b"as it was called before"
    assert read_secret({}, None) == b""
    with pytest.raises(ConfigError, match="at least 16 bytes, got 5"):
        read_secret({"TREETOP_DISAGGREGATION_SECRET": "short"}, None)
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        read_secret({}, str(tmp_path / "nowhere"))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        read_secret({}, str(file))


def test_addresses() -> None:
    assert parse_address("[::1]:70", "--x") == ("::1", 70)
    assert parse_address("host:65535", "--x") == ("host", 65535)
    for bad in ("host", "host:", ":70", "host:65536", "host:-1", "host:1x", "", "host:²"):
        with pytest.raises(ConfigError, match="--x must be host:port"):
            parse_address(bad, "--x")
    assert [is_loopback(each) for each in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "0.0.0.0", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_transfer_of_no_time_says_nothing_of_speed():
    """It worked, so the way is known; its speed is not."""
    probe = Probe(8 * 2**20)
    for ends_s in (1.0, 1.0, 1.5, 1.25):  # two reads, then two writes
        assert probe.begin(1.0) is not None
        probe.ended(True, ends_s)
    assert probe.best == "read"
    assert probe.gbps == {"write": pytest.approx(8 * 2**20 / 0.25 / 1e9)}
