"""Served throughput with prompts in the round and without, paired: one engine, equal requests, turns A B B A.

    python benchmarks/mixed_chunk.py --out build/mixed.json                       an 8B model's shape, on a GPU, plain
    python benchmarks/mixed_chunk.py --shape 3,1,4 --clients 32 --out build/mixed_chains.json
    python benchmarks/mixed_chunk.py --model builtin:nestling --draft builtin:nestling-eagle3 --device cpu \
        --clients 4 --input 32 --output 16 --rows 4 --out /tmp/mixed.json

Clients each send their next request when they have their answer. With a shape acceptance is drawn from `--profile`, so
that no weights are needed. `off` is the engine with its mixed steps switched off, so it has the same memory and graphs.
JSON: `cells`, as `served_shapes.py` has them, with `mode`; and `steps`, the medians of seconds of rounds by rows, of
prefill steps and of mixed ones by prompt tokens, as the host saw them.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from frame import NAMES, end_with, parser_of, preset
from served_shapes import Served, name_of

from treetop import LLM
from treetop.bench.provenance import versions
from treetop.scheduler.mixed import MixedSteps
from treetop.types.config import MixedChunk
from treetop.types.layout import PLAIN, SpecShape

_TURNS: tuple[MixedChunk, ...] = ("off", "on", "on", "off")
_SIZES = (128, 256, 512, 1024, 2048)


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
            prefill_tokens_per_round=args.tokens,
            **tree,
        )
    layout, device, scheduler = llm.engine.layout, llm.engine.runner.buffers.rows.device, llm.scheduler
    budget = scheduler.mixing.budget
    by_mode: dict[MixedChunk, MixedSteps] = {mode: MixedSteps(layout, mode, budget) for mode in ("off", "on")}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "start_s": round(time.perf_counter() - started_s, 1),
        "shape": name_of(shape),
        "cells": [],
    }
    served = Served(llm, args.input, args.output, args.spread)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for clients in args.clients:
        for mode in _TURNS:
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
                "apart": {size: by_mode["off"].apart.seconds(size) for size in _SIZES},
                "mixed": {size: by_mode["on"].together.seconds(size) for size in _SIZES},
            }
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(json.dumps(cell), flush=True)
        print(json.dumps({"clients": clients, **found["steps"]}), flush=True)
    return 0


if __name__ == "__main__":
    end_with(main)
