"""How long streams wait when the first long prompts come to a process that has just started, on a GPU.

    python benchmarks/first_long_prompt.py [--preset llama-3.1-8b] [--streams 32] [--prompts 4]

Streams of 1,024 tokens decode plainly; then prompts of 8,192 tokens come one after another. A line of JSON a prompt: ms
to its first token, and between two events of a stream meanwhile: the longest, the 99th percentile and the median. What
a first start on a machine compiles is kept: empty its caches (`XDG_CACHE_HOME`, `TRITON_CACHE_DIR`) to see that again.
"""

import argparse
import asyncio
import json
import random
import time

from rounds import NAMES, preset

from treetop import AsyncLLM, SamplingParams

SHORT, LONG, VOCAB = 1024, 8192, 100_000
WARM_S, PAUSE_S = 4.0, 0.5


async def gaps_of(llm: AsyncLLM, length: int, max_tokens: int, into: list[tuple[float, float]]) -> None:
    """Add (when, seconds since the one before) of each event of a completion, in seconds of the clock."""
    prompt = [random.randrange(VOCAB) for _ in range(length)]
    last = time.perf_counter()
    async for _ in await llm.stream([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True)):
        now = time.perf_counter()
        into.append((now, now - last))
        last = now


async def measure(model: str, streams: int, prompts: int) -> None:
    began_s = time.perf_counter()
    options = {"load_format": "dummy", "max_running_requests": 2 * streams, "context_length": 2 * LONG}
    async with AsyncLLM(model, None, **options) as llm:  # type: ignore[arg-type]  # their types are the table's
        print(json.dumps({"start_s": round(time.perf_counter() - began_s, 1)}), flush=True)
        heard: list[list[tuple[float, float]]] = [[] for _ in range(streams)]
        running = [asyncio.create_task(gaps_of(llm, SHORT, LONG, each)) for each in heard]
        await asyncio.sleep(WARM_S)
        for number in range(prompts):
            begin, own = time.perf_counter(), list[tuple[float, float]]()
            await gaps_of(llm, LONG, 4, own)
            end = time.perf_counter()
            gaps = sorted(1e3 * gap for each in heard for when, gap in each if begin <= when <= end)
            figures = {"first_token": 1e3 * own[0][1], "longest": gaps[-1], "p99": gaps[len(gaps) * 99 // 100]}
            figures["p50"] = gaps[len(gaps) // 2]
            print(json.dumps({"prompt": number, "ms": {k: round(v, 1) for k, v in figures.items()}}), flush=True)
            await asyncio.sleep(PAUSE_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    random.seed(1)
    asyncio.run(measure(preset(args.preset)[0], args.streams, args.prompts))


if __name__ == "__main__":
    main()
