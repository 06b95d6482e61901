"""Rounds and served throughput by shape and load, in one process: plain, fixed shapes, and `auto`, on equal requests.

    python benchmarks/served_shapes.py --out build/served_shapes.json            an 8B model's shape, on a GPU
    python benchmarks/served_shapes.py --model builtin:nestling --draft builtin:nestling-eagle3 --device cpu \
        --clients 1 4 --input 32 --output 16 --rows 4 --out /tmp/served.json

One engine has all shapes; acceptance is drawn from `--profile`, so that no weights are needed. First the costs of its
rounds, by shape and rows, as the engine measures them (anew: nothing is read of an earlier start). Then cells: so many
clients, each of which sends its next request when it has its answer, `--turns` requests each that count,
three times as many up to 32 clients, by every way in turn.
`plain` here is plain rounds of this engine, whose prompts the draft reads too. A shape that the engine does not
run at so many rows (`Layout.shapes_at`) has no cell there.

A cell is written as soon as it is known. Started again with the same `--out` the script goes on after the last cell,
and stops before it begins one when `--seconds` are over: so runs of ten minutes add up. JSON: costs, times of rounds
by shape "S,k,T" and rows, and `cells`, with output tokens/s, rounds by shape, and milliseconds to the first token and
between tokens.
"""

import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from frame import NAMES, end_with, parser_of, preset

from treetop import LLM
from treetop.bench.prompts import random_prompts
from treetop.bench.provenance import versions
from treetop.scheduler.policy import FixedShape
from treetop.types.errors import EngineError
from treetop.types.ids import RequestId
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import MixedPlan, RoundPlan, round_of
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams

PLAIN_WAY, AUTO = "plain", "auto"
_WARM_UP = 1
"""Requests of a client before those that count, and one more after them that does not."""


