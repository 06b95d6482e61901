"""Sessions over sockets, and the folder in which prefill workers say where they are."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from treetop.transfer import network
from treetop.transfer.network import Caller, Common, Down, FromDecode, FromPrefill, Reception, Refused, Up
from treetop.transfer.registry import Registry, withdraw
from treetop.transfer.session import zmq_address
from treetop.transfer.wire import Renew, Renewed
from treetop.types.errors import ConfigError
from treetop.types.handover import Schema

SCHEMA = Schema(1, "target", "draft", "float64", (), (), (4, 5, 16), 1000, 4096)


class Ends:
    """A caller and receptions, polled together until something is seen."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.caller = Caller(self.context, Common(b"secret", SCHEMA, b"of d"), connect_s=0.5)
        self.receptions: list[Reception] = []
        self.now = time.monotonic()
        self.seen: list[object] = []

    def listen(self, port: int = 0, secret: bytes = b"secret", schema: Schema = SCHEMA) -> Reception:
        reception = Reception(self.context, Common(secret, schema, b"of p"), zmq_address("127.0.0.1", port), 5.0)
        self.receptions.append(reception)
        return reception

    def until(self, wanted: Callable[[object], bool]) -> object:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            now = time.monotonic()
            for each in (self.caller, *self.receptions):
                self.seen += each.poll(now)
            for event in self.seen:
                if wanted(event):
                    self.seen.remove(event)
                    return event
            time.sleep(0.005)
        raise AssertionError(f"it did not come: {self.seen}")

    def close(self) -> None:
        for each in (self.caller, *self.receptions):
            each.close()
        self.context.term()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(network, "_PAUSE_S", 0.05)
    both = Ends()
    yield both
    both.close()


def _kind(kind: type) -> Callable[[object], bool]:
    return lambda event: isinstance(event, kind)


def test_a_session_begins_with_a_word_ends_with_its_worker_and_begins_anew(ends: Ends) -> None:
    reception = ends.listen()
    ends.caller.look_for([zmq_address("127.0.0.1", reception.port)])
    up = ends.until(_kind(Up))
    assert isinstance(up, Up)
    assert up.metadata == b"of p"
    ends.caller.send(up.peer, Renew(()))
    met = ends.until(_kind(Up))
    assert isinstance(met, Up)
    assert met.metadata == b"of d"
    heard = ends.until(_kind(FromDecode))
    assert heard == FromDecode(met.peer, Renew(()))
    reception.send(met.peer, Renewed())
    assert ends.until(_kind(FromPrefill)) == FromPrefill(up.peer, Renewed())
    reception.close()
    ends.receptions.remove(reception)
    assert isinstance(ends.until(_kind(Down)), Down)
    ends.listen(reception.port)
    again = ends.until(_kind(Up))
    assert isinstance(again, Up)
    assert again.peer != up.peer
    ends.caller.hang_up(again.peer, time.monotonic())
    ends.until(_kind(Up))


_LISTENS = """
import time, zmq
from treetop.transfer.network import Common, Reception
from treetop.types.handover import Schema

schema = Schema(1, "target", "draft", "float64", (), (), (4, 5, 16), 1000, 4096)
reception = Reception(zmq.Context(), Common(b"secret", schema, b"of p"), "tcp://127.0.0.1:*", 60.0)
print(reception.port, flush=True)
busy_s = 0.0
while True:
    for event in reception.poll(time.monotonic()):
        busy_s = 2.5  # as in a long step: no word is answered
    time.sleep(busy_s or 0.005)
    busy_s = 0.0
"""


