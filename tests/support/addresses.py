"""Free addresses for workers."""

import random
import socket
from contextlib import ExitStack, suppress


def addresses(count):
    """Free ports of this machine, one after the other, below those that the system gives to connections.

    Another process of tests, whose dice have fallen alike, draws others.
    """
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        with ExitStack() as taken, suppress(OSError):
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return [f"127.0.0.1:{port}" for port in range(first, first + count)]
