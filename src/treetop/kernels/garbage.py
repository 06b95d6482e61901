"""Stretches without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(first: bool = True) -> Iterator[None]:
    """Nothing is collected inside: what only a collection frees, as the graphs of an engine that is gone, stays.

    first: collect now, for which a process that serves may have no time.
    """
    if first:
        gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
