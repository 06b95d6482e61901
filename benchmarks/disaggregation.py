"""What it gives to prefill elsewhere: one worker that does both, against one that decodes while another prefills.

    python benchmarks/disaggregation.py                                   two GPUs, Llama-3.1-8B's shape, random weights
    python benchmarks/disaggregation.py --tp-size 2                       four GPUs
    python benchmarks/disaggregation.py --model builtin:nestling --device cpu --prompt-tokens 256 512

The worker that decodes is on the GPU that the one that does both is on; the one that prefills has the other. With
`--tp-size N` each has N GPUs: the one that prefills N .. 2N - 1. Each is a `treetop serve`; accept lengths are forced.
One JSON object a line: for each length of prompts the ms to the first token on an idle server, together and apart, with
what was transferred, in how long, how fast (of all ranks together), and the share that prefill hid; then ms between two
events of a stream while prompts always come, and without any.
"""

import argparse
import asyncio
import random
from itertools import cycle
from typing import Any

from frame import add_model, end_with, parser_of, say
from serving import gaps_ms, pair, shown

from treetop.bench.serve import summary
from treetop.types.errors import InputError
from treetop_debug.servers import CompletionClient, handed_over, until, workers

_GAP_PROMPTS = 64
"""Of `--gap-prompt-tokens`, which come again only once caches have lost them."""
VOCABULARY = 1000
"""Ids of prompts."""


def prompt(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


async def first_token_ms(client: CompletionClient, draw: random.Random, count: int, repeats: int) -> list[float]:
    """Of prompts that no cache has, one after the other; the first warms up."""
    return [(await client.ask(prompt(draw, count), 1)).ttft_ms for _ in range(1 + repeats)][1:]


async def measure_first_tokens(
    compared: dict[str, CompletionClient], args: argparse.Namespace, draw: random.Random
) -> None:
    for count in args.prompt_tokens:
        line: dict[str, Any] = {"part": "ttft", "prompt_tokens": count}
        for name, client in compared.items():
            before = handed_over(client.url) if name == "apart" else {}
            times = await first_token_ms(client, draw, count, args.repeats)
            line[name + "_ms"] = shown(times)
            if name == "apart":
                await asyncio.sleep(1.0)  # metrics are told now and then
                moved = {key: value - before[key] for key, value in handed_over(client.url).items()}
                asked = 1 + args.repeats
                line["handed_over"] = [round(moved["num_requests_done"]), asked]
                line["MiB"] = round(moved["num_bytes"] / asked / 2**20, 1)
                seconds = moved["time_seconds"]
                line["transfer_ms"] = round(1e3 * seconds / asked, 2)
                line["GB/s"] = round(moved["num_bytes"] / seconds / 1e9, 3) if seconds else None
                line["hidden"] = round(moved["overlapped_time_seconds"] / seconds, 3) if seconds else None
        line["added_ms"] = round(line["apart_ms"]["median"] - line["together_ms"]["median"], 2)
        say(line)


async def measure_gaps(name: str, client: CompletionClient, args: argparse.Namespace, draw: random.Random) -> None:
    """Streams that decode: alone, then while a prompt is always on its way."""

    made = [prompt(draw, args.gap_prompt_tokens) for _ in range(_GAP_PROMPTS)]  # takes milliseconds each

    async def come() -> None:
        for ids in cycle(made):
            await client.ask(ids, 1)

    found: dict[str, Any] = {
        "part": "gaps",
        "workers": name,
        "rows": args.rows,
        "prompt_tokens": args.gap_prompt_tokens,
    }
    prompts = [prompt(draw, args.input_tokens) for _ in range(args.rows)]
    async with client.streams(prompts, args.room) as streams:
        for load in ("alone", "with_prompts"):
            coming = [asyncio.create_task(come())] if load == "with_prompts" else []
            begun = [len(each.events) for each in streams]
            last = begun[0] + args.rounds
            await until(lambda last=last: len(streams[0].events) >= last, coming)  # type: ignore[misc]  # bound now
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
            times = [gap for each, at in zip(streams, begun, strict=True) for gap in gaps_ms(each, at)]
            found[load + "_ms"] = {key: round(value, 2) for key, value in summary(times).items()}
    found["p99_ratio"] = round(found["with_prompts_ms"]["p99"] / found["alone_ms"]["p99"], 2)
    say(found)


async def run(args: argparse.Namespace) -> None:
    longest, draw = max(*args.prompt_tokens, args.gap_prompt_tokens) + 2, random.Random(0)
    args.room = args.accept_length * (3 * args.rounds + 200)
    context = max(longest, args.input_tokens + args.room + 64)
    options = {
        "simulate_accept_length": args.accept_length,
        "load_format": "auto" if args.model else "dummy",
        "max_running_requests": args.rows + 4,
        "context_length": context,
        "max_total_tokens": args.rows * (args.input_tokens + args.room) + 4 * longest,
        "tp_size": args.tp_size,
        "device": args.device,
    }
    with pair(args, context) as (model, draft):
        async with workers(model, {**options, "draft": draft}, ("null", "prefill", "decode")) as by_role:
            compared = {"together": by_role["null"], "apart": by_role["decode"]}
            await measure_first_tokens(compared, args, draw)
            for name, client in compared.items():
                await measure_gaps(name, client, args, draw)


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[2048, 8192, 16384, 32000], metavar="N")
    parser.add_argument("--gap-prompt-tokens", type=int, default=8192, metavar="N", help="of prompts beside streams")
    parser.add_argument("--input-tokens", type=int, default=1024, metavar="N", help="prompts of streams")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="streams")
    parser.add_argument("--accept-length", type=int, default=3, metavar="N", help="tokens that every round gives")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="of a measurement of gaps")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--tp-size", type=int, default=1, metavar="N", help="ranks of each worker")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args(arguments)
    numbers = args.gap_prompt_tokens, args.input_tokens, args.rows, args.rounds, args.repeats, args.tp_size
    if min(*args.prompt_tokens, *numbers) < 1:
        raise InputError("every number must be at least 1")
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    end_with(main)
