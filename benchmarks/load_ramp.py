"""Whether the shape that the load allows is faster than any fixed one: clients that come and go, over HTTP.

    python benchmarks/load_ramp.py                          the embedded pair, clients 1 2 4 .. 64 .. 4 2 1
    python benchmarks/load_ramp.py --model benchmarks/presets/llama-3.1-8b \
      --draft benchmarks/presets/eagle3-llama-3.1-8b \
      --options " --device cuda --load-format dummy --simulate-acceptance builtin:llama-3.1-8b"

    python benchmarks/load_ramp.py --model .. --draft .. --options " --device cuda --load-format dummy" --turns 1
      --profiles builtin:llama-3.1-8b benchmarks/profiles/mediocre.json benchmarks/profiles/useless.json --seconds 140

Each contender has a `treetop serve` of its own, one at a time: plain decoding, each of `--shapes` in every round, and
`auto` that chooses from these (docs/policy.md), with `--exactness ties` if `--options` has no other, for `auto` differs
with the draft. All get the same requests: of each step as many clients, each of which
sends its next request when it has the answer to the last. Half are greedy. Prompts are pieces of the embedded pair's
held-out texts, or random ids for a model without a tokenizer. `--turns N` times, in alternating order; medians.
With `--profiles` acceptance is drawn from each of these in turn, beside the same plain server. Those of `--without` do
not run. With `--together` all servers are up at once and take each step in turns, so that a machine which is slower
for a while is so for all; they share its memory: give each its part. No server, or no such step, is begun after
`--seconds`, so who comes last may be missing.

One JSON object a line: `run` of each server, or `step` of each step taken in turns; `contender` with its rates of the
whole ramp and of each step, and beside plain's of the same turn; at last `auto` beside plain and the best fixed shape,
of the whole ramp and of each number of clients alone, with 95 % intervals of the mean over paired turns. Of rounds: the
share of rows' rounds without drafts, the mean drafts of the others, and how many of these were accepted. On a CPU also
rates by the processor time of the server's processes, for other work on the machine is no cost of theirs.
"""

import argparse
import asyncio
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frame import end_with, parser_of, say

from treetop.bench.http_client import Address, HttpClient
from treetop.bench.prompts import read_prompts
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device
from treetop.speculative.profile import BUILTIN
from treetop.text.tokenizer import open_tokenizer
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.errors import EngineError, InputError
from treetop.types.layout import SpecShape
from treetop_debug.servers import CompletionClient, descendants, metrics, served

PLAIN, AUTO = "plain", "auto"
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
SHAPES = ("2,1,3", "5,1,6", "5,4,8", "5,4,16")
COUNTED = (
    "inter_token_latency_seconds_count",
    *(f"spec_decode_num_{each}_total" for each in ("drafts", "draft_tokens", "accepted_tokens")),
)
"""Metrics: rounds of rows, those of them with drafts, these drafts, and those that were accepted."""
_IDS = range(3, 1000)
"""Of prompts for a model without a tokenizer."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What as many clients got, what it took, and `COUNTED`."""

    clients: int
    tokens: int
    s: float
    cpu_s: float
    rounds: int
    drafting: int
    drafts: int
    accepted: int


Ramp = Sequence[Step]


def bodies(args: argparse.Namespace, turn: int = 0) -> list[list[list[Body]]]:
    """What each client of each step asks, one request after the other; the first warms up: all clients, one request.

    turn: of servers that have seen the prompts of those before.
    """
    draw, tokenizer = random.Random(args.seed + turn), open_tokenizer(resolve_folder(args.model))
    text = [] if tokenizer is None else [i for ids in read_prompts(None, 64, tokenizer) for i in ids]

    def body(number: int) -> Body:
        length, begin = draw.randint(*args.prompt_tokens), draw.randrange(max(len(text), 1))
        ids = (text[begin:] + text)[:length] if text else draw.choices(_IDS, k=length)
        sampled = {"temperature": 0.7, "seed": number} if number % 2 else {"temperature": 0.0}
        asked = {"prompt": ids, "max_tokens": draw.randint(*args.max_tokens), "ignore_eos": True, **sampled}
        return {**asked, "stream": True, "stream_options": {"include_usage": True}}

    requests = args.requests * (len(args.clients) if len(args.requests) == 1 else 1)
    steps = [(max(args.clients), 1), *zip(args.clients, requests, strict=True)]
    return [[[body(client + n) for n in range(requests)] for client in range(clients)] for clients, requests in steps]


