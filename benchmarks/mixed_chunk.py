"""Served throughput with prompts in the round and without, paired: one engine, equal requests, modes in turn.

    python benchmarks/mixed_chunk.py --out build/mixed.json                       an 8B model's shape, on a GPU, plain
    python benchmarks/mixed_chunk.py --shape 3,1,4 --clients 32 --out build/mixed_chains.json
    python benchmarks/mixed_chunk.py --model builtin:nestling --draft builtin:nestling-eagle3 --device cpu \
        --clients 4 --input 32 --output 16 --rows 4 --out /tmp/mixed.json

Clients each send their next request when they have their answer. With a shape acceptance is drawn from `--profile`, so
that no weights are needed. Modes: `off` is the engine with its mixed steps switched off, so it has the same memory and
graphs; `eager` has them launched one by one; `captured` in the graphs of rounds, as `--mixed-chunk on` is; `auto`.
First steps alone, on the null page, at so many rows: milliseconds until the host has launched one and until the device
has ended it, of a round, of prefills, and of mixed steps of both kinds by their prompt tokens.
JSON: `alone`; `cells`, as `served_shapes.py` has them, with `mode`; and `steps`, the medians of seconds, as the host
saw them: of rounds by rows, of prefill steps by prompt tokens, of captured mixed ones by (rows, size), else (0, 0).
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from frame import NAMES, end_with, parser_of, preset
from served_shapes import Served, name_of

from treetop import LLM
from treetop.bench.provenance import versions
from treetop.engine.prefill import PrefillBatch, prefill
from treetop.engine.prompt_blocks import block_numbers
from treetop.engine.rounds import RoundKey, mixed_verify
from treetop.engine.startup.profile_run import dummy_batch
from treetop.engine.startup.self_test import on_null_pages
from treetop.scheduler.mixed import MixedSteps
from treetop.types.ids import Row
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import Chunk
from treetop.types.sampling import SamplingMode

_TURNS = ("off", "captured", "auto", "eager", "captured", "off")
_SIZES = (128, 256, 512, 1024, 2048)


def alone(llm: LLM, rows: int, shape: SpecShape, tokens: int) -> dict[str, tuple[float, float]]:
    """Milliseconds, of the host and until the end, of steps at `rows` rows behind `tokens` tokens: medians."""
    engine, runner, layout = llm.engine, llm.engine.runner, llm.engine.layout
    key, bound = RoundKey(layout.coarse_bucket_for(rows), shape, SamplingMode.GREEDY), layout.max_committed
    last = layout.max_requests - 1

    def batch(width: int) -> PrefillBatch:
        made = dummy_batch(runner, SamplingMode.GREEDY, 1, width)
        made.rows.fill_(last)  # its draft rows are the same memory
        made.query_len.fill_(width)
        return made

    def eager(width: int) -> Callable[[], object]:
        chunk = batch(width)
        between = partial(mixed_verify, runner, chunk, key, bound)
        return partial(engine.launcher.launch, RoundKey.of_mixed(key.bucket, shape), bound, between)

    def captured(size: int) -> Callable[[], object]:
        chunk = Chunk(Row(last), tokens, (0,) * size, None)
        numbers = block_numbers([chunk], size, layout.prompt_block, layout.dummy_row)
        runner.buffers.prompts.write(size, layout.prompt_block, runner.buffers.rows.new_tensor(numbers))
        return partial(engine.launcher.launch, replace(key, prompts=size, block=layout.prompt_block), bound)

    def apart(width: int) -> Callable[[], object]:
        return partial(prefill, runner, batch(width))

    def plainly(_: int) -> Callable[[], object]:
        return partial(engine.launcher.launch, key, bound)

    steps: dict[str, tuple[Callable[[int], Callable[[], object]], int]] = {"round": (plainly, 0)}
    wide = [size for size in _SIZES if size + tokens < layout.max_context]
    steps |= {f"prefill {size}": (apart, size) for size in wide}
    steps |= {f"eager {size}": (eager, size) for size in wide}
    steps |= {f"captured {size}": (captured, size) for size in layout.prompt_sizes if size in wide}
    found = dict[str, tuple[float, float]]()
    with torch.inference_mode(), on_null_pages(runner):
        for name, (make, size) in steps.items():
            run, times = make(size), list[tuple[float, float]]()
            for _ in range(7):
                listed = [*range(rows)] + [layout.dummy_row] * (key.bucket - rows)
                row_lists = runner.buffers.row_lists
                row_lists[:, : key.bucket].copy_(row_lists.new_tensor(listed))
                row_lists[row_lists == last] = layout.dummy_row
                runner.state.committed[: layout.max_requests] = tokens
                wait(runner.buffers.rows.device)
                started_s = time.perf_counter()
                run()
                launched_s = time.perf_counter()
                wait(runner.buffers.rows.device)
                times.append((launched_s - started_s, time.perf_counter() - started_s))
            host, end = zip(*times[2:], strict=True)
            found[name] = round(1e3 * median(host), 2), round(1e3 * median(end), 2)
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0], help="shape, with random weights")
    parser.add_argument("--model", help="a target with weights instead")
    parser.add_argument("--draft", help="its head")
    parser.add_argument("--profile", default="builtin:llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="0,1,1", help="of rounds, S,k,T")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.1, help="of lengths around their means")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1, help="requests of a client that count")
    parser.add_argument("--tokens", type=int, help="prompt tokens of every step beside rounds")
    parser.add_argument("--seconds", type=float, default=480.0, help="no cell is begun after so many")
    parser.add_argument("--modes", nargs="+", choices=("off", "eager", "captured", "auto"), default=_TURNS)
    parser.add_argument("--alone", action="store_true", help="time steps alone first")
    parser.add_argument("--graphs", choices=("auto", "sim", "off"), default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON that is written")
    args = parser.parse_args(arguments)
    started_s, shape = time.perf_counter(), SpecShape.parse(args.shape, "--shape")
    target, head = (args.model, args.draft) if args.model else preset(args.preset)
    tree: dict[str, Any] = {"speculative_policy": "fixed"}
    if shape != PLAIN:
        tree |= {
            "draft": head,
            "simulate_acceptance": args.profile,
            "speculative_num_steps": shape.num_steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.num_draft_tokens,
        }
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
        llm = LLM(
            target,
            device=args.device,
            max_running_requests=args.rows,
            context_length=2 * (args.input + args.output),
            disable_radix_cache=True,
            check_level=0,
            load_format="auto" if args.model else "dummy",
            mixed_chunk="on",
            graphs=args.graphs,
            prefill_tokens_per_round=args.tokens,
            **tree,
        )
    layout, device, scheduler = llm.engine.layout, llm.engine.runner.buffers.rows.device, llm.scheduler
    budget = scheduler.mixing.budget
    by_mode = {
        "off": MixedSteps(layout, "off", budget),
        "eager": MixedSteps(replace(layout, prompt_sizes=()), "on", budget),
        "captured": MixedSteps(layout, "on", budget),
        "auto": MixedSteps(layout, "auto", budget),
    }
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "start_s": round(time.perf_counter() - started_s, 1),
        "shape": name_of(shape),
        "cells": [],
    }
    for rows in args.clients if args.alone else ():
        found.setdefault("alone", {})[rows] = times = alone(llm, min(rows, args.rows), shape, args.input // 2)
        print(json.dumps({"rows": rows, "alone": times}), flush=True)
    served = Served(llm, args.input, args.output, args.spread)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for clients in args.clients:
        for mode in args.modes:
            if time.perf_counter() - started_s > args.seconds:
                print("time is over", flush=True)
                return 0
            scheduler.mixing = by_mode[mode]
            cell = {
                "mode": mode,
                **served.cell(clients, name_of(shape), args.turns if clients > 16 else 3 * args.turns),
            }
            found["cells"].append(cell)
            rows = layout.bucket_for(clients)
            found["steps"] = {
                "rounds": {rows: budget.rounds.seconds(rows)},
                "apart": {size: by_mode["auto"].apart.seconds(size) for size in _SIZES},
                "mixed": {f"{kind}": each.seconds(1) for kind, each in by_mode["auto"].together.items()},
            }
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(json.dumps(cell), flush=True)
        print(json.dumps({"clients": clients, **found["steps"]}), flush=True)
    return 0


if __name__ == "__main__":
    end_with(main)
