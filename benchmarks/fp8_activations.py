"""How fast products of FP8 weights and activations are on one GPU, at the numbers of rows of rounds and of prefills.

    python benchmarks/fp8_activations.py
    python benchmarks/fp8_activations.py --shapes qkv down --rows 1 16 256 4096

For Llama-3.1-8B's products, with a scale a row and token and with blocks of 128: us of a replayed graph of many over
different weights, as in `coded_rows.py`. us: the quantizer and the product. quantize_us: the quantizer alone. wide_us:
activations in 16 bits, as without `--quantize-activations`. bf16_us: weights in 16 bits, by the library. library_us:
`torch._scaled_mm` by row, with the quantizer, no gate. Results are checked before anything is timed. JSON lines on
stdout; the first names the machine.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from attention_cases import DEVICE, copy_bytes_per_s, graph_of, matrix_operations_per_s, times_us
from coded_cases import FORMATS, random_weight
from coded_rows import SHAPES, calls
from torch import Tensor

from treetop.kernels.gate import Gate
from treetop.kernels.gemm.coded import CodedWeight, decode
from treetop.kernels.gemm.fp8_rows import Activations, choose_fp8, fp8_rows, quantize_rows
from treetop.kernels.gemm.tiles import apart, in_turn, tile
from treetop.kernels.kv import FP8
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.packed import TiledGated, TiledLinear

LLAMA = ("gate_up", "down", "qkv", "output")
KINDS = ("fp8-channel", "fp8-block")
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192)


def measure_us(work: Sequence[Callable[[], object]]) -> float:
    """Of one call, in a replayed graph of all."""

    def all_of() -> None:
        for each in work:
            each()

    return statistics.median(times_us(graph_of(all_of).replay, 10)) / len(work)


def multiply(x: Tensor, weight: CodedWeight, how: Activations, kind: Gate | None) -> Tensor:
    gpu = gpu_traits(DEVICE)
    lines, k = weight.shape
    launch = choose_fp8((lines, k), how.group, kind is not None, len(x), gpu)
    return fp8_rows(quantize_rows(x, how, gpu=gpu), weight, None, kind, dtype=x.dtype, launch=launch, gpu=gpu)


def check(x: Tensor, weight: CodedWeight, how: Activations, kind: Gate | None) -> None:
    """Raise SystemExit for a result that is not near that of the decoded weight and of x as it is."""
    want = x[:64].float() @ decode(weight).T
    if kind is not None:
        gate, up = apart(want, -1)
        want = torch.nn.functional.silu(gate) * up
    got = multiply(x, weight, how, kind).float().sum(0)[:64]
    error = float((got - want).norm() / want.norm())
    if not error < 0.1:
        shape = tuple(weight.shape)
        raise SystemExit(f"wrong result, nothing timed: {shape}, {len(x)} rows: relative error {error:.1e}")


def library(x: Tensor, weight: CodedWeight) -> Tensor:
    made = quantize_rows(x, Activations(), gpu=gpu_traits(DEVICE))
    codes, lines = made.codes.view(FP8), weight.codes.view(FP8)
    return torch._scaled_mm(codes, lines.T, made.scale, weight.scale.T, out_dtype=x.dtype)


def line_of(name: str, lines: int, k: int, gated: bool, rows: int) -> dict[str, float]:
    kind: Gate | None = "silu" if gated else None
    how = Activations(128 if name == "fp8-block" else 0)
    gpu, number = gpu_traits(DEVICE), calls(lines * k)
    first = [random_weight(FORMATS[name], lines, k) for _ in range(number)]
    turned = [in_turn(each.halves()) for each in first] if gated else first
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
    check(x, turned[0], how, kind)
    us = measure_us([partial(multiply, x, each, how, kind) for each in turned])
    quantize_us = measure_us([partial(quantize_rows, x, how, gpu=gpu)] * number)
    found = {"us": us, "quantize_us": quantize_us}
    if how.group == 0:
        found["library_us"] = measure_us([partial(library, x, each) for each in first])
    tiles = [tile(each) for each in turned]
    wide = [TiledGated(each, None, "silu", gpu) if gated else TiledLinear(each, None, gpu) for each in tiles]
    found["wide_us"] = measure_us([partial(each, x) for each in wide])
    plain = [torch.randn(lines, k, dtype=torch.bfloat16, device=DEVICE) for _ in range(calls(2 * lines * k))]
    found["bf16_us"] = measure_us([partial(torch.nn.functional.linear, x, each) for each in plain])
    return found | {"tb_s": lines * k / us / 1e6, "tflop_s": 2 * rows * lines * k / us / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=LLAMA)
    parser.add_argument("--formats", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    args = parser.parse_args()
    rate, operations = copy_bytes_per_s() / 1e12, matrix_operations_per_s() / 1e12
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(machine | {"copy_tb_s": round(rate, 2), "bf16_tflop_s": round(operations)}), flush=True)
    for shape in args.shapes:
        for name in args.formats:
            for rows in args.rows:
                found = line_of(name, *SHAPES[shape], rows)
                line = {"shape": shape, "format": name, "rows": rows}
                print(json.dumps(line | {key: round(value, 2) for key, value in found.items()}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
