"""Much memory between a GPU and the host, where it is not pinned: by threads, each with a pinned piece of its own.

One thread copies some GB/s, most of which is its first touch of the host's pages; pinning all of it would take longer.
"""

import ctypes
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from treetop.engine.changes.reached import Storage

PIECE, _THREADS = 32 << 20, 16
"""Bytes that a thread copies at a time; threads at most."""
Pairs = Sequence[tuple[Storage, Storage]]
Piece = tuple[Storage, Storage, slice]


def copy_storages(pairs: Pairs, piece: int = PIECE) -> None:
    """Fill each first with what its second holds, of as many bytes; done when this returns.

    piece: bytes. Raises what a thread raises.
    """
    gpu = next((each.device for pair in pairs for each in pair if each.device.type == "cuda"), None)
    todo: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    for each in _pieces(pairs, piece):
        todo.put(each)
    count = min(_THREADS, os.cpu_count() or 1, todo.qsize())
    if gpu is not None:
        torch.cuda.synchronize(gpu)  # what fills the seconds
    with ThreadPoolExecutor(max(count, 1)) as threads:
        for done in [threads.submit(_copy, todo, piece, gpu) for _ in range(count)]:
            done.result()


def _pieces(pairs: Pairs, piece: int) -> Iterator[Piece]:
    for into, of in pairs:
        assert into.nbytes() == of.nbytes()
        for begin in range(0, of.nbytes(), piece):
            yield into, of, slice(begin, min(begin + piece, of.nbytes()))


def _copy(todo: "queue.SimpleQueue[Piece]", piece: int, gpu: torch.device | None) -> None:
    """Pieces until there are none."""
    with nullcontext() if gpu is None else torch.cuda.stream(torch.cuda.Stream(gpu)):
        pinned = torch.empty(piece, dtype=torch.uint8, pin_memory=gpu is not None)
        while True:
            try:
                into, of, part = todo.get_nowait()
            except queue.Empty:
                return
            own = pinned[: part.stop - part.start]
            _move(own, of, part, load=True)
            _move(own, into, part, load=False)


def _move(pinned: torch.Tensor, storage: Storage, part: slice, load: bool) -> None:
    """Between the pinned piece and a part of a storage. load: into the piece."""
    if storage.device.type == "cuda":
        there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[part]
        into, of = (pinned, there) if load else (there, pinned)
        into.copy_(of, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    else:
        at, own = storage.data_ptr() + part.start, pinned.data_ptr()
        into_at, of_at = (own, at) if load else (at, own)
        ctypes.memmove(into_at, of_at, len(pinned))  # without the interpreter's lock, on this thread alone