@dataclass(slots=True)
class Stream:
    """One request. sent_s: by the clock; last_s: of its last token, 0 before the first."""

    sent_s: float
    tokens: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class Seen:
    """What clients saw of the requests that count: tokens, and when; seconds. shapes: rounds of each. mixed: of these,
    those with prompts in their forward."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    mixed: int = 0


def name_of(shape: SpecShape) -> str:
    return shape.text


class Served:
    """The engine and its scheduler, driven as a server drives them, without sockets."""

    def __init__(self, llm: LLM, prompt: int, output: int, spread: float) -> None:
        self._engine, self._scheduler, self._auto = llm.engine, llm.scheduler, llm.scheduler.policy
        self._prompt, self._output, self._spread, self._count = prompt, output, spread, 0
        self._vocab = llm.engine.spec.vocab_size

    def cell(self, clients: int, way: str, turns: int) -> dict[str, Any]:
        """One load by one way. turns: requests of each client that count, after `_WARM_UP` of each."""
        shape = PLAIN if way == PLAIN_WAY else None if way == AUTO else SpecShape.parse(way, "--shapes")
        self._scheduler.policy = self._auto if shape is None else FixedShape(shape)
        dice, seen, alive, whose = random.Random(clients), Seen(), dict[RequestId, Stream](), dict[RequestId, int]()
        left = dict.fromkeys(range(clients), 2 * _WARM_UP + turns)
        ended, tokens, begun_s, end_s = 0, 0, 0.0, 0.0

        def send(client: int) -> None:
            left[client] -= 1
            self._count += 1
            asked = RequestId(self._count)
            length = self._about(self._prompt, dice)
            params = SamplingParams(max_tokens=self._about(self._output, dice), ignore_eos=True)
            (ids,) = random_prompts(1, length, self._vocab)
            ids[0] = self._count % self._vocab  # no prefix in common
            self._scheduler.add(EngineRequest(asked, tuple(ids), params, self._count))
            alive[asked], whose[asked] = Stream(time.perf_counter()), client

        def watch(plan: RoundPlan, *_: object) -> None:
            seen.shapes[name_of(plan.shape)] += 1

        for client in range(clients):
            send(client)
        out: list[Any] = []
        while alive:
            while (plan := self._scheduler.plan()) is not None:
                out.append((plan, self._engine.launch(plan)))
                decodes = round_of(plan)
                if decodes is not None:
                    watch(decodes)
                seen.mixed += isinstance(plan, MixedPlan)
            plan, in_flight = out.pop(0)
            updates = self._scheduler.commit(plan, self._engine.collect(in_flight))
            now = time.perf_counter()
            counts = _WARM_UP * clients <= ended < (_WARM_UP + turns) * clients
            begun_s = begun_s or (now if counts else 0.0)
            for update in updates:
                if update.error is not None:
                    raise EngineError(update.error)
                stream = alive[update.request_id]
                if update.new_ids and counts:
                    tokens += len(update.new_ids)
                    (seen.gaps if stream.last_s else seen.first).append(now - (stream.last_s or stream.sent_s))
                    end_s = now
                stream.last_s = now if update.new_ids else stream.last_s
                if update.finish_reason is not None:
                    ended += 1
                    client = whose.pop(update.request_id)
                    del alive[update.request_id]
                    if left[client] > 0:
                        send(client)
        while out:  # steps of rows that have ended
            plan, in_flight = out.pop(0)
            self._scheduler.commit(plan, self._engine.collect(in_flight))
        return {
            "clients": clients,
            "way": way,
            "tokens_per_s": round(tokens / max(end_s - begun_s, 1e-9), 1),
            "first_ms": quantiles(seen.first),
            "gap_ms": quantiles(seen.gaps),
            "rounds": dict(seen.shapes.most_common()),
            "mixed": seen.mixed,
        }

    def runs(self, way: str, clients: int) -> bool:
        """Whether the engine has rounds of a way for so many clients."""
        layout = self._engine.layout
        shapes = layout.shapes_at(layout.bucket_for(min(clients, layout.max_requests)))
        return way in (PLAIN_WAY, AUTO) or SpecShape.parse(way, "--shapes") in shapes

    def _about(self, mean: int, dice: random.Random) -> int:
        return max(round(mean * dice.uniform(1 - self._spread, 1 + self._spread)), 2)


def quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "p50": round(1e3 * statistics.median(ordered), 2),
        "p99": round(1e3 * ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)], 2),
        "max": round(1e3 * ordered[-1], 2),
    }


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0], help="shape, with random weights")
    parser.add_argument("--model", help="a target with weights instead")
    parser.add_argument("--draft", help="its head")
    parser.add_argument("--profile", default="builtin:llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--ways", nargs="+", default=[PLAIN_WAY, "5,4,16", "3,1,4", AUTO])
    parser.add_argument("--shapes", help="that the engine has instead of these, S,k,T or S,k,T,N with a node budget")
    parser.add_argument("--tree", default="5,4,16", help="of which `auto` has the shapes beside")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.1, help="of lengths around their means")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1, help="requests of a client that count")
    parser.add_argument("--repeats", type=int, default=1, help="times of each cell")
    parser.add_argument("--seconds", type=float, default=480.0, help="no cell is begun after so many")
    parser.add_argument("--out", type=Path, required=True, help="JSON that is written, and gone on with")
    args = parser.parse_args(arguments)
    started_s = time.perf_counter()
    found: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"cells": []}
    target, head = (args.model, args.draft) if args.model else preset(args.preset)
    tree = SpecShape.parse(args.tree, "--tree")
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
        llm = LLM(
            target,
            draft=head,
            device=args.device,
            speculative_policy="auto",
            speculative_calibration="learn",
            simulate_acceptance=args.profile,
            speculative_num_steps=tree.num_steps,
            speculative_eagle_topk=tree.topk,
            speculative_num_draft_tokens=tree.num_draft_tokens,
            speculative_shapes=args.shapes,
            max_running_requests=args.rows,
            context_length=2 * (args.input + args.output),
            disable_radix_cache=True,
            check_level=0,
            load_format="auto" if args.model else "dummy",
        )
    costs, device = llm.engine.costs, llm.engine.runner.buffers.rows.device
    assert costs is not None
    found |= {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "start_s": round(time.perf_counter() - started_s, 1),
        "pool_tokens": llm.engine.layout.pool_tokens,
        "costs_ms": [[name_of(each.shape), each.rows, round(1e3 * each.seconds, 3)] for each in costs.rounds],
        "more_us_per_token": [[name_of(e.shape), e.rows, round(1e6 * e.seconds_per_token, 4)] for e in costs.rounds],
        "catch_up_ms": [[each.rows, round(1e3 * each.seconds, 3)] for each in costs.catch_ups],
    }
    served = Served(llm, args.input, args.output, args.spread)
    done = Counter((cell["clients"], cell["way"]) for cell in found["cells"])
    for repeat in range(args.repeats):
        for clients in args.clients:
            for way in args.ways:
                if done[clients, way] > repeat or not served.runs(way, clients):
                    continue
                if time.perf_counter() - started_s > args.seconds:
                    print("time is over: start it again to go on", flush=True)
                    return 0
                turns = args.turns if clients > 32 else 3 * args.turns
                cell = served.cell(clients, way, turns)
                found["cells"].append(cell)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
                print(json.dumps(cell), flush=True)
    return 0


if __name__ == "__main__":
    end_with(main)
