"""A prefill worker's end of a transport in a process of its own: one memory, whose bytes a test knows.

It writes its metadata as a line of hex, and connects to what it reads on stdin as such a line.
"""

import ctypes
import random
import select
import sys

import torch

from treetop.disaggregation.nixl import NixlTransport
from treetop.types.kv_transfer.transport import Memory, PeerId

OVER_TCP = "tcp,cuda_copy" if torch.cuda.is_available() else "tcp"
"""For UCX_TLS, as between two hosts. Where there are GPUs NIXL refuses to start without a transport that knows them."""


def known_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


def main(num_bytes: int) -> None:
    memory = ctypes.create_string_buffer(known_bytes(num_bytes), num_bytes)
    transport = NixlTransport(Memory(ctypes.addressof(memory), num_bytes))
    print(transport.metadata.hex(), flush=True)
    peers = 0
    while True:
        if select.select([sys.stdin], [], [], 0.001)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            peers += 1
            print(transport.connect(PeerId(peers), bytes.fromhex(line)), flush=True)
        transport.progress()


if __name__ == "__main__":
    main(int(sys.argv[1]))