def test_a_prefill_worker_that_is_stopped_is_given_up_long_before_its_lease_and_a_busy_one_is_not(ends: Ends) -> None:
    """Heartbeats are zmq's own: a worker whose loop is away answers them, one that has been stopped does not."""
    command = [sys.executable, "-P", "-c", _LISTENS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            ends.caller.look_for([zmq_address("127.0.0.1", int(worker.stdout.readline()))])
            up = ends.until(_kind(Up))
            assert isinstance(up, Up)
            ends.caller.send(up.peer, Renew(()))
            away_s = time.monotonic() + 2.2
            while time.monotonic() < away_s:
                assert not [*ends.caller.poll(time.monotonic())]
                time.sleep(0.02)
            worker.send_signal(signal.SIGSTOP)
            assert isinstance(ends.until(_kind(Down)), Down)
        finally:
            worker.kill()


def test_a_silent_decode_worker_is_forgotten(ends: Ends) -> None:
    reception = ends.listen()
    ends.caller.look_for([zmq_address("127.0.0.1", reception.port)])
    up = ends.until(_kind(Up))
    assert isinstance(up, Up)
    ends.caller.send(up.peer, Renew(()))
    ends.until(_kind(FromDecode))
    assert any(isinstance(event, Down) for event in reception.poll(time.monotonic() + 6))


def test_another_secret_and_another_checkpoint_are_refused_with_the_reason(ends: Ends) -> None:
    ports = [ends.listen(secret=b"other").port, ends.listen(schema=SCHEMA._replace(target="another")).port]
    ends.caller.look_for([zmq_address("127.0.0.1", port) for port in ports])
    reasons = set()
    while len(reasons) < 2:
        refused = ends.until(_kind(Refused))
        assert isinstance(refused, Refused)
        reasons.add(refused.reason)
    assert any("secrets differ" in reason for reason in reasons)
    assert "both sides need the same target: target here, another there" in reasons


def test_a_worker_that_does_not_answer_is_told_of(ends: Ends) -> None:
    ends.caller.look_for([zmq_address("127.0.0.1", 1)])
    refused = ends.until(_kind(Refused))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("no answer")


def test_junk_on_the_socket_disturbs_nobody(ends: Ends) -> None:
    """Bytes that are no zmq, and zmq messages that are nothing."""
    reception = ends.listen()
    address = zmq_address("127.0.0.1", reception.port)
    with socket.create_connection(("127.0.0.1", reception.port)) as raw:
        raw.sendall(os.urandom(4000))
    stranger = ends.context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(address)
    for frames in ([b""], [b"M" * 100], [b"H", b"x"], [os.urandom(200)], [b"H" + os.urandom(60)]):
        stranger.send_multipart(frames)
    ends.caller.look_for([address])
    up = ends.until(_kind(Up))
    assert isinstance(up, Up)
    ends.caller.send(up.peer, Renew(()))
    ends.until(_kind(FromDecode))
    assert reception.num_dropped >= 3
    stranger.close()


def test_an_address_in_use_is_an_error_that_names_the_option(ends: Ends) -> None:
    port = ends.listen().port
    with pytest.raises(ConfigError, match=r"--handover-listen 127\.0\.0\.1"):
        ends.listen(port)


def test_a_registry_lists_who_renews_and_nobody_else(tmp_path: Path) -> None:
    registry, other = Registry(str(tmp_path), 5.0), Registry(str(tmp_path), 5.0)
    registry.announce("127.0.0.1:1")
    other.announce("127.0.0.1:2")
    (tmp_path / "junk.peer").write_bytes(b"\xff" * 10)
    (tmp_path / "huge.peer").write_bytes(b"x" * 10_000)
    assert registry.addresses() == ["127.0.0.1:1", "127.0.0.1:2"]
    for file in tmp_path.glob("*.peer"):
        os.utime(file, (time.time() - 6, time.time() - 6))
    registry.announce("127.0.0.1:1")
    assert other.addresses() == ["127.0.0.1:1"], "the other has not renewed its word"
    withdraw(str(tmp_path), ["127.0.0.1:1", "127.0.0.1:9"])
    assert other.addresses() == []
    with pytest.raises(ConfigError, match="there is no such folder"):
        Registry(str(tmp_path / "nowhere"), 5.0)
