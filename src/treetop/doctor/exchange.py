"""How GPUs reach each other, and what an exchange between ranks takes here.

python -m treetop.doctor.exchange FOLDER RANK SIZE DEVICE      one rank's side; `exchange_times` starts them all
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from treetop.kernels.table import OpContext, Ops
from treetop.parallel.exchange import Group, Rendezvous
from treetop.types.errors import EngineError

ROWS, WIDTH, EPS = (1, 16), 4096, 1e-5
"""Shares that are timed: of a plain round and of a tree, of a model as wide as many of 8 billion parameters."""
_LAUNCHES, _REPEATS, _SKIPPED = 50, 21, 3
"""Runs in a row, whose time is divided by them; how often; how many of these are not counted."""
_PATIENCE_S = 180.0


def links() -> list[tuple[str, str, str]]:
    """Each pair of GPUs: names, whether one reaches the other's memory, and its link in the words of nvidia-smi."""
    count, rows = torch.cuda.device_count(), []
    named = _topology()
    for one in range(count):
        for other in range(one + 1, count):
            reach = "yes" if torch.cuda.can_device_access_peer(one, other) else "no: exchanges go through the host"
            rows.append((f"GPU {one} - GPU {other}", reach, named.get((one, other), "unknown")))
    return rows


def exchange_times(size: int, device: str) -> list[tuple[str, str]]:
    """Microseconds of sums over `size` ranks and the norm after it, and by what means, median.

    Raises EngineError if the ranks cannot exchange.
    """
    times = measured_by_ranks("treetop.doctor.exchange", size, device)
    return [(f"sum over {size} ranks and norm, {what}", f"{us:.1f} us") for what, us in times.items()]


def measured_by_ranks(module: str, size: int, device: str, *more: str) -> dict[str, float]:
    """What the first rank has measured, where `python -m module FOLDER RANK SIZE DEVICE MORE` is each rank's side.

    Raises EngineError if the ranks cannot exchange.
    """
    with tempfile.TemporaryDirectory(prefix="treetop-") as folder:
        command = [sys.executable, "-P", "-m", module, folder]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), device, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=_PATIENCE_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise EngineError(f"{size} ranks on {device} exchanged nothing in {_PATIENCE_S:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, error) in zip(ranks, said, strict=True):
        if rank.returncode != 0:
            last = (error.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
            raise EngineError(f"ranks on {device} cannot exchange: {last}")
    times: dict[str, float] = json.loads(said[0][0].splitlines()[-1])  # a library may have said something before
    return times


def times_us(run: Callable[[], object], device: torch.device) -> list[float]:
    """Microseconds of one run, of many in a row; on a GPU captured, as rounds are."""
    if device.type != "cuda":
        return [_timed_us(lambda: [run() for _ in range(_LAUNCHES)]) for _ in range(_REPEATS)][_SKIPPED:]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_LAUNCHES):
            run()
    return [_replayed_us(graph) for _ in range(_REPEATS)][_SKIPPED:]


def _timed_us(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begun) / _LAUNCHES


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / _LAUNCHES


def _topology() -> dict[tuple[int, int], str]:
    """Pairs of GPUs and their link, of the table that `nvidia-smi topo -m` prints; empty where there is none."""
    try:
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {}
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and len(words) > 1 and not words[1].startswith("GPU"):
            for other, link in enumerate(words[1:]):
                if not re.fullmatch(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS", link):
                    break
                found[int(words[0][3:]), other] = link
    return found


def leave() -> NoReturn:
    """End a rank that has measured. gloo's threads are not waited for: a rank has aborted as Python took it down."""
    sys.stdout.flush()
    os._exit(0)


def means_of(group: Group, device: torch.device) -> str:
    """How small sums are exchanged."""
    if device.type != "cuda":
        return "gloo"
    return "NCCL" if group.parallel.peers is None else "peer memory"


def main(folder: str, rank: int, size: int, place: str) -> None:
    device = torch.device(place)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    group, dtype = Group(Rendezvous(Path(folder) / "meeting", rank, size), device, peer_memory=True), torch.bfloat16
    ops, means = Ops(OpContext(device, dtype), parallel=group.parallel), means_of(group, device)
    weight, times = torch.ones(WIDTH, dtype=dtype, device=device), {}
    for rows in ROWS:
        x = torch.ones((1, rows, WIDTH), dtype=dtype, device=device)

        def sum_and_norm(x: torch.Tensor = x) -> object:
            return ops.add_rms_norm(x, group.parallel.share(x[None]), weight, EPS)

        with torch.inference_mode():
            times[f"{rows} x {WIDTH}, by {means}"] = statistics.median(times_us(sum_and_norm, device))
    if rank == 0:
        print(json.dumps(times))
    group.parallel.minimum(0)  # nobody leaves before all have measured
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    leave()
