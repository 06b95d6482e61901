"""Where the time of a prefill step goes on a GPU: host, and kernels by name.

    python benchmarks/profile_prefill.py --tokens 1024 2048 8192

Shapes and weights as in `rounds.py`. Of each step: milliseconds until the host has launched it, and until the device
has ended it, medians; TFLOP/s of its products, were there nothing else; of one recorded step milliseconds by kernel,
each its end minus the end before it. `--behind N` tokens are in the pages before.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from frame import NAMES, end_with, parser_of, preset
from profile_round import kernels_of, shares

from treetop import LLM
from treetop.engine.prefill import PrefillBatch, prefill
from treetop.engine.startup.profile_run import dummy_batch
from treetop.engine.startup.self_test import on_null_pages
from treetop.types.sampling import SamplingMode

REPEATS = 7


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--draft", action="store_true", help="with its head, which reads the prompt too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--behind", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args(arguments)
    target, head = preset(args.preset)
    llm = LLM(
        target,
        draft=head if args.draft else None,
        device="cuda",
        load_format="dummy",
        graphs="off",
        check_level=0,
        max_running_requests=4,
        context_length=max(args.tokens) + args.behind + 16,
        chunked_prefill_size=max(args.tokens),
        attention_backend=args.backend,
    )
    runner = llm.engine.runner
    weights = sum(product.numbers for product in runner.target.products) - runner.target.lm_head.numbers
    with torch.inference_mode(), on_null_pages(runner):
        for tokens in args.tokens:
            batch = dummy_batch(runner, SamplingMode.GREEDY, 1, tokens)
            batch.rows.fill_(0)
            batch.query_len.fill_(tokens)

            def run(batch: PrefillBatch = batch) -> None:
                runner.state.committed[0] = args.behind
                prefill(runner, batch)

            times = [timed(run) for _ in range(REPEATS)][2:]
            host, end = (statistics.median(each) for each in zip(*times, strict=True))
            print(
                f"{tokens} tokens behind {args.behind}: host {1e3 * host:.2f} ms, end {1e3 * end:.2f} ms,"
                f" products of {2e-12 * weights * tokens / end:.0f} TFLOP/s",
                flush=True,
            )
            recorded, by_name = kernels_of(run), defaultdict[str, list[float]](list)
            for name, spent_us in shares(recorded):
                by_name[name].append(spent_us)
            busy_us = sum(end - start for _, start, end in recorded)
            whole_us = max(end for *_, end in recorded) - min(start for _, start, _ in recorded)
            print(f"  {len(recorded)} kernels, busy {busy_us / 1e3:.2f} of {whole_us / 1e3:.2f} ms", flush=True)
            ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
            for name, spent in ordered[: args.top]:
                print(f"  {sum(spent) / 1e3:8.2f} ms {len(spent):5} x {name[:110]}", flush=True)
    return 0


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds until it is launched, and until it has ended."""
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    run()
    launched_s = time.perf_counter()
    torch.cuda.synchronize()
    return launched_s - started_s, time.perf_counter() - started_s


if __name__ == "__main__":
    end_with(main)
