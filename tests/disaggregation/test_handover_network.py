"""Sessions over sockets, and the folder in which prefill workers say where they are."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.handover_sessions import ANSWERS, MESSAGES, OF_DECODE, OF_PREFILL, SCHEMA, Ends, kind
from support.waiting import WAIT_S
from treetop.disaggregation import sockets
from treetop.disaggregation.events import Disconnected, Received
from treetop.disaggregation.registry import Registry, withdraw
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer import wire
from treetop.types.kv_transfer.layout import Schema


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(sockets, "_PAUSE_S", 0.05)
    both = Ends()
    yield both
    both.close()


def test_a_session_ends_with_its_worker_and_begins_anew(ends: Ends) -> None:
    listener = ends.listen()
    ends.look_for(listener.port)
    there, here = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    for message, answer in zip(MESSAGES, ANSWERS, strict=True):
        ends.client.send(there, message)
        assert ends.until(kind(Received)) == Received(here, message)
        listener.send(here, answer)
        assert ends.until(kind(Received)) == Received(there, answer)
    listener.close()
    ends.listeners.remove(listener)
    assert ends.until(kind(Disconnected)) == Disconnected(there)
    ends.listen(listener.port)
    again = ends.connected(OF_PREFILL)
    assert again != there
    ends.client.disconnect(again, "for a test", time.monotonic())
    assert ends.connected(OF_PREFILL) != again


def test_a_silent_decode_worker_is_forgotten_and_one_that_speaks_again_connects_anew(ends: Ends) -> None:
    listener = ends.listen()
    ends.look_for(listener.port)
    there, here = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    assert Disconnected(here) in [*listener.poll(time.monotonic() + WAIT_S + 1)]
    ends.client.send(there, wire.Renew(()))
    assert ends.until(kind(Disconnected)) == Disconnected(there)
    assert ends.connected(OF_DECODE) != here


def test_who_is_disconnected_by_a_prefill_worker_is_told_why(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    listener = ends.listen()
    ends.look_for(listener.port)
    there, here = ends.connected(OF_PREFILL), ends.connected(OF_DECODE)
    listener.disconnect(here, "its memory cannot be reached", time.monotonic())
    ends.logged(caplog, "its memory cannot be reached")
    assert {Disconnected(there), Disconnected(here)} <= {*ends.seen}


_LISTENS = """
import time, zmq
from treetop.disaggregation.sockets import Handshake, Listener
from support.handover_sessions import OF_PREFILL, SCHEMA, SECRET

listener = Listener(zmq.Context(), Handshake(SECRET, SCHEMA, OF_PREFILL), "tcp://127.0.0.1:*", 60.0)
print(listener.port, flush=True)
busy_s = 0.0
while True:
    for event in listener.poll(time.monotonic()):
        busy_s = 2.5  # as in a long step: no message is answered
    time.sleep(busy_s or 0.005)
    busy_s = 0.0
"""


def test_a_prefill_worker_that_is_stopped_is_given_up_long_before_its_lease_and_a_busy_one_is_not(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats are zmq's own: a worker whose loop is away answers them, one that has been stopped does not.

    Neither does one whose machine has no time for it: of twenty times that it was away one may do.
    """
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 1500)
    command = [sys.executable, "-c", _LISTENS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as worker:
        try:
            assert worker.stdout is not None
            ends.look_for(int(worker.stdout.readline()))
            for _ in range(20):
                there = ends.connected(OF_PREFILL)
                if _stays_for(ends, 2.2):
                    break
                assert ends.until(kind(Disconnected)) == Disconnected(there)
            else:
                pytest.fail("it is given up while it is busy")
            worker.send_signal(signal.SIGSTOP)
            assert ends.until(kind(Disconnected)) == Disconnected(there)
        finally:
            worker.kill()


def _stays_for(ends: Ends, seconds: float) -> bool:
    """Whether nothing is seen for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ends.seen:
        ends.poll()
        time.sleep(0.02)
    return not ends.seen


@pytest.mark.parametrize("field", Schema._fields)
def test_a_schema_that_differs_is_refused_by_the_name_of_its_field(
    ends: Ends, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    other = {"wire": 2, "shape": (1, 1, 2), "vocab_size": 7, "slot_bytes": 8192, "groups": (), "record": ()}.get(
        field, "other"
    )
    ends.look_for(ends.listen(schema=SCHEMA._replace(**{field: other})).port)
    ends.logged(caplog, f"both sides need the same {field}: ")
    assert not ends.seen


def test_a_worker_that_does_not_answer_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends(connect_s=0.5)
    ends.look_for(1)
    ends.logged(caplog, "prefill worker 127.0.0.1:1: no answer")
    ends.close()


def test_an_address_in_use_is_an_error_that_names_the_option(ends: Ends) -> None:
    port = ends.listen().port
    with pytest.raises(ConfigError, match=r"--disaggregation-listen 127\.0\.0\.1"):
        ends.listen(port)


def test_a_registry_lists_who_renews_and_nobody_else(tmp_path: Path) -> None:
    registry, other = Registry(str(tmp_path), WAIT_S), Registry(str(tmp_path), WAIT_S)
    registry.announce("127.0.0.1:1")
    other.announce("127.0.0.1:2")
    (tmp_path / "junk.peer").write_bytes(b"\xff" * 10)
    (tmp_path / "huge.peer").write_bytes(b"x" * 10_000)
    assert registry.addresses() == ["127.0.0.1:1", "127.0.0.1:2"]
    for file in tmp_path.glob("*.peer"):
        os.utime(file, (time.time() - WAIT_S - 1,) * 2)
    registry.announce("127.0.0.1:1")
    assert other.addresses() == ["127.0.0.1:1"], "the other has not renewed its word"
    withdraw(str(tmp_path), ["127.0.0.1:1", "127.0.0.1:9"])
    assert other.addresses() == []
    with pytest.raises(ConfigError, match="there is no such folder"):
        Registry(str(tmp_path / "nowhere"), 5.0)
