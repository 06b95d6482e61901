"""What `--exactness bits` costs: on a CPU a pair with `bits` and with `ties`, in turns.

    MKL_CBWR=AUTO,STRICT python benchmarks/exactness.py --turns 9        on an Intel CPU
    python benchmarks/exactness.py --turns 9
    python benchmarks/exactness.py --pair smollm2 --exact-sums integers --requests 1 4 --tokens 32 --turns 5
    python benchmarks/exactness.py --device cuda

A figure is the median over turns of tokens per second of CPU time with `bits` over that with `ties` beside it, so that
other work on the machine counts little.

On a GPU: an 8B target's shape in bfloat16, random weights and head, first with `ties`, then with `bits`, each with the
defaults of the other options. Medians of the wall time of a round behind 1,024 tokens, and of the time to the first
token of one prompt; then their ratios.
"""

import gc
import statistics
import time
from typing import get_args

import torch
from frame import NAMES, end_with, machine_of, parser_of, preset, say
from prefill import time_once

from treetop import LLM, SamplingParams
from treetop.bench.prompts import prompt_ids
from treetop.bench.rounds import wall_times_ms
from treetop.scheduler.policy import FixedShape
from treetop.types.config import Exactness, ExactSums
from treetop.types.default_model import PAIRS
from treetop.types.engine_options import EngineOptions
from treetop.types.layout import PLAIN, SpecShape

PROMPTS = ["def area(r):", "import os\n", "class A:\n    def f(self):", "for i in range(10):"] * 2
ROWS, BEHIND, PROMPTS_OF = (1, 8, 32), 1024, (1024, 8192)
"""On a GPU: batches of rounds, the tokens before these, and the prompts that are prefilled."""


def tokens_per_second(llm: LLM, requests: int, max_tokens: int) -> float:
    started_s = time.process_time()
    outputs = llm.generate(PROMPTS[:requests], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return sum(len(output.token_ids) for output in outputs) / (time.process_time() - started_s)


def on_a_gpu(name: str, rounds: int) -> None:
    """Print the milliseconds of both, and the ratios."""
    shapes = {"plain": PLAIN, "(5, 4, 16)": SpecShape(4, 5, 16)}  # named (S, k, T)
    figures = dict[str, dict[str, float]]()
    for exactness in ("ties", "bits"):
        target, head = preset(name)
        llm = LLM(
            target,
            head,
            exactness=exactness,
            device="cuda",
            load_format="dummy",
            max_running_requests=max(ROWS),
            context_length=max(PROMPTS_OF) + 256,
            disable_radix_cache=True,
            speculative_policy="auto",
            speculative_shapes="5,4,16",
        )
        found = figures[exactness] = {}
        for title, shape in shapes.items():
            llm.scheduler.policy = FixedShape(shape)
            for batch in ROWS:
                times, _ = wall_times_ms(llm, prompt_ids(llm, batch, BEHIND), rounds)
                found[f"round {title}, {batch} rows"] = statistics.median(times)
        for length in PROMPTS_OF:
            prompts = prompt_ids(llm, 1, length)
            found[f"prefill of {length}"] = 1e3 * statistics.median(time_once(llm, prompts)[0] for _ in range(4))
        say({exactness: {case: round(ms, 3) for case, ms in found.items()}})
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    ratios = {case: round(figures["bits"][case] / ms, 3) for case, ms in figures["ties"].items()}
    say({"bits / ties": ratios})


def _served(model: str, draft: str | None, exactness: Exactness, sums: ExactSums) -> LLM:
    options: EngineOptions = {"max_running_requests": 8, "context_length": 1024}
    options |= {"exactness": exactness, "exact_sums": sums}
    if draft is None:
        options["speculative_algorithm"] = "NONE"
    return LLM(model, draft, **options)


def on_a_cpu(pair: str, sums: ExactSums, batches: list[int], max_tokens: int, turns: int) -> None:
    model, head = PAIRS[pair]
    for draft in (head, None):
        ties, bits = _served(model, draft, "ties", sums), _served(model, draft, "bits", sums)
        say({"draft": draft, "products": sorted({each.calls[0] for each in bits.engine.products if each.exact})})
        for requests in batches:
            pairs = []
            for turn in range(turns + 1):
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
            say(figures)
        ties.close()
        bits.close()


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="on a CPU")
    parser.add_argument("--pair", choices=PAIRS, default="nestling", help="on a CPU")
    parser.add_argument("--exact-sums", choices=get_args(ExactSums), default="auto", help="on a CPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="on a CPU, at once")
    parser.add_argument("--tokens", type=int, default=128, help="on a CPU, of each request")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0], help="on a GPU")
    parser.add_argument("--rounds", type=int, default=20, help="on a GPU, of each case")
    args = parser.parse_args(arguments)
    say({**machine_of(), "threads": torch.get_num_threads()})
    if args.device == "cuda":
        on_a_gpu(args.preset, args.rounds)
    else:
        on_a_cpu(args.pair, args.exact_sums, args.requests, args.tokens, args.turns)
    return 0


if __name__ == "__main__":
    end_with(main)
