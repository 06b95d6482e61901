"""Times the small fused kernels on one GPU against the plain operations and the bytes they move.

    python benchmarks/fused.py

Llama-3.1-8B's widths. Results are compared with the references before anything is timed; times are of one call in a
replayed graph of many, which is how an engine runs them. JSON on stdout, a table on stderr.
"""

import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from attention_cases import DEVICE, copy_bytes_per_s, graph_of, relative_error, times_us
from torch import Tensor

from treetop.kernels.fused import (
    add_rms_norm,
    add_rms_norm_reference,
    rotate_and_write,
    rotate_and_write_reference,
    silu_mul,
    silu_mul_reference,
)
from treetop.kernels.rope import RopeSpec, RopeTable, rope_table, rotate_
from treetop.kernels.sampling.draw import draw_tokens
from treetop.kernels.sampling.sampling import RowSamplingParams, SamplingMetadata, draw_reference
from treetop.kernels.triton_guard import gpu_traits

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
CALLS = 32
TOLERANCE = 6e-3


def median_us(work: Callable[[], object], calls: int = CALLS) -> float:
    def many() -> None:
        for _ in range(calls):
            work()

    return statistics.median(times_us(graph_of(many).replay, 30 if calls > 1 else 5)) / calls


def require_equal(name: str, got: Tensor, want: Tensor) -> None:
    error = relative_error(got, want.to(torch.float32))
    if not error <= TOLERANCE:
        raise SystemExit(f"wrong result, nothing timed: {name} relative error {error:.2e}")


def cases(rows: int, n: int) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Name -> (fused, plain, bytes moved at least), checked."""
    gpu = gpu_traits(DEVICE)
    kind: Any = {"dtype": torch.bfloat16, "device": DEVICE}
    x, delta = torch.randn(rows, n, HIDDEN, **kind), torch.randn(1, rows, n, HIDDEN, **kind)
    weight = torch.rand(HIDDEN, **kind)
    gate_up = torch.randn(rows, n, 2 * INNER, **kind)
    qkv = torch.randn(1, rows, n, HEADS + 2 * KV_HEADS, DIM, **kind)
    table = rope_table(RopeSpec(DIM, 500000.0), 4096, torch.bfloat16, DEVICE)
    positions = torch.randint(0, 4096, (rows, n), device=DEVICE)
    tail = torch.zeros(rows, n, 2, KV_HEADS, DIM, **kind)

    for got, want in zip(
        add_rms_norm(x, delta, weight, 1e-5, gpu), add_rms_norm_reference(x, delta, weight, 1e-5), strict=True
    ):
        require_equal("add_rms_norm", got, want)
    require_equal("silu_mul", silu_mul(gate_up, gpu), silu_mul_reference(gate_up))
    want_tail = tail.clone()
    ours = rotate_and_write(qkv, (table.data, positions), tail, None, None, gpu)
    wide = RopeTable(table.data.float()).at(positions)
    theirs = rotate_and_write_reference(qkv.float(), wide, want_tail, None)
    require_equal("rotate q", ours, theirs)
    require_equal("rotate and write k, v", tail, want_tail)

    def plain_rotation() -> None:
        rotate_(qkv[0, :, :, : HEADS + KV_HEADS], RopeTable(table.data).at(positions))
        tail.copy_(qkv[0, :, :, HEADS:].view(rows, n, 2, KV_HEADS, DIM))

    return {
        "add_rms_norm": (
            lambda: add_rms_norm(x, delta, weight, 1e-5, gpu),
            lambda: add_rms_norm_reference(x, delta, weight, 1e-5),
            4 * x.nbytes,
        ),
        "silu_mul": (lambda: silu_mul(gate_up, gpu), lambda: silu_mul_reference(gate_up), gate_up.nbytes * 3 // 2),
        "rotate_and_write": (
            lambda: rotate_and_write(qkv, (table.data, positions), tail, None, None, gpu),
            plain_rotation,
            2 * qkv.nbytes,
        ),
    }


def draws(rows: int, n: int) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """As `cases`: drawing from bfloat16 logits, without filters, with top-p, and with top-k and top-p."""
    gpu = gpu_traits(DEVICE)
    logits = (torch.randn(rows, n, VOCAB, device=DEVICE) * 3).to(torch.bfloat16)
    at, positions = torch.arange(rows, device=DEVICE), torch.randint(0, 4096, (rows, n), device=DEVICE)
    found: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {}
    for name, top_k, top_p in (("draw", 0, 1.0), ("draw, top-p", 0, 0.9), ("draw, top-k top-p", 50, 0.9)):
        full = [torch.full((rows,), value, device=DEVICE) for value in (0.8, top_k, top_p, 0.0)]
        sampler = SamplingMetadata(RowSamplingParams(*full), torch.arange(rows, device=DEVICE))
        fused = partial(draw_tokens, logits, sampler, at, positions, name != "draw", gpu)
        plain = partial(draw_reference, logits, sampler, at, positions, name != "draw")
        differing = int((fused().token != plain().token).sum())
        if differing > 1 + rows * n // 256:
            raise SystemExit(f"wrong result, nothing timed: {name}: {differing} of {rows * n} tokens differ")
        found[name] = (fused, plain, logits.nbytes)
    return found


def main() -> None:
    torch.manual_seed(0)
    copy = copy_bytes_per_s()
    timed = []
    for rows, n in ((1, 1), (1, 16), (8, 16), (32, 16)):
        for name, (fused, plain, moved) in (cases(rows, n) | draws(rows, n)).items():
            calls = 1 if name.startswith("draw") else CALLS  # a sort of every row takes milliseconds
            line = {"name": name, "rows": rows, "n": n, "us": median_us(fused), "plain_us": median_us(plain, calls)}
            timed.append({**line, "floor_us": 1e6 * moved / copy})
            print(
                f"{name:18} B={rows:<3} n={n:<3} {line['us']:7.2f} us  plain {line['plain_us']:7.2f} us"
                f"  floor {1e6 * moved / copy:6.2f}",
                file=sys.stderr,
            )
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    report = {"machine": {"gpu": torch.cuda.get_device_name(), "host": platform.machine()}, "versions": versions}
    print(json.dumps({**report, "copy_tb_per_s": copy / 1e12, "timed": timed}, indent=1))


if __name__ == "__main__":
    main()
