"""Waiting for something that must become true."""

import time

WAIT_S = 180.0


def until(true, what: str = "") -> None:
    """Poll for something that must become true."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
