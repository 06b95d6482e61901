"""Captured prefill steps beside those launched kernel by kernel, on one engine each for plain decoding and for `auto`.

    python benchmarks/prefill_steps.py --out build/prefill_steps.json            an 8B model's shape, on a GPU
    python benchmarks/prefill_steps.py --model builtin:nestling --draft builtin:nestling-eagle3 --device cpu \
        --graphs sim --largest 64 --rows 4 --input 48 --output 8 --out /tmp/prefill_steps.json

Steps alone, behind 512 tokens of each prompt: milliseconds until the host has launched one, and until the device has
ended it, of one prompt in wide blocks, and of many with a narrow block each. Then passes, captured and not in turns: so
many prompts at once, all in the prefix cache, half of them sampled; tokens a second, milliseconds to the last first
token, processor time of the process as a share of the pass, and prefill steps by (tokens, block). `auto` has
the head of `--profile`. JSON: a line of stdout for each engine, and all of them in `--out`.
"""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from frame import NAMES, end_with, parser_of, preset

from treetop import LLM
from treetop.bench.prompts import random_prompts
from treetop.bench.provenance import versions
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.prefill import prefill
from treetop.engine.prompt_blocks import block_numbers
from treetop.engine.rounds import RoundKey
from treetop.engine.startup.profile_run import dummy_batch
from treetop.engine.startup.self_test import on_null_pages
from treetop.types.ids import RequestId, Row
from treetop.types.messages import Chunk, prefill_of
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingMode, SamplingParams