async def answered(server: CompletionClient, asked: Sequence[Body]) -> int:
    """One client's requests, one after the other. Returns its tokens."""
    connection, tokens = HttpClient(Address.of(server.url), None), 0
    for body in asked:
        async with aclosing(connection.events("/v1/completions", body)) as events:
            usage = [event["usage"] async for event in events if event.get("usage")]
        if usage[-1]["completion_tokens"] != body["max_tokens"]:
            raise EngineError(f"an answer has {usage[-1]['completion_tokens']} tokens, not {body['max_tokens']}")
        tokens += body["max_tokens"]
    await connection.close()
    return tokens


def processor_s(server: CompletionClient) -> float:
    """What its processes have used. Linux knows the clock of another process by its id."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in (server.pid, *descendants(server.pid)))


async def step(server: CompletionClient, clients: Sequence[Sequence[Body]]) -> Step:
    def counted() -> list[int]:
        found = metrics(server.url)
        return [int(found[name]) for name in COUNTED]

    before, used_s, began_s = counted(), processor_s(server), time.perf_counter()
    tokens = sum(await asyncio.gather(*(answered(server, asked) for asked in clients)))
    spent = time.perf_counter() - began_s, processor_s(server) - used_s
    return Step(len(clients), tokens, *spent, *(now - then for now, then in zip(counted(), before, strict=True)))


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The options of each one's server."""
    words = shlex.split(args.options)
    given: dict[str, Any] = {"max_running_requests": max(args.clients), "exactness": "ties"}
    for word, value in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            given[word[2:].replace("-", "_")] = True if value.startswith("--") else value
    without = {name: each for name, each in given.items() if not name.startswith(("speculative_", "simulate_"))}
    found = {PLAIN: {**without, "speculative_algorithm": "NONE"}}
    names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    for text in args.shapes:
        shape = SpecShape.parse(text, "--shapes")
        sizes = shape.num_steps, shape.topk, shape.num_draft_tokens
        fixed = {"speculative_policy": "fixed", **dict(zip(names, sizes, strict=True))}
        found[text] = {"draft": args.draft, **given, **fixed}
    chosen = {"speculative_policy": "auto", "speculative_calibration": "learn"}
    found[AUTO] = {"draft": args.draft, **given, **chosen, "speculative_shapes": " ".join(args.shapes)}
    if not args.profiles:
        return found
    # What the first questions need comes first: each head's `auto` and one shape.
    drawn = {PLAIN: found.pop(PLAIN)}
    for first in ((AUTO, args.shapes[0]), args.shapes[1:]):
        for profile in args.profiles:
            drawn |= {of(name, profile): {**found[name], "simulate_acceptance": profile} for name in first}
    return drawn


def of(name: str, profile: str) -> str:
    """A contender with a head of this profile."""
    return f"{name} {Path(profile).stem.removeprefix(BUILTIN)}"


def rate(ramp: Ramp, clock: str) -> float:
    spent: float = sum(getattr(each, clock) for each in ramp)
    return sum(each.tokens for each in ramp) / spent


def ratio(own: Sequence[Ramp], other: Sequence[Ramp], clock: str) -> float:
    """The median over turns."""
    return round(statistics.median(rate(a, clock) / rate(b, clock) for a, b in zip(own, other, strict=True)), 3)


T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Of Student's t, two-sided, by degrees of freedom from 1 on; more count as 9."""


