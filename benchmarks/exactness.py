"""What `--exactness bits` costs: on a CPU a pair with `bits` and with `ties`, in turns.

    python benchmarks/exactness.py --turns 9
    python benchmarks/exactness.py --pair smollm2 --exact-sums integers --requests 1 4 --tokens 32 --turns 5
    python benchmarks/exactness.py --device cuda
    python benchmarks/exactness.py --device cuda --shapes 5,1,6 --batches 32 --prompts --turns 3
    python benchmarks/exactness.py --device cuda --no-draft --batches 1 8 32 64 128 --turns 3

A figure is the median over turns of tokens per second of CPU time with `bits` over that with `ties` beside it, so that
other work on the machine counts little. Each engine has a process of its own: MKL has one mode a process, and `ties`
is faster in its own than in the strict one of `bits`.

On a GPU: an 8B target's shape in bfloat16, random weights and head, an engine with `ties` and one with `bits` beside
it, in turns. Medians over turns of the wall time of a round behind 1,024 tokens, of 4 shapes at 3 batches, and of the
time to the first token of one prompt; the ratio is the median of those of a turn. Each turn's is printed as it comes.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
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
SHAPES = {"plain": PLAIN, **{f"{s},{k},{t}": SpecShape(k, s, t) for s, k, t in ((3, 1, 4), (5, 1, 6), (5, 4, 16))}}
"""By name, S,k,T."""
ROWS, BEHIND, PROMPTS_OF = [1, 8, 32], 1024, [1024, 8192]
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


@dataclass(frozen=True, slots=True)
class Cases:
    """What is timed on a GPU. shapes: of `SHAPES`, each at all batches. prompts: lengths that are prefilled."""

    shapes: list[str]
    batches: list[int]
    prompts: list[int]


def engines_of(name: str, cases: Cases, drafted: bool) -> dict[Exactness, LLM]:
    """One with `ties` and one with `bits`, that can run the cases. drafted: each has the head, plain rounds or not."""
    target, head = preset(name)
    context = max([BEHIND, *cases.prompts]) + 256
    options: EngineOptions = {
        "device": "cuda",
        "load_format": "dummy",
        "max_running_requests": max(cases.batches),
        "context_length": context,
        "max_total_tokens": max(2 * BEHIND * max(cases.batches), context + 256),
        "disable_radix_cache": True,
    }
    if drafted:
        trees = [shape for shape in cases.shapes if shape != "plain"] or [shape for shape in SHAPES if shape != "plain"]
        options |= {"speculative_policy": "auto", "speculative_calibration": "off"}
        options["speculative_shapes"] = " ".join(trees)
    else:
        options["speculative_algorithm"] = "NONE"
    llms = dict[Exactness, LLM]()
    for exactness in ("ties", "bits"):
        own: EngineOptions = {**options, "exactness": exactness}
        llms[exactness] = LLM(target, head if drafted else None, **own)
        say({exactness: {"copies": llms[exactness].engine.memory.budget.copies}})
    return llms


def on_a_gpu(name: str, cases: Cases, rounds: int, turns: int, drafted: bool) -> None:
    """Print the milliseconds of both, and the ratios: cases in turns, `ties` and `bits` one right after the other."""
    llms = engines_of(name, cases, drafted)

    def time_round(exactness: Exactness, shape: str, batch: int) -> float:
        llm = llms[exactness]
        if drafted:
            llm.scheduler.policy = FixedShape(SHAPES[shape])
        return statistics.median(wall_times_ms(llm, prompt_ids(llm, batch, BEHIND), rounds)[0])

    def time_prefill(exactness: Exactness, length: int) -> float:
        return 1e3 * time_once(llms[exactness], prompt_ids(llms[exactness], 1, length))[0]

    timed: dict[str, Callable[[Exactness], float]] = {}
    for shape, batch in product(cases.shapes, cases.batches):
        timed[f"round {shape}, {batch} rows"] = partial(time_round, shape=shape, batch=batch)
    for length in cases.prompts:
        timed[f"prefill of {length}"] = partial(time_prefill, length=length)
    found: dict[str, list[dict[Exactness, float]]] = {case: [] for case in timed}
    for turn in range(turns):
        for case, time_case in timed.items():
            order = reversed(llms) if turn % 2 else llms
            found[case].append({exactness: time_case(exactness) for exactness in order})
            say({"turn": turn, **_compared(case, found[case][-1:])})
    for case, of_turns in found.items():
        ratios = [each["bits"] / each["ties"] for each in of_turns]
        say({**_compared(case, of_turns), "spread": [round(min(ratios), 3), round(max(ratios), 3)]})
    for llm in llms.values():
        llm.close()


def _compared(case: str, of_turns: list[dict[Exactness, float]]) -> dict[str, object]:
    """Medians of the milliseconds and of the ratios of some turns."""
    line: dict[str, object] = {"case": case}
    for exactness in ("ties", "bits"):
        line[exactness] = round(statistics.median(each[exactness] for each in of_turns), 3)
    return line | {"bits / ties": round(statistics.median(each["bits"] / each["ties"] for each in of_turns), 3)}


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
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES), help="on a GPU, of rounds")
    parser.add_argument("--no-draft", action="store_true", help="on a GPU: without a head, so all rounds are plain")
    parser.add_argument("--batches", type=int, nargs="+", default=ROWS, metavar="ROWS", help="on a GPU, of each shape")
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=PROMPTS_OF, metavar="TOKENS", help="on a GPU, that are prefilled"
    )
    args = parser.parse_args(arguments)
    for option in ("turns", "rounds", "batches", "prompts"):
        given = getattr(args, option)
        if min(given if isinstance(given, list) else [given], default=1) < 1:
            parser.error(f"--{option}: a number is below 1")
    if args.no_draft and (args.device == "cpu" or args.shapes != [*SHAPES]):
        parser.error("--no-draft: of --device cuda, and without --shapes: all rounds are plain")
    say({**machine_of(), "threads": torch.get_num_threads()})
    if args.device == "cuda":
        shapes = ["plain"] if args.no_draft else args.shapes
        cases = Cases(shapes, args.batches, args.prompts)
        on_a_gpu(args.preset, cases, args.rounds, args.turns, drafted=not args.no_draft)
    else:
        on_a_cpu(args.pair, args.exact_sums, args.requests, args.tokens, args.turns)
    return 0


if __name__ == "__main__":
    end_with(main)
