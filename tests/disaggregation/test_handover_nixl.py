"""The transport over NIXL between two processes on a CPU: bytes, both ways, a peer that is killed or stopped."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.nixl_peer import OVER_TCP, known_bytes
from support.waiting import WAIT_S
from treetop.disaggregation.nixl import PACKAGES, NixlTransport, find_nixl
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.transport import WAYS, Handle, Memory, PeerId, Probe, Range, State, Way
from treetop.version import DISTRIBUTION

pytestmark = pytest.mark.skipif(not any(map(find_spec, PACKAGES)), reason="needs NIXL")
SIZE = 32 * 2**20
PEER = PeerId(7)


class Pair:
    """This process pulls from another's memory of known bytes."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(SIZE)
        self.transport = NixlTransport(Memory(ctypes.addressof(self.memory), SIZE))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "support" / "nixl_peer.py"), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.metadata = bytes.fromhex(self.process.stdout.readline())
        assert self.transport.connect(PEER, self.metadata)
        self.process.stdin.write(self.transport.metadata.hex() + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "True\n"

    def wait(self, handle: Handle, seconds: float = WAIT_S) -> State:
        end, state = time.monotonic() + seconds, self.transport.poll(handle)
        while state == "busy" and time.monotonic() < end:
            self.transport.progress()
            time.sleep(0.001)
            state = self.transport.poll(handle)
        return state

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.transport.close()


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Pair]:
    """As between two hosts: the system's copies between processes would not notice that a peer was stopped."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = OVER_TCP
    pair = Pair()
    yield pair
    pair.close()
    if before is None:
        del os.environ["UCX_TLS"]
    else:
        os.environ["UCX_TLS"] = before


@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_of_several_ranges_arrive_and_no_others(over_tcp: Pair, way: Way) -> None:
    ctypes.memset(over_tcp.memory, 0, SIZE)
    expected, source = bytearray(SIZE), known_bytes(SIZE)
    remote = [Range(5_000_000, 3_000_001), Range(17, 1000), Range(SIZE - 16, 16)]
    local = [Range(0, 3_000_001), Range(4_000_000, 1000), Range(SIZE - 16, 16)]
    for there, here in zip(remote, local, strict=True):
        expected[here.offset : here.offset + here.num_bytes] = source[there.offset : there.offset + there.num_bytes]
    assert over_tcp.wait(over_tcp.transport.pull(PEER, remote, local, way)) == "done"
    assert over_tcp.memory.raw == expected


@pytest.mark.parametrize("way", WAYS)
def test_ranges_beyond_the_peers_memory_and_unknown_peers_fail(over_tcp: Pair, way: Way) -> None:
    pull = over_tcp.transport.pull
    for remote in (Range(SIZE - 10, 11), Range(-1, 10), Range(2**62, 10), Range(0, 0)):
        assert over_tcp.wait(pull(PEER, [remote], [Range(0, 10)], way)) == "failed"
    assert over_tcp.wait(pull(PeerId(99), [Range(0, 10)], [Range(0, 10)], way)) == "failed"
    assert not over_tcp.transport.connect(PeerId(98), b"nothing")


def test_a_probe_times_both_ways_and_takes_the_better(over_tcp: Pair) -> None:
    half = Range(0, SIZE // 2)
    probe = Probe(SIZE // 2)
    while (way := probe.begin(time.monotonic())) is not None:
        state = over_tcp.wait(over_tcp.transport.pull(PEER, [half], [half], way))
        probe.ended(state == "done", time.monotonic())
    assert {*probe.gbps} == {*WAYS}
    assert probe.best == max(WAYS, key=lambda way: probe.gbps[way])
    assert over_tcp.memory.raw[: SIZE // 2] == known_bytes(SIZE)[: SIZE // 2]


@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_from_a_stopped_peer_ends_when_it_goes_on(over_tcp: Pair, way: Way) -> None:
    """Until then it is busy, whatever a deadline says, and its slot may not be used again."""
    ctypes.memset(over_tcp.memory, 0, SIZE)
    whole = [Range(0, SIZE)]
    over_tcp.process.send_signal(signal.SIGSTOP)
    handle = over_tcp.transport.pull(PEER, whole, whole, way)
    assert over_tcp.wait(handle, 0.5) == "busy"
    over_tcp.process.send_signal(signal.SIGCONT)
    assert over_tcp.wait(handle) == "done"
    assert over_tcp.memory.raw == known_bytes(SIZE)


@pytest.mark.slow
def test_a_write_by_a_peer_that_is_killed_ends_and_one_by_a_stopped_peer_does_not() -> None:
    """Its session has ended in both cases; of one that goes on again the write ends, too."""
    pair, whole = Pair(), [Range(0, SIZE)]
    try:
        pair.process.send_signal(signal.SIGSTOP)
        stopped, killed = (pair.transport.pull(PEER, whole, whole, "write") for _ in range(2))
        pair.transport.disconnect(PEER)
        assert pair.wait(stopped, 2.0) == "busy"
        assert pair.transport.poll(killed) == "busy"
        pair.process.send_signal(signal.SIGCONT)
        assert pair.wait(stopped) == "done"
    finally:
        pair.close()
    pair = Pair()
    try:
        pair.process.send_signal(signal.SIGSTOP)
        killed = pair.transport.pull(PEER, whole, whole, "write")
        pair.transport.disconnect(PEER)
        assert pair.wait(killed, 1.0) == "busy"
        pair.process.kill()
        begun = time.monotonic()
        assert pair.wait(killed) == "failed"
        assert time.monotonic() - begun >= 1.0
    finally:
        pair.close()


@pytest.mark.slow
def test_a_peer_that_comes_and_goes_again_hides_no_write_of_its_last_session() -> None:
    """Sessions with one worker are told apart: the write of the first is still looked for, and ends with the worker."""
    pair, whole = Pair(), [Range(0, SIZE)]
    again = PeerId(8)
    try:
        pair.process.send_signal(signal.SIGSTOP)
        write = pair.transport.pull(PEER, whole, whole, "write")
        pair.transport.disconnect(PEER)
        assert pair.transport.connect(again, pair.metadata)
        pair.transport.disconnect(again)
        assert pair.wait(pair.transport.pull(again, whole, whole)) == "failed"
        assert pair.wait(write, 0.5) == "busy"
        pair.process.kill()
        assert pair.wait(write) == "failed"
    finally:
        pair.close()


def test_a_read_from_a_peer_that_is_killed_fails_and_nothing_arrives_after(over_tcp: Pair) -> None:
    """Also one that is begun after its death."""
    whole = [Range(0, SIZE)]
    over_tcp.process.send_signal(signal.SIGSTOP)
    handle = over_tcp.transport.pull(PEER, whole, whole, "read")
    over_tcp.process.kill()
    over_tcp.process.wait()
    assert over_tcp.wait(handle) == "failed"
    ctypes.memset(over_tcp.memory, 0, SIZE)
    later = over_tcp.transport.pull(PEER, whole, whole, "read")
    assert over_tcp.wait(later) == "failed"
    time.sleep(0.2)
    assert over_tcp.memory.raw == bytes(SIZE)
    over_tcp.transport.disconnect(PEER)


def test_without_nixl_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install {DISTRIBUTION}\[disaggregation-cu13\]"):
        find_nixl()
