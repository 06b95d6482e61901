"""How far loading is, on a terminal's stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MIN_SHOWN = 2**28
"""Bytes; less is there before anybody could read."""


@contextmanager
def progress(folder: Path, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of `total` bytes while weights are read; nothing without a terminal. Gives what adds bytes to it."""
    if total < _MIN_SHOWN or not sys.stderr.isatty():
        yield lambda added: None
        return
    from rich.console import Console  # noqa: PLC0415  # only a terminal needs it
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415  # shown rarely

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(folder.name, total=total)
        yield lambda added: bar.advance(task, added)
