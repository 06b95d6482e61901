"""What moves requests between two workers of this machine, and how fast: a process pulls from another, both ways.

python -m treetop.doctor.transport DEVICE      the far end; `transport_speeds` starts it
"""

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treetop.disaggregation.nixl import NixlTransport
from treetop.types.errors import ConfigError, EngineError
from treetop.types.kv_transfer.transport import WAYS, Memory, PeerId, Probe, Range, Way

NUM_BYTES = 64 << 20
SLOW_GBPS = 5.0
"""Between GPUs; below it prefill hides little of a transfer."""
_PATIENCE_S = 60.0
_PEER = PeerId(1)


def transport_speeds(device: str) -> list[tuple[str, str, str]]:
    """From where to where, way, and GB/s of 64 MiB, with a warning where that is little; one row if there is none.

    device: cpu, or cuda for the first two GPUs, in both directions, or for one with itself.
    """
    places = [("cpu", "cpu")]
    if device == "cuda":
        places = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")] if torch.cuda.device_count() > 1 else [("cuda:0",) * 2]
    try:
        return [row for far, near in places for row in _speeds(far, near)]
    except (ConfigError, EngineError) as error:
        return [("none", "", str(error))]


def _speeds(far: str, near: str) -> Iterator[tuple[str, str, str]]:
    with _transport(near) as transport:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "treetop.doctor.transport", far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            gbps = _probed(transport, process)
        finally:
            process.kill()
            process.communicate()
    for way in WAYS:
        speed = f"{gbps[way]:.2f} GB/s" if way in gbps else "does not work"
        slow = far != "cpu" and gbps.get(way, 0.0) < SLOW_GBPS
        yield f"{far} to {near}, {transport.name}", way, speed + (f": WARNING, below {SLOW_GBPS:g}" if slow else "")


def _probed(transport: NixlTransport, process: "subprocess.Popen[str]") -> dict[Way, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    ready = select.select([process.stdout], [], [], _PATIENCE_S)[0]
    line = process.stdout.readline().strip() if ready else ""
    if not line or not transport.connect(_PEER, bytes.fromhex(line)):
        raise EngineError("the process at the other end did not come up")
    process.stdin.write(transport.metadata.hex() + "\n")
    process.stdin.flush()
    whole, probe, end = Range(0, NUM_BYTES), Probe(NUM_BYTES), time.monotonic() + _PATIENCE_S
    while (way := probe.begin(time.monotonic())) is not None and time.monotonic() < end:
        handle, state = transport.pull(_PEER, [whole], [whole], way), "busy"
        while state not in ("done", "failed") and time.monotonic() < end:
            transport.progress()
            state = transport.poll(handle)
        probe.ended(state == "done", time.monotonic())
    return probe.gbps


@contextmanager
def _transport(place: str) -> Iterator[NixlTransport]:
    """Over memory of its own on this device."""
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=place)
    transport = NixlTransport(Memory(memory.data_ptr(), NUM_BYTES, memory.device.index))
    try:
        yield transport
    finally:
        transport.close()


def main(place: str) -> None:
    with _transport(place) as transport:
        print(transport.metadata.hex(), flush=True)
        transport.connect(_PEER, bytes.fromhex(sys.stdin.readline().strip()))
        while True:  # until it is killed
            transport.progress()
            time.sleep(0.0002)


if __name__ == "__main__":
    main(sys.argv[1])
