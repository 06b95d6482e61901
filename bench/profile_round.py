"""Where the GPU's time goes in one captured round: kernels by total time. Shapes and weights as in `rounds.py`.

python bench/profile_round.py --shape 5,4,16 --batch 1
"""

import argparse
from dataclasses import asdict

import torch
from rounds import NAMES, preset
from torch.profiler import ProfilerActivity, profile

from treetop import LLM
from treetop.bench.rounds import engine_config, phase_times_ms
from treetop.bench.sweeps import SweepOptions, make_grid
from treetop.engine.rounds import RoundKey
from treetop.types.sampling import Choice

INPUT, REPEATS = 1024, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--shape", default="5,4,16", help="S,k,T")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    model, draft = preset(args.preset)
    options = {"draft": draft, "load_format": "dummy", "simulate_accept_length": 3}
    grid = make_grid(model, options, SweepOptions(None, [args.shape], [args.batch], [INPUT], 20, args.batch))
    llm = LLM(**asdict(engine_config(model, options, grid.shapes[0], grid)))
    times = phase_times_ms(llm, args.batch, INPUT, grid.rounds)
    print({str(phase): round(sorted(each)[len(each) // 2], 3) for phase, each in times.items()}, "ms")
    key = RoundKey(llm.engine.layout.bucket_for(args.batch), grid.shapes[0], Choice.GREEDY)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            llm.engine.launcher.launch(key, INPUT)
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / REPEATS, e.count / REPEATS) for e in profiler.key_averages()]
    rows.sort(key=lambda row: -row[1])
    print(f"sum of kernels {sum(row[1] for row in rows):.0f} us, {sum(row[2] for row in rows):.0f} launches a round")
    for name, time_us, count in rows[: args.top]:
        print(f"{time_us:9.1f} us {count:7.1f} x  {name[:110]}")


if __name__ == "__main__":
    main()
