"""What `--exactness bits` costs: on a CPU a pair with `bits` and with `ties`, in turns.

    python benchmarks/exactness.py --turns 9
    python benchmarks/exactness.py --pair smollm2 --exact-sums integers --requests 1 4 --tokens 32 --turns 5
    python benchmarks/exactness.py --device cuda

A figure is the median over turns of tokens per second of CPU time with `bits` over that with `ties` beside it, so that
other work on the machine counts little. Each engine has a process of its own: MKL has one mode a process, and `ties`
is faster in its own than in the strict one of `bits`.

On a GPU: an 8B target's shape in bfloat16, random weights and head, an engine with `ties` and one with `bits` beside
it, in turns. Medians over turns of the wall time of a round behind 1,024 tokens, of 4 shapes at 3 batches, and of the
time to the first token of one prompt; the ratio is the median of those of a turn.
"""

import multiprocessing
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
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
SHAPES = {"plain": PLAIN, **{f"({s}, {k}, {t})": SpecShape(k, s, t) for s, k, t in ((3, 1, 4), (5, 1, 6), (5, 4, 16))}}
"""By name, (S, k, T)."""
ROWS, BEHIND, PROMPTS_OF = (1, 8, 32), 1024, (1024, 8192)
"""On a GPU: batches of rounds, the tokens before these, and the prompts that are prefilled."""


class Served:
    """An engine in a process of its own."""

    def __init__(self, model: str, draft: str | None, exactness: Exactness, sums: ExactSums) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.calls: list[str] = self._process.submit(_start, model, draft, exactness, sums).result()

    def tokens_per_second(self, requests: int, max_tokens: int) -> float:
        return self._process.submit(_tokens_per_second, requests, max_tokens).result()

    def close(self) -> None:
        self._process.shutdown()


_ENGINES: list[LLM] = []
"""Of such a process, its one."""


def _start(model: str, draft: str | None, exactness: Exactness, sums: ExactSums) -> list[str]:
    """Returns the calls of exact products."""
    options: EngineOptions = {"max_running_requests": 8, "context_length": 1024}
    options |= {"exactness": exactness, "exact_sums": sums}
    if draft is None:
        options["speculative_algorithm"] = "NONE"
    llm = LLM(model, draft, **options)
    _ENGINES.append(llm)
    return sorted({each.calls[0] for each in llm.engine.products if each.exact})


def _tokens_per_second(requests: int, max_tokens: int) -> float:
    started_s = time.process_time()
    outputs = _ENGINES[0].generate(PROMPTS[:requests], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return sum(len(output.token_ids) for output in outputs) / (time.process_time() - started_s)


def on_a_gpu(name: str, rounds: int, turns: int) -> None:
    """Print the milliseconds of both, and the ratios: cells in turns, `ties` and `bits` one right after the other."""
    target, head = preset(name)
    llms = dict[Exactness, LLM]()
    for exactness in ("ties", "bits"):
        llms[exactness] = LLM(
            target,
            head,
            exactness=exactness,
            device="cuda",
            load_format="dummy",
            max_running_requests=max(ROWS),
            context_length=max(PROMPTS_OF) + 256,
            max_total_tokens=max(ROWS) * 2 * BEHIND,
            disable_radix_cache=True,
            speculative_policy="auto",
            speculative_calibration="off",
            speculative_shapes="3,1,4 5,1,6 5,4,16",
        )
        say({exactness: {"copies": llms[exactness].engine.memory.budget.copies}})
    cells = [(title, shape, batch) for title, shape in SHAPES.items() for batch in ROWS]
    times: dict[tuple[str, Exactness], list[float]] = defaultdict(list)
    for turn in range(turns):
        for title, shape, batch in cells:
            for exactness in reversed(llms) if turn % 2 else llms:
                llm = llms[exactness]
                llm.scheduler.policy = FixedShape(shape)
                found, _ = wall_times_ms(llm, prompt_ids(llm, batch, BEHIND), rounds)
                times[f"round {title}, {batch} rows", exactness].append(statistics.median(found))
        for length in PROMPTS_OF:
            for exactness in reversed(llms) if turn % 2 else llms:
                llm = llms[exactness]
                times[f"prefill of {length}", exactness].append(1e3 * time_once(llm, prompt_ids(llm, 1, length))[0])
    for case in dict.fromkeys(case for case, _ in times):
        pairs = list(zip(times[case, "bits"], times[case, "ties"], strict=True))
        ratios = [one / other for one, other in pairs]
        line: dict[str, object] = {"case": case}
        line |= {exactness: round(statistics.median(times[case, exactness]), 3) for exactness in llms}
        line |= {"bits / ties": round(statistics.median(ratios), 3)}
        say({**line, "spread": [round(min(ratios), 3), round(max(ratios), 3)]})
    for llm in llms.values():
        llm.close()


def on_a_cpu(pair: str, sums: ExactSums, batches: list[int], max_tokens: int, turns: int) -> None:
    model, head = PAIRS[pair]
    for draft in (head, None):
        ties, bits = (Served(model, draft, exactness, sums) for exactness in ("ties", "bits"))
        say({"draft": draft, "products": bits.calls})
        for requests in batches:
            pairs = []
            for turn in range(turns + 1):
                order = (ties, bits) if turn % 2 else (bits, ties)
                speed = {each: each.tokens_per_second(requests, max_tokens) for each in order}
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
    parser.add_argument("--turns", type=int, default=9, help="of both, one after the other")
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
        on_a_gpu(args.preset, args.rounds, args.turns)
    else:
        on_a_cpu(args.pair, args.exact_sums, args.requests, args.tokens, args.turns)
    return 0


if __name__ == "__main__":
    end_with(main)