_BEHIND = 512


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(llm: LLM) -> dict[str, dict[str, tuple[float, float]]]:
    """By size: milliseconds of the host and until the end, medians, eager and captured."""
    engine, runner, layout = llm.engine, llm.engine.runner, llm.engine.layout
    behind = min(_BEHIND, layout.max_context // 2 - 1)

    def eager(rows: int, width: int) -> Callable[[], object]:
        batch = dummy_batch(runner, SamplingMode.SAMPLE, layout.bucket_for(rows), width)
        batch.rows[:rows] = torch.arange(rows, device=batch.rows.device)
        batch.query_len[:rows] = width
        return partial(prefill, runner, replace(batch, max_kv_len=behind + width))

    def captured(size: int, block: int, rows: int) -> Callable[[], object]:
        chunks = [Chunk(Row(row), behind, (0,) * (size // rows), None) for row in range(rows)]
        numbers = block_numbers(chunks, size, block, layout.dummy_row)
        runner.buffers.prompts.write(size, block, runner.buffers.rows.new_tensor(numbers))
        return partial(
            engine.launcher.launch, RoundKey.of_prompts(size, block, SamplingMode.SAMPLE), layout.max_committed
        )

    found = dict[str, dict[str, tuple[float, float]]]()
    wide = max(block for _, block in layout.prefill_sizes)
    with torch.inference_mode(), on_null_pages(runner):
        for size, block in layout.prefill_sizes:
            rows = 1 if block == wide else size // block
            if rows > layout.max_requests or behind + size // rows > layout.max_context:
                continue
            runs = {"eager": eager(rows, size // rows), "captured": captured(size, block, rows)}
            name = f"{rows} x {size // rows}"
            found[name] = {}
            for way, run in runs.items():
                times = list[tuple[float, float]]()
                for _ in range(7):
                    runner.state.committed[: layout.max_requests] = behind
                    wait(runner.buffers.rows.device)
                    begun_s = time.perf_counter()
                    run()
                    launched_s = time.perf_counter()
                    wait(runner.buffers.rows.device)
                    times.append((launched_s - begun_s, time.perf_counter() - begun_s))
                host, end = zip(*times[2:], strict=True)
                found[name][way] = round(1e3 * median(host), 2), round(1e3 * median(end), 2)
    return found


def one_pass(llm: LLM, prompts: list[list[int]], output: int, first: int) -> dict[str, Any]:
    """All prompts at once."""
    scheduler, engine, out = llm.scheduler, llm.engine, list[Any]()
    cpu_s, begun_s, last_s, tokens, sizes = time.process_time(), time.perf_counter(), 0.0, 0, Counter[str]()
    waiting = set[RequestId]()
    for i, ids in enumerate(prompts):
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.8 * (i % 2))
        waiting.add(RequestId(first + i))
        scheduler.add(EngineRequest(RequestId(first + i), tuple(ids), params, i))
    while scheduler.has_work or out:  # rounds may be out of requests that have ended
        while (plan := scheduler.plan()) is not None:
            out.append((plan, engine.launch(plan)))
            prompt = prefill_of(plan)
            if prompt is not None:
                sizes[f"{prompt.packed}, {prompt.block}"] += 1
        plan, step = out.pop(0)
        for update in scheduler.commit(plan, engine.collect(step)):
            tokens += len(update.new_ids)
            if update.new_ids and update.request_id in waiting:
                waiting.discard(update.request_id)
                last_s = time.perf_counter() - begun_s
    seconds = time.perf_counter() - begun_s
    busy = (time.process_time() - cpu_s) / seconds
    rate, first_ms = round(tokens / seconds), round(1e3 * last_s, 1)
    return {"tokens_per_s": rate, "last_first_ms": first_ms, "cores": round(busy, 2), "steps": dict(sizes)}


def passes(llm: LLM, rows: int, length: int, output: int, count: int) -> list[dict[str, Any]]:
    planner = llm.scheduler._prefill
    dice = random.Random(0)
    prompts = [
        random_prompts(1, max(length - dice.randrange(16), 2), llm.engine.spec.vocab_size)[0] for _ in range(rows)
    ]
    for i, ids in enumerate(prompts):
        ids[0] = i % llm.engine.spec.vocab_size
    found, both = list[dict[str, Any]](), (llm.engine.layout.prefill_sizes, ())
    for turn in range(2 + 2 * count):
        planner.sizes = both[turn % 2]
        got = one_pass(llm, prompts, output, (1 + turn) * rows)
        if turn > 1:
            found.append({"captured": turn % 2 == 0, **got})
    return found


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0], help="shape, with random weights")
    parser.add_argument("--model", help="a target with weights instead")
    parser.add_argument("--draft", help="its head")
    parser.add_argument("--profile", default="builtin:llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", choices=("auto", "sim"), default="auto")
    parser.add_argument("--layers", type=int, help="of the preset, instead of all")
    parser.add_argument("--largest", type=int, default=2048, help="captured step, tokens")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=("plain", "auto"), default=("plain", "auto"))
    parser.add_argument("--exactness", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON that is written")
    args = parser.parse_args(arguments)
    found = dict[str, Any](versions=versions())
    for way in args.ways:
        begun_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
            llm = _engine(args, way, Path(folder))
        graphs = llm.engine.launcher
        found[way] = {"start_s": round(time.perf_counter() - begun_s, 1)}
        if isinstance(graphs, CudaGraphs):
            found[way] |= {"graphs": str(graphs.memory), "capturing_s": round(graphs.seconds, 2)}
        print(json.dumps({way: found[way]}), flush=True)
        found[way]["alone"] = alone(llm)
        print(json.dumps({way: found[way]["alone"]}), flush=True)
        found[way]["passes"] = passes(llm, args.rows, args.input, args.output, args.passes)
        for each in found[way]["passes"]:
            print(json.dumps({way: each}), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        llm.engine.release()
        del llm, graphs
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 0


def _engine(args: Any, way: str, folder: Path) -> LLM:
    target, head = (args.model, args.draft) if args.model else preset(args.preset)
    if args.layers and not args.model:
        config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
        cut = folder / "cut"
        cut.mkdir()
        (cut / "config.json").write_text(json.dumps(config | {"num_hidden_layers": args.layers}), encoding="utf-8")
        target = str(cut)
    drafts: dict[str, Any] = {"draft": None}
    if way == "auto":
        drafts = {"draft": head, "speculative_policy": "auto", "simulate_acceptance": args.profile}
    return LLM(
        target,
        device=args.device,
        graphs=args.graphs,
        max_running_requests=args.rows,
        context_length=2 * args.input,
        check_level=0,
        load_format="auto" if args.model else "dummy",
        prefill_graph_max_tokens=args.largest,
        exactness=args.exactness,
        **drafts,
    )


if __name__ == "__main__":
    end_with(main)
