"""Rounds of rows of unequal length, and what attention's helpers cost rows of equal length: an 8B target's shape.

    python benchmarks/unequal_rows.py [--preset llama-3.1-8b] [--shape 5,4,16] [--passes 3] [--rounds 60]

Two engines with the same random weights, one whose attention has helpers (`treetop.kernels.attention.teams`) and one
whose has none. Batches of 1, 8 and 32 rows of 1,024 tokens, and 32 rows of which one has 8,192 or 32,768; all in turn
on both, `passes` times. One JSON object a batch: median milliseconds a round with and without helpers; the median of
the ratios of passes beside each other; and for unequal rows the ratio to equal ones. A shape accepts three tokens a
round.
"""

import argparse
import json
import random
import statistics
from typing import Any
from unittest.mock import patch

import torch
from rounds import NAMES, preset

from treetop import LLM
from treetop.bench.rounds import wall_times_ms

SHORT, LONG = 1024, (8192, 32768)
ROWS = 32
CASES = {**{f"{rows} equal": [SHORT] * rows for rows in (1, 8, ROWS)}}
CASES |= {f"{ROWS}, one of {long // 1024}k": [long, *[SHORT] * (ROWS - 1)] for long in LONG}


def engines(args: argparse.Namespace) -> dict[str, LLM]:
    target, head = preset(args.preset)
    steps, topk, nodes = map(int, args.shape.split(","))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_running_requests": ROWS,
        "context_length": max(LONG) + 2048,
        "max_total_tokens": max(LONG) + ROWS * 2048,
        "compress_weights": False,  # two engines are to fit into 80 GB
    }
    if nodes > 1:
        options |= {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
        }
        options |= {"simulate_accept_length": 3.0, "speculative_policy": "fixed"}
    made = {"helpers": LLM(target, head if nodes > 1 else None, **options)}
    with patch("treetop.attention.triton_backend.make_arrivals", lambda *_: None):
        made["none"] = LLM(target, head if nodes > 1 else None, **options)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--shape", default="0,1,1", help="S,k,T (default %(default)s: plain)")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    both, draw = engines(args), random.Random(1)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "shape": args.shape}), flush=True)
    prompts = {name: [[draw.randrange(100_000) for _ in range(n)] for n in of] for name, of in CASES.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.passes):
        for case, of in prompts.items():
            for name, llm in both.items():
                median = statistics.median(wall_times_ms(llm, of, args.rounds)[0])
                times.setdefault((case, name), []).append(median)
    equal = times[f"{ROWS} equal", "helpers"]
    for case in prompts:
        with_helpers, without = times[case, "helpers"], times[case, "none"]
        line = {
            "rows": case,
            "ms": round(statistics.median(with_helpers), 3),
            "ms_without": round(statistics.median(without), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(with_helpers, without, strict=True)), 4),
            "over_equal": round(statistics.median(a / b for a, b in zip(with_helpers, equal, strict=True)), 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
