"""Where the GPU's time goes in one captured round: kernels by total time. Shapes and weights as in `rounds.py`.

python bench/profile_round.py --shape 5,4,16 --batch 1
"""

import argparse

import torch
from rounds import engine, measure
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="5,4,16", help="S,k,T")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    steps, topk, nodes = (int(part) for part in args.shape.split(","))
    llm = engine((steps, topk, nodes), 3, args.batch)
    print(measure(llm, args.batch, 1024, 20))
    key, repeats = llm.engine.last_key, 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            llm.engine.launcher.launch(key, 1024)
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / repeats, e.count / repeats) for e in profiler.key_averages()]
    rows.sort(key=lambda row: -row[1])
    print(f"sum of kernels {sum(row[1] for row in rows):.0f} us, {sum(row[2] for row in rows):.0f} launches a round")
    for name, time_us, count in rows[: args.top]:
        print(f"{time_us:9.1f} us {count:7.1f} x  {name[:110]}")


if __name__ == "__main__":
    main()
