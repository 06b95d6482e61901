"""How long each part of a start takes, for the logger `treetop`, level INFO: a line as each part ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_log = logging.getLogger("treetop")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log what the work inside took, the device's share included. Not for inside a capture."""
    started_s = time.perf_counter()
    yield
    if _log.isEnabledFor(logging.INFO):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _log.info("start: %s took %.1f s", name, time.perf_counter() - started_s)
