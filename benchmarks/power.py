"""What a board's power limit does to products and rounds: time after a pause, sustained time, power and energy.

    python benchmarks/power.py                                     gate and up of Llama-3.1-8B, 16 .. 2048 rows
    python benchmarks/power.py --rounds --shape 5,1,6 --batch 32   whole rounds, back to back

Everything is measured with random weights and with zeros, which move no bits: operations, bytes and launches are the
same, so where the times differ it is power that sets them. Energy is the driver's counter (NVML); it covers the board.
Results are checked before anything is timed. JSON lines on stdout; the first names the machine.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from unittest.mock import patch

import torch
import triton
from attention_cases import DEVICE, graph_of, times_us
from rounds import NAMES, preset
from skinny_gemm import SHAPES, check, multiply
from torch import Tensor

from treetop import LLM
from treetop.bench.prompts import prompt_ids
from treetop.bench.rounds import device_times_ms, engine_config, phase_times_ms, wall_times_ms
from treetop.bench.sweeps import SweepOptions, make_grid
from treetop.checkpoints import loader
from treetop.checkpoints.params import Param
from treetop.cli import OneLineParser, exit_code
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, choose_launch
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.errors import ConfigError, InputError
from treetop.weights.held import Weights

INPUT = 1024
PAUSE_S, SUSTAINED_S = 0.3, 1.0
WEIGHTS = 4
"""Weights that a product takes in turn, so that none is found in the cache."""
FILLS = ("random", "zero")


def energy_mj() -> int:
    """Millijoules that the GPU has used since its driver was loaded. Raises OSError where NVML is missing."""
    nvml, device, energy = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{str(torch.cuda.get_device_properties(DEVICE).uuid).removeprefix('GPU-')}".encode()
    for code in (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)),
        nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy)),
    ):
        if code:
            raise OSError(f"NVML does not tell the energy: error {code}")
    return energy.value


def sustained(run: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Microseconds and watts of `run`, repeated for a quarter of the time and then, measured, for all of it."""
    torch.cuda.synchronize()
    pace_s = statistics.median(times_us(run, 5)) * 1e-6
    repeats = max(2, round(seconds / pace_s))
    for _ in range(repeats // 4):
        run()
    torch.cuda.synchronize()
    energy, started_s = energy_mj(), time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    taken_s = time.perf_counter() - started_s
    return 1e6 * taken_s / repeats, 1e-3 * (energy_mj() - energy) / taken_s


def products(name: str, all_rows: list[int]) -> None:
    """One weight's products in 16 bits: ours where there is one, and the vendor's."""
    n, k, gated = SHAPES[name]
    for fill in FILLS:
        weights = [torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE) for _ in range(WEIGHTS)]
        if fill == "random":
            for weight in weights:
                weight.normal_(std=k**-0.5)
        for rows in all_rows:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
            ours = choose_launch(rows, n, k, gated, gpu_traits(DEVICE))
            if ours and fill == "random":
                check(x, weights[0], gated, ours, multiply(x, weights[0], gated, None).float())
            for launch in (ours, None) if ours else (None,):
                graph = graph_of(partial(_each, x, weights, gated, launch))
                torch.cuda.synchronize()
                time.sleep(PAUSE_S)
                paused_us = statistics.median(times_us(graph.replay, 10)) / WEIGHTS
                all_us, watts = sustained(graph.replay, SUSTAINED_S)
                us = all_us / WEIGHTS
                line = {"product": name, "rows": rows, "by": "vendor" if launch is None else "ours", "weights": fill}
                line |= {"after_a_pause_us": round(paused_us, 1), "sustained_us": round(us, 1), "watts": round(watts)}
                print(json.dumps(line | {"millijoules": round(1e-3 * us * watts, 1)}), flush=True)
        del weights


def _each(x: Tensor, weights: list[Tensor], gated: bool, launch: RowsLaunch | None) -> None:
    for weight in weights:
        multiply(x, weight, gated, launch)


def rounds(name: str, shape: str, batch: int, count: int) -> None:
    """Rounds back to back, after prompts, and their phases by themselves."""
    model, draft = preset(name)
    options = {"draft": draft, "load_format": "dummy", "simulate_accept_length": 3}
    grid = make_grid(model, options, SweepOptions(None, [shape], [batch], [INPUT], count, batch))
    for fill in FILLS:
        with patch.object(loader, "random_weights", _zeros if fill == "zero" else _RANDOM):
            llm = LLM(**asdict(engine_config(model, options, grid.shapes[0], grid)))
        wall, _ = wall_times_ms(llm, prompt_ids(llm, batch, INPUT), count)
        device = statistics.median(device_times_ms(llm, batch, INPUT, count))
        phases = phase_times_ms(llm, batch, INPUT, count)
        tens = [round(statistics.median(wall[at : at + 10]), 2) for at in range(0, count, 10)]
        line = {"shape": shape, "batch": batch, "weights": fill, "wall_ms": round(statistics.median(wall), 2)}
        line |= {"medians_of_ten_ms": tens, "device_ms": round(device, 2)}
        line |= {"phase_ms": {str(phase): round(statistics.median(each), 3) for phase, each in phases.items()}}
        print(json.dumps(line), flush=True)
        del llm
        gc.collect()


def _zeros(params: list[Param], place: loader.Placement) -> Weights:
    """Weights of a model that computes nothing: norms are one, all else is zero."""
    weights = _RANDOM(params, place)
    for param in params:
        if param.kind in ("matrix", "router", "table"):
            weights[param.name].zero_()
    return weights


_RANDOM = loader.random_weights


def main() -> int:
    parser = OneLineParser(prog="power", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", choices=SHAPES, default="gate_up", help="default: gate_up")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 192, 512, 2048])
    parser.add_argument("--rounds", action="store_true", help="rounds of a whole engine instead of one product")
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--shape", default="5,1,6", help="S,k,T of --rounds; default: 5,1,6")
    parser.add_argument("--batch", type=int, default=32, help="of --rounds; default: 32")
    parser.add_argument("--count", type=int, default=60, help="rounds that are timed; default: 60")
    args = parser.parse_args()
    return exit_code("power", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ConfigError("power is measured on an NVIDIA GPU, and there is none")
    if min(args.rows) < 1 or args.count < 1:
        raise InputError(f"--rows and --count must be at least 1, got {min(args.rows)} and {args.count}")
    torch.manual_seed(0)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps(machine), flush=True)
    if args.rounds:
        rounds(args.preset, args.shape, args.batch, args.count)
    else:
        products(args.product, args.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
