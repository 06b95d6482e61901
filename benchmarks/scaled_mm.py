"""From how many rows PyTorch's `scaled_mm` multiplies FP8 weights and inputs faster than our kernel, on one GPU.

    python benchmarks/scaled_mm.py                both, by shape, scales and rows
    python benchmarks/scaled_mm.py --write-table  and write kernels/gemm/scaled_mm.json

Results are checked before anything is timed: the library's is no further from the reference than ours, some thousandths
apart. A time is that of one product in a replayed graph of many over different weights, with the rounding of its inputs
and, of a gate, the activation. JSON lines on stdout; the first names the machine.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from frame import DEVICE, copy_bytes_per_s, end_with, entries_of, machine_of, median_us, parser_of, say, write_entries
from quantized_cases import FORMATS, random_weight

from treetop.kernels.fused import joined
from treetop.kernels.gemm import scaled_mm
from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.table import OpContext, Ops
from treetop.weights.w8a8 import W8A8Linear

SHAPES = {
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
}
"""Of Llama-3.1-8B. Name -> (lines, k, gated)."""
WEIGHTS = {0: "fp8-channel", 128: "fp8-block"}
ROWS = (16, 64, 128, 256, 512, 1024, 8192)
NEVER = 1 << 40


def products(lines: int, k: int, gated: bool, group: int, start: int) -> list[W8A8Linear]:
    """Over different weights, by the library from `start` rows on."""
    ops, found = Ops(OpContext(DEVICE, torch.bfloat16)), []
    for _ in range(max(3, min(8, int(4e8 // (lines * k))))):
        weight = random_weight(FORMATS[WEIGHTS[group]], lines, k)
        found.append(W8A8Linear(weight, None, "silu" if gated else None, Activations(group), None, ops, start))
    return found


def measure(name: str, group: int) -> dict[str, Any]:
    """An entry of the table."""
    lines, k, gated = SHAPES[name]
    ours, theirs = (products(lines, k, gated, group, start) for start in (NEVER, 1))
    start: int | None = None
    times = []
    for rows in ROWS:
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
        mine, other = (joined(each[0].parts(x)).float() for each in (ours, theirs))
        error = float((mine - other).norm() / mine.norm())
        if not error < 1e-2:
            raise SystemExit(f"wrong result, nothing timed: {name}, group {group}, {rows} rows: {error:.1e} apart")
        us, library_us = (median_us([partial(each.parts, x) for each in some]) for some in (ours, theirs))
        start = (start or rows) if library_us < us else None
        times.append((rows, round(us, 1), round(library_us, 1)))
        say({"shape": name, "group": group, "rows": rows, "us": round(us, 1), "library_us": round(library_us, 1)})
    return {"name": name, "lines": lines, "k": k, "group": group, "gated": gated, "from_rows": start, "times": times}


def write_table(entries: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
    """What was measured; other entries of the same kind of GPU stay."""
    keys = ("lines", "k", "group", "gated")
    joined_ = {tuple(e[key] for key in keys): e for e in (*entries_of(scaled_mm.TABLE, machine), *entries)}
    write_entries(scaled_mm.TABLE, joined_.values(), machine)


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write-table", action="store_true")
    args = parser.parse_args(arguments)
    machine = machine_of(copy_bytes_per_s())
    say(machine)
    entries = [measure(name, group) for group in WEIGHTS for name in SHAPES]
    if args.write_table:
        write_table(entries, machine)
    return 0


if __name__ == "__main__":
    end_with(main)
