"""Where the GPU's time goes in one captured round: kernels by time between completions.

    python benchmarks/profile_round.py --shape 5,4,16 --batch 1 [--exactness bits] [--quantization fp8-channel]

Shapes and weights as in `rounds.py`. A kernel's time is its end minus the end before it, so times add up to that of the
round, though kernels start before others have ended. Each replay is recorded by itself; a round's time without the
profiler stands beside it.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from frame import NAMES, end_with, parser_of, preset
from quantized_cases import CONFIGS
from rounds import in_format
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch names it there, and does not say so
from torch.profiler import ProfilerActivity, profile

from treetop import LLM
from treetop.bench.rounds import device_times_ms, engine_config, phase_times_ms
from treetop.bench.sweeps import SweepOptions, make_grid
from treetop.engine.rounds import RoundKey
from treetop.types.sampling import SamplingMode

INPUT, REPEATS = 1024, 5
Span = tuple[str, float, float]
"""A kernel's name, start and end, in one unit of time."""


def shares(kernels: Sequence[Span]) -> list[tuple[str, float]]:
    """Each kernel's name and time since the completion before it, in order of completion.

    The first counts from the earliest start, so the shares add up to the latest end minus the earliest start.
    """
    ends = sorted(kernels, key=lambda kernel: kernel[2])
    before = [min((start for _, start, _ in kernels), default=0.0), *(end for *_, end in ends)]
    return [(name, end - begin) for (name, _, end), begin in zip(ends, before, strict=False)]


def kernels_of(run: Callable[[], object]) -> list[Span]:
    """Name, start and end in us of everything that `run` has the GPU do."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = [
        event for event in profiler.events() if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return [(event.name, event.time_range.start, event.time_range.end) for event in on_device]


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--shape", default="5,4,16", help="S,k,T")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--exactness", choices=("bits", "ties"), default="ties")
    parser.add_argument("--quantization", choices=CONFIGS)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return profiled(args, Path(folder))


def profiled(args: argparse.Namespace, folder: Path) -> int:
    model, draft = preset(args.preset)
    if args.quantization is not None:
        model = in_format(model, args.quantization, folder)
    accepted = 1 if args.shape.startswith("0,") else 3
    options = {"draft": draft, "load_format": "dummy", "simulate_accept_length": accepted, "exactness": args.exactness}
    grid = make_grid(model, options, SweepOptions(None, [args.shape], [args.batch], [INPUT], 20, args.batch))
    llm = LLM(**asdict(engine_config(model, options, grid.shapes[0], grid)))
    times = phase_times_ms(llm, args.batch, INPUT, grid.rounds)
    print({str(phase): round(statistics.median(each), 3) for phase, each in times.items()}, "ms")
    own_us = 1e3 * statistics.median(device_times_ms(llm, args.batch, INPUT, grid.rounds))
    key = RoundKey(llm.engine.layout.bucket_for(args.batch), grid.shapes[0], SamplingMode.GREEDY)
    with torch.inference_mode():
        kernels_of(lambda: llm.engine.launcher.launch(key, INPUT))  # the profiler's own first time
        recorded = [kernels_of(lambda: llm.engine.launcher.launch(key, INPUT)) for _ in range(REPEATS)]
    total: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for kernels in recorded:
        for name, share in shares(kernels):
            total[name] += share / REPEATS
            counts[name] += 1
    whole_us = sum(total.values())
    launches = sum(counts.values()) / REPEATS
    print(f"a round: {whole_us:.0f} us recorded, {own_us:.0f} us not recorded, {launches:.0f} launches")
    for name in sorted(total, key=lambda name: -total[name])[: args.top]:
        print(f"{total[name]:9.1f} us {total[name] / whole_us:6.1%} {counts[name] / REPEATS:7.1f} x  {name[:110]}")
    return 0


if __name__ == "__main__":
    end_with(main)
