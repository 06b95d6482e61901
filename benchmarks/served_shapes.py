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

With `--in-turns`, on a CPU, `auto` runs beside plain decoding of an engine without a draft: one step of the one, one of
the other, on equal requests, so that a machine with other work is as slow for both. `turns` has for each load and kind
of step how many there were, and lower quartiles of milliseconds of processor time in the target's model and around it,
which no other work has disturbed. `plain_over_auto` is the time of all steps by these; what the target's model takes is
that of plain decoding in both where it does the same, for where an engine's weights lie decides some percent of it.
Give it OMP_NUM_THREADS=1, for the time is of one thread.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from treetop.types.errors import EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import MixedPlan, RoundPlan, StepPlan, prefill_of, round_of
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


class Turns:
    """One engine, a step at a time, on a thread of its own: what steps take is the thread's time.

    spent: by what was launched in a step, seconds in the target's model, and around it.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine, self._scheduler, self._out = llm.engine, llm.scheduler, list[Any]()
        self._thread, self._left, self._in_target = ThreadPoolExecutor(1), list[EngineRequest](), 0.0
        self.spent = defaultdict[str, list[tuple[float, float]]](list)
        for name in ("forward", "logits"):
            setattr(llm.engine.runner.target, name, self._timed(getattr(llm.engine.runner.target, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._in_target += time.thread_time() - begun_s

        return timed

    def begin(self, asked: Sequence[EngineRequest], clients: int) -> None:
        self._left = [*asked]
        self.spent.clear()
        for _ in range(clients):
            self._send()

    def _send(self) -> None:
        if self._left:
            self._scheduler.add(self._left.pop(0))

    def step(self) -> bool:
        """False if nothing is left to do."""
        return self._thread.submit(self._step).result()

    def _step(self) -> bool:
        if not (self._scheduler.has_work or self._out):
            return False
        begun_s, self._in_target, kinds = time.thread_time(), 0.0, list[str]()
        while (plan := self._scheduler.plan()) is not None:
            kinds.append(_kind(plan))
            self._out.append((plan, self._engine.launch(plan)))
        plan, step = self._out.pop(0)
        updates = self._scheduler.commit(plan, self._engine.collect(step))
        around_s = time.thread_time() - begun_s - self._in_target
        self.spent[" + ".join(kinds)].append((self._in_target, around_s))
        for update in updates:
            if update.error is not None:
                raise EngineError(update.error)
            if update.finish_reason is not None:
                self._send()
        return True

    def told(self) -> dict[str, list[float]]:
        """Of each kind how many steps, and lower quartiles of milliseconds in the target and around it."""
        return {
            kind: [len(times), *(round(1e3 * lower_quartile(part), 3) for part in zip(*times, strict=True))]
            for kind, times in sorted(self.spent.items(), key=lambda kind: -sum(map(sum, kind[1])))
        }


def _kind(plan: StepPlan) -> str:
    round, prompt, words = round_of(plan), prefill_of(plan), list[str]()
    if prompt is not None:
        drafting = len(prompt.chunks) - len(prompt.no_draft)
        words.append(f"prefill of {len(prompt.chunks)}; {drafting} with a draft")
    if round is not None:
        drafting = len(round.rows) - len(round.no_draft)
        words.append(f"{round.shape.text} of {len(round.rows)}; {drafting} with a draft")
        words += ["behind a catch-up"] * round.catches_up
    return ", ".join(words)


def lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def in_turns(plain: Turns, auto: Turns, clients: int, args: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Equal requests, each client's next when one has its answer; those of `_WARM_UP` of each do not count."""
    for count in (_WARM_UP * clients, args.turns * clients):
        params = SamplingParams(max_tokens=args.output, ignore_eos=True)
        prompts = random_prompts(count, args.input, vocab)
        asked = [EngineRequest(RequestId(i), tuple(ids), params, i) for i, ids in enumerate(prompts)]
        for each in (plain, auto):
            each.begin(asked, clients)
        while plain.step() | auto.step():
            pass
    of_plain, of_auto = plain.told(), auto.told()
    in_target = {kind.split(";")[0]: target for kind, (_, target, _) in of_plain.items()}
    plain_ms = sum(count * (target + around) for count, target, around in of_plain.values())
    auto_ms = sum(
        count * (in_target.get(kind.split(";")[0], target) + around)
        for kind, (count, target, around) in of_auto.items()
    )
    ratio = round(plain_ms / auto_ms, 4)
    return {"clients": clients, "plain_over_auto": ratio, PLAIN_WAY: of_plain, AUTO: of_auto}


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
    parser.add_argument("--in-turns", action="store_true", help="`auto` and an engine without a draft, step by step")
    parser.add_argument("--out", type=Path, required=True, help="JSON that is written, and gone on with")
    args = parser.parse_args(arguments)
    if args.in_turns and args.device != "cpu":
        raise InputError("--in-turns compares processor time: --device must be cpu")
    started_s = time.perf_counter()
    found: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"cells": []}
    target, head = (args.model, args.draft) if args.model else preset(args.preset)
    tree = SpecShape.parse(args.tree, "--tree")
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
        common: dict[str, Any] = {
            "device": args.device,
            "max_running_requests": args.rows,
            "context_length": 2 * (args.input + args.output),
            "disable_radix_cache": True,
            "check_level": 0,
            "load_format": "auto" if args.model else "dummy",
        }
        llm = LLM(
            target,
            draft=head,
            speculative_policy="auto",
            speculative_calibration="learn",
            simulate_acceptance=args.profile,
            speculative_num_steps=tree.num_steps,
            speculative_eagle_topk=tree.topk,
            speculative_num_draft_tokens=tree.num_draft_tokens,
            speculative_shapes=args.shapes,
            **common,
        )
        if args.in_turns:
            plain = LLM(target, draft=None, **common)
            both, vocab = (Turns(plain), Turns(llm)), llm.engine.spec.vocab_size
            found["turns"] = [in_turns(*both, clients, args, vocab) for clients in args.clients]
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(*map(json.dumps, found["turns"]), sep="\n", flush=True)
            return 0
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
