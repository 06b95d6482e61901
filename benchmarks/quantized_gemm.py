"""Says how fast products with quantized weights stream on one GPU, by the launches that are chosen.

A time is that of one product in a replayed graph of many over different weights, so that none lies in the cache: as in
a decode round. Results are checked before anything is timed. JSON lines on stdout; the first names the machine.
bf16_us: of the weight in 16 bits, by its best launch. `benchmarks/quantized_launches.py` measures launches.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from frame import DEVICE, copy_bytes_per_s, end_with, machine_of, median_us, parser_of, say
from quantized_cases import FORMATS, random_weight
from torch import Tensor

from treetop.kernels.gemm.quantized_gemm import choose_product, quantized_gated, quantized_gemm
from treetop.kernels.gemm.quantized_gluon import why_not
from treetop.kernels.gemm.tiles import TiledWeight, apart, decode_tiles, in_turn, tile
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.linear import SkinnyGated, SkinnyLinear

SHAPES = {
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "qwen3 gate_up": (24576, 4096, True),
    "qwen3 down": (4096, 12288, False),
    "qwen3-moe qkv": (5120, 2048, False),
    "qwen3-moe output": (2048, 4096, False),
}
"""Name -> (lines, k, gated): the products of Llama-3.1-8B, and those in which Qwen3-8B and Qwen3-30B-A3B differ."""
COUNTS = (1, 4, 16, 32, 64, 256)


def multiply(x: Tensor, weight: TiledWeight, gated: bool) -> Tensor:
    """As an engine's products do it."""
    gpu = gpu_traits(DEVICE)
    launch = choose_product(weight, gated, len(x), gpu, False, why_not(weight, x.dtype, gpu) is None)
    return (quantized_gated if gated else quantized_gemm)(x, weight, launch=launch, gpu=gpu)


def measure_us(x: Tensor, weights: Sequence[TiledWeight], gated: bool) -> float:
    return median_us([partial(multiply, x, weight, gated) for weight in weights])


def check(x: Tensor, weight: TiledWeight, gated: bool) -> None:
    """Raise SystemExit for a result that is not that of the decoded weight."""
    whole = decode_tiles(weight, 0, weight.shape[0], torch.float16, gpu_traits(DEVICE)).float()
    want = x.float() @ whole.T
    if gated:
        gate, up = apart(want, -1)
        want = torch.nn.functional.silu(gate) * up
    got = multiply(x, weight, gated).float()
    error = float(((got if gated else got.sum(0)) - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"wrong result, nothing timed: {tuple(weight.shape)}: relative error {error:.1e}")


def made(name: str, lines: int, k: int, gated: bool) -> TiledWeight:
    weight = random_weight(FORMATS[name], lines, k)
    return tile(in_turn(weight.halves()) if gated else weight, torch.bfloat16)


def calls(weight_bytes: float) -> int:
    """Products in a graph: enough weights that none is found in the cache."""
    return max(3, min(16, int(4e8 // weight_bytes)))


def report(names: Sequence[str], rate: float) -> None:
    """The chosen launches of every format, shape and number of rows."""
    for (shape, (lines, k, gated)), name in product(SHAPES.items(), names):
        first = made(name, lines, k, gated)
        weights = [first, *(made(name, lines, k, gated) for _ in range(calls(first.nbytes) - 1))]
        plain = [
            torch.randn(lines, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5 for _ in range(calls(2 * lines * k))
        ]
        held = [(SkinnyGated if gated else SkinnyLinear)(each, gpu_traits(DEVICE)) for each in plain]
        for rows in COUNTS:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
            check(x, first, gated)
            us = measure_us(x, weights, gated)
            plain_us = median_us([partial(each.parts if isinstance(each, SkinnyLinear) else each, x) for each in held])
            line = {"shape": shape, "format": name, "rows": rows, "us": round(us, 1), "bf16_us": round(plain_us, 1)}
            line |= {
                "tb_s": round(first.nbytes / us / 1e6, 2),
                "share_of_copy": round(first.nbytes / us * 1e6 / rate, 2),
            }
            say(line | {"times_as_fast": round(plain_us / us, 2)})


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--formats", nargs="*", choices=FORMATS)
    args = parser.parse_args(arguments)
    rate = copy_bytes_per_s()
    say(machine_of(rate))
    report(args.formats or list(FORMATS), rate)
    return 0


if __name__ == "__main__":
    end_with(main)