def interval(own: Sequence[Ramp], other: Sequence[Ramp], clock: str) -> list[float] | None:
    """95 % of the mean ratio, by the logarithms of the turns' ratios; None for one turn."""
    logs = [math.log(rate(a, clock) / rate(b, clock)) for a, b in zip(own, other, strict=True)]
    if len(logs) < 2:
        return None
    mean, half = statistics.mean(logs), T_95[min(len(logs), 10) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return [round(math.exp(mean + sign * half), 3) for sign in (-1, 1)]


def beside(runs: Mapping[str, Sequence[Ramp]], shapes: Sequence[str], clock: str) -> dict[str, Any]:
    """`auto` beside plain, and beside the fixed shape, or plain, that is best in the median."""
    plain, auto = runs[PLAIN], runs[AUTO]
    best = max((PLAIN, *shapes), key=lambda name: ratio(runs[name], plain, clock))
    return {
        "best_fixed": best,
        "auto_over_best_fixed": ratio(auto, runs[best], clock),
        "best_fixed_95": interval(auto, runs[best], clock),
        "auto_over_plain": ratio(auto, plain, clock),
        "plain_95": interval(auto, plain, clock),
    }


def loads(runs: Mapping[str, Sequence[Ramp]], clients: Sequence[int], shapes: Sequence[str], clock: str) -> Any:
    """The same of each number of clients, on the way up and down together."""
    found = []
    for count in sorted(set(clients)):
        at = [i for i, each in enumerate(clients) if each == count]
        own = {name: [[ramp[i] for i in at] for ramp in each] for name, each in runs.items()}
        found.append({"clients": count, **beside(own, shapes, clock)})
    return found


def figures(own: Sequence[Ramp], plain: Sequence[Ramp], clocks: Sequence[str]) -> dict[str, Any]:
    """Of one contender, the whole ramp or a part of it."""

    def total(of: Callable[[Step], int]) -> int:
        return sum(of(each) for ramp in own for each in ramp)

    found: dict[str, Any] = {}
    for clock in clocks:
        found[f"tokens_per_{clock}"] = round(statistics.median(rate(ramp, clock) for ramp in own), 1)
        found[f"over_plain_by_{clock}"] = ratio(own, plain, clock)
    drafting = total(lambda each: each.drafting)
    found["plain_share"] = round(1 - drafting / max(total(lambda each: each.rounds), 1), 3)
    if drafting:
        found["mean_drafts"] = round(total(lambda each: each.drafts) / drafting, 2)
        found["mean_accepted"] = round(total(lambda each: each.accepted) / drafting, 2)
    return found


def told(each: Step) -> dict[str, float]:
    return {key: round(value, 3) for key, value in asdict(each).items()}


async def apart(args: argparse.Namespace, options: Mapping[str, Any], until_s: float) -> dict[str, list[Ramp]]:
    """A server after the other."""
    asked, runs = bodies(args), dict[str, list[Ramp]]((name, []) for name in options)
    for turn in range(args.turns):
        for name in list(options)[:: -1 if turn % 2 else 1]:
            if time.perf_counter() > until_s:
                break
            async with served(args.model, options[name]) as server:
                ramp = [await step(server, clients) for clients in asked][1:]
            runs[name].append(ramp)
            start_s, steps = round(server.start_s, 1), [*map(told, ramp)]
            say({"part": "run", "turn": turn, "contender": name, "start_s": start_s, "steps": steps})
    return runs


async def together(args: argparse.Namespace, options: Mapping[str, Any], until_s: float) -> dict[str, list[Ramp]]:
    """All servers at once, each step on one after the other. A turn that time cuts off does not count."""
    runs = dict[str, list[Ramp]]((name, []) for name in options)
    warm_up = bodies(args)[0]
    async with AsyncExitStack() as stack:
        servers = dict[str, CompletionClient]()
        for name in sorted(options, key=lambda name: not name.startswith(AUTO)):  # others find what it compiled
            servers[name] = await stack.enter_async_context(served(args.model, options[name]))
            await step(servers[name], warm_up)
            say({"part": "start", "contender": name, "start_s": round(servers[name].start_s, 1)})
        for turn in range(args.turns):
            ramps = dict[str, list[Step]]((name, []) for name in options)
            for number, clients in enumerate(bodies(args, turn)[1:]):
                for name in list(options)[:: -1 if (turn + number) % 2 else 1]:
                    if time.perf_counter() > until_s:
                        return runs
                    ramps[name].append(await step(servers[name], clients))
                    say({"part": "step", "turn": turn, "contender": name, **told(ramps[name][-1])})
            for name, ramp in ramps.items():
                runs[name].append(ramp)
    return runs


async def run(args: argparse.Namespace) -> None:
    options, until_s = contenders(args), time.perf_counter() + args.seconds
    others = {*options} - {PLAIN}
    if unknown := {*args.without} - others:
        raise InputError(f"--without {shlex.join(sorted(unknown))}: may name {shlex.join(sorted(others))}")
    options = {name: each for name, each in options.items() if name not in args.without}
    runs = await (together if args.together else apart)(args, options, until_s)
    full = len(runs[PLAIN])  # turns that count
    if not full:
        raise EngineError(f"--seconds {args.seconds:g}: over before plain decoding had one turn")
    runs = {name: own[:full] for name, own in runs.items() if len(own) >= full}
    plain = runs[PLAIN]
    device = compute_device(options[PLAIN].get("device", "auto"))
    clocks = ("s", "cpu_s") if device.type == "cpu" else ("s",)
    for name, own in runs.items():
        steps = []
        for i, count in enumerate(args.clients):
            own_step, plain_step = ([ramp[i : i + 1] for ramp in each] for each in (own, plain))
            steps.append({"clients": count, **figures(own_step, plain_step, clocks)})
        tokens = sum(each.tokens for each in own[0])
        say(
            {
                "part": "contender",
                "contender": name,
                "tokens": tokens,
                "ramp": figures(own, plain, clocks),
                "steps": steps,
            }
        )
    for profile in args.profiles or [None]:
        names = {name: name if profile is None else of(name, profile) for name in (AUTO, *args.shapes)}
        of_head = {PLAIN: plain, **{name: runs[key] for name, key in names.items() if key in runs}}
        if AUTO not in of_head:
            continue
        shapes = [name for name in args.shapes if name in of_head]
        found: dict[str, Any] = {} if profile is None else {"profile": profile}
        for clock in clocks:
            found[f"by_{clock}"] = {
                **beside(of_head, shapes, clock),
                "loads": loads(of_head, args.clients, shapes, clock),
            }
        say({"part": "auto", "turns": full, **found})


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL, metavar="FOLDER")
    parser.add_argument("--draft", metavar="FOLDER", help="its head; the embedded model has its own")
    parser.add_argument("--options", default="", metavar="FLAGS", help="of every server")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="S,k,T")
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, metavar="N", help="at a time, of each step")
    parser.add_argument("--requests", nargs="+", type=int, default=[2], metavar="N", help="of each client, by step")
    parser.add_argument("--prompt-tokens", nargs=2, type=int, default=(16, 256), metavar=("LO", "HI"))
    parser.add_argument("--max-tokens", nargs=2, type=int, default=(16, 96), metavar=("LO", "HI"), help="of an answer")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--profiles", nargs="+", default=[], metavar="P", help="of heads, as --simulate-acceptance has")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="CONTENDER", help="'5,4,16 useless', as its lines say"
    )
    parser.add_argument("--together", action="store_true", help="all servers at once, step by step in turns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no server, or step, is begun after so many")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.draft = args.draft or (BUILTIN_DRAFT if args.model == BUILTIN_MODEL else None)
    if len(args.requests) not in (1, len(args.clients)):
        raise InputError(f"--requests: one number, or as many as --clients has, {len(args.clients)}")
    if min(*args.clients, *args.requests, args.turns, args.prompt_tokens[0], args.max_tokens[0]) < 1:
        raise InputError("every number must be at least 1")
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    end_with(main)
