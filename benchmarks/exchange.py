"""What ranks on several GPUs pay before a norm: microseconds of the sum over ranks and the norm, captured.

    python benchmarks/exchange.py --ranks 2 4

Sums by peer memory, which the norm takes (peers), shares that NCCL gathers and the norm adds up (gathered), NCCL's
all-reduce followed by the norm (nccl), and the norm alone. They are compared before they are timed. Whole rounds of
several ranks are `benchmarks/rounds.py --tp-size N`.
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from treetop.doctor.exchange import times_us
from treetop.kernels.table import OpContext, Ops
from treetop.parallel.exchange import Group, Rendezvous

ROWS, WIDTHS, EPS = (1, 4, 16, 64, 128, 256), (4096, 8192), 1e-5


def _shared(ops: Ops, x: Tensor, parts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, ops.parallel.share(parts), weight, EPS)


def _gathered(ops: Ops, group: Group, x: Tensor, parts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    shares = parts.new_empty((ops.parallel.size, *parts.shape[1:]))
    group._gather_on_gpu(shares, parts[0])
    return ops.add_rms_norm(x, shares, weight, EPS)


def _library(ops: Ops, group: Group, x: Tensor, parts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = parts[0].clone()
    group._group.allreduce([total]).wait()
    return ops.add_rms_norm(x, total[None], weight, EPS)


def measure_exchange(rank: int, size: int, folder: str, cases: list[tuple[int, int]]) -> None:
    """One rank's side; the first prints a line of JSON a case."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda")
    group = Group(Rendezvous(Path(folder) / "meeting", rank, size), device, peer_memory=True)
    if group.parallel.peers is None:
        raise SystemExit("these GPUs do not exchange by memory; the warning above says why")
    ops = Ops(OpContext(device, torch.bfloat16), parallel=group.parallel)
    generator = torch.Generator(device).manual_seed(rank)
    for width, rows in cases:
        weight = torch.ones(width, dtype=torch.bfloat16, device=device)
        x = torch.ones((1, rows, width), dtype=torch.bfloat16, device=device)
        parts = torch.randn((1, 1, rows, width), device=device, generator=generator).to(torch.bfloat16)
        runs = {
            "peers": partial(_shared, ops, x, parts, weight),
            "gathered": partial(_gathered, ops, group, x, parts, weight),
            "nccl": partial(_library, ops, group, x, parts, weight),
            "norm": partial(ops.add_rms_norm, x, parts, weight, EPS),
        }
        found, expected = runs["peers"]()[0], runs["nccl"]()[0]
        assert torch.equal(found, runs["gathered"]()[0]), "the sum by peer memory is not that of gathered shares"
        assert torch.allclose(found.float(), expected.float(), atol=0.1, rtol=0.02), "the sums differ"
        assert all(torch.equal(each, found) for each in group.parallel.gather(found)), "ranks have other bits"
        times = {name: times_us(run, device) for name, run in runs.items()}
        if rank == 0:
            figures = {name: round(statistics.median(each), 2) for name, each in times.items()}
            spread = {name: [round(min(each), 2), round(max(each), 2)] for name, each in times.items()}
            print(
                json.dumps({"ranks": size, "rows": rows, "width": width, "us": figures, "spread": spread}), flush=True
            )
    torch.cuda.synchronize()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="sizes of groups (default: 2)")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="(default: 1 to 256)")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, help="(default: 4096 8192)")
    args = parser.parse_args()
    if torch.cuda.device_count() < max(args.ranks):
        parser.error(f"--ranks: this machine shows {torch.cuda.device_count()} GPUs; an exchange needs one a rank")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure_exchange, (size, folder, [*product(args.widths, args.rows)]), nprocs=size)


if __name__ == "__main__":
    main()
