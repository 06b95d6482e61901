"""What `--exactness bits` costs on a CPU: the embedded pair with `bits` and with `ties`, in turns.

    python benchmarks/exactness.py --turns 9

A figure is the median over turns of tokens per second of CPU time with `bits` over that with `ties` beside it, so that
other work on the machine counts little.
"""

import argparse
import json
import statistics
import time

import torch

from treetop import LLM, SamplingParams

PROMPTS = ["def area(r):", "import os\n", "class A:\n    def f(self):", "for i in range(10):"] * 2
CASES = [(1, 128), (8, 128), (1, 500)]
"""Requests, and tokens of each."""


def tokens_per_second(llm: LLM, requests: int, max_tokens: int) -> float:
    started_s = time.process_time()
    outputs = llm.generate(PROMPTS[:requests], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return sum(len(output.token_ids) for output in outputs) / (time.process_time() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}))
    for draft in ("builtin:nestling-eagle3", None):
        ties = LLM("builtin:nestling", draft, max_running_requests=8, exactness="ties")
        bits = LLM("builtin:nestling", draft, max_running_requests=8, exactness="bits")
        for requests, max_tokens in CASES:
            pairs = []
            for turn in range(args.turns + 1):
                order = (ties, bits) if turn % 2 else (bits, ties)
                speed = {llm: tokens_per_second(llm, requests, max_tokens) for llm in order}
                pairs.append((speed[bits], speed[ties]))
            figures = {
                "draft": draft,
                "requests": requests,
                "tokens": max_tokens,
                "bits tokens/s": round(statistics.median(one for one, _ in pairs[1:]), 1),
                "ties tokens/s": round(statistics.median(other for _, other in pairs[1:]), 1),
                "bits / ties": round(statistics.median(one / other for one, other in pairs[1:]), 3),
                "spread": [round(f(one / other for one, other in pairs[1:]), 3) for f in (min, max)],
            }
            print(json.dumps(figures), flush=True)
        ties.close()
        bits.close()


if __name__ == "__main__":
    main()
