"""Servers over HTTP whose processes are struck: one prefills for another that decodes.

Two `treetop serve` of `--ranks` ranks each, which share experts, or a model with `--kind tp`, and draft with MTP.
Clients ask for completions of random prompts without end and leave some. Every `--every` seconds or so a rank of
either, or all of the prefill worker's, is killed, or stopped for a while. While the decode worker starts, three of four
strikes are left out.

Then all requests that were alive at a strike, and a random sample of the others, are answered again by one engine of
one rank that has seen nothing. An error is a failure, unless the request was the one that an engine was tried with when
it died (docs/serving.md).

With `--device cuda` the prefill worker has the first GPUs, the decode worker the next. `pause_s` is the longest gap of
each stream from its first strike on, in seconds, by the worst strike that it met; `memory_mib` is resident, of the
server and its ranks.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from soaks.common import (
    LEASE_S,
    MOST_FAILURES,
    Answered,
    Summary,
    alone,
    compare,
    config_of,
    random_params,
    random_prompt,
    save_tiny,
)
from treetop import LLM, SamplingParams
from treetop.bench.http_client import Address, HttpClient, HttpError
from treetop.types.config import EngineConfig
from treetop.types.kv_transfer.options import Mode
from treetop.types.options import options_of
from treetop_debug.servers import CompletionClient, is_up, metrics, processes_of, workers

LEAST = (("seconds", 1), ("every", 0.1), ("stopped_seconds", 0.1), ("clients", 1), ("ranks", 2))
ROLES: tuple[Mode, ...] = ("prefill", "decode")
RANKS = {"ep": ("engine_process",), "tp": ("engine_process", "tp_worker")}
"""Modules that a server's ranks run."""
ON_TRIAL = "the engine ended twice with this request, which is not tried again"
"""The one error that a kill of the decode worker may cost."""
SENT = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "ignore_eos", "seed")
IDLE = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("kv_transfer_num_requests_in_flight", "kv_transfer_num_slots_busy"),
)
"""Metrics that are 0 once nothing is held; the prefix cache's pages are not in them."""
WORST_FIRST = ("decode killed", "decode stopped", "prefill killed", "prefill stopped")
LEAVE_CHANCE = 0.15
PATIENCE_S = 300.0
"""After which a request, or a server that is to become idle, hangs."""


@dataclass(frozen=True, slots=True)
class Strike:
    """role: of the server. what: a rank of it, or all. how: killed or stopped. up: whether the decode worker served."""

    role: Mode
    what: str
    how: str
    at_s: float
    up: bool

    @property
    def kind(self) -> str:
        """What its streams wait for: a worker that starts is one that was killed."""
        return f"{self.role} {self.how}" if self.up else "decode killed"


@dataclass(slots=True, eq=False)
class Live(Answered):
    """A request, and what has come of it. event_s: when tokens came. strikes: while it was alive."""

    event_s: list[float] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)

    @property
    def met(self) -> str:
        return ", which met " + (", ".join(f"{each.what} {each.how}" for each in self.strikes) or "no strike")


@dataclass(slots=True, kw_only=True)
class KillsSummary(Summary):
    """handed_over, local: requests of the decode worker as its metrics tell them, with and without the other's prefill;
    what it did just before a kill may not have been told. aborted: by clients that left.
    """

    strikes: dict[str, int] = field(default_factory=dict)
    met_a_strike: int = 0
    handed_over: int = 0
    local: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    pause_s: dict[str, dict[str, float]] = field(default_factory=dict)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)


class SoakKills:
    """Drives two workers as clients would, and strikes them."""

    def __init__(
        self,
        servers: dict[Mode, CompletionClient],
        args: argparse.Namespace,
        params: Callable[[], SamplingParams],
        vocab: int,
    ) -> None:
        self._servers, self._args, self._params, self._vocab = servers, args, params, vocab
        self.summary, self._rng = KillsSummary(seed=args.seed), random.Random(args.seed)
        self._connection = HttpClient(Address.of(servers["decode"].url), None)
        self._live: set[Live] = set()
        self.finished: list[Live] = []
        self._strikes: list[Strike] = []
        self._errors: Counter[str] = Counter()
        self._stopped: set[asyncio.Task[None]] = set()

    async def run(self) -> KillsSummary:
        """For `--seconds`, then until all requests have ended and nothing is held."""
        begun, done = time.perf_counter(), self.summary
        until_s = begun + self._args.seconds
        counting = asyncio.create_task(self._count())
        striking = asyncio.create_task(self._strike_now_and_then(until_s))
        await asyncio.gather(striking, *(self._ask_until(until_s) for _ in range(self._args.clients)))
        await asyncio.gather(*self._stopped)
        await self._settle()
        counting.cancel()
        await self._sum_up()
        await self._connection.close()
        done.elapsed_s = round(time.perf_counter() - begun, 1)
        return done

    def compare(self, fresh: LLM, count: int) -> None:
        """Answer all that met a strike, and so many of the others, again on an engine that has seen nothing."""
        met, others = ([each for each in self.finished if bool(each.strikes) is wanted] for wanted in (True, False))
        compare(self.summary, fresh, [*met, *random.Random(0).sample(others, min(count, len(others)))])

    # ---------------------------------------------------------------- clients

    async def _ask_until(self, until_s: float) -> None:
        while time.perf_counter() < until_s and not self._is_broken:
            live = self._draw()
            leaves = self._rng.random() < LEAVE_CHANCE
            self._live.add(live)
            try:
                async with asyncio.timeout(self._rng.uniform(0, 3) if leaves else PATIENCE_S):
                    await self._ask(live)
            except TimeoutError:
                if leaves:
                    self.summary.aborted += 1
                else:
                    self._failed(f"no end in {PATIENCE_S:g} s")
            except (HttpError, OSError) as error:
                self._failed(f"{type(error).__name__}: {error}")
            else:
                self.finished.append(live)
            self._live.discard(live)

    def _draw(self) -> Live:
        self.summary.arrived += 1
        prompt = random_prompt(self._rng, self._args.context_length, self._vocab, self.finished)
        room, params = self._args.context_length - len(prompt), self._params()  # the API refuses more than has room
        return Live(prompt, replace(params, max_tokens=min(params.max_tokens, room)))

    async def _ask(self, live: Live) -> None:
        body = {"prompt": live.prompt, "stream": True, "return_token_ids": True}
        body |= {name: getattr(live.params, name) for name in SENT}
        async with aclosing(self._connection.events("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    if choice["token_ids"]:
                        live.ids += choice["token_ids"]
                        live.event_s.append(time.perf_counter())
                    live.finish = choice["finish_reason"] or live.finish
        if live.finish is None:
            raise HttpError("a stream ended without a reason")

    def _failed(self, why: str) -> None:
        on_trial = ON_TRIAL in why
        self._errors[ON_TRIAL if on_trial else re.sub(r"\d+", "N", why)] += 1
        if not on_trial:
            self.summary.fail(f"a request failed: {why}")

    # ---------------------------------------------------------------- strikes

    async def _strike_now_and_then(self, until_s: float) -> None:
        rng = self._rng
        while True:
            await asyncio.sleep(self._args.every * rng.uniform(0.5, 1.5))
            if time.perf_counter() >= until_s or self._is_broken:
                return
            aims = self._aims()
            up = await asyncio.to_thread(is_up, self._servers["decode"].url)
            if aims and (up or rng.random() < 0.25):
                self._strike(*rng.choice(aims), stopped=rng.random() < 0.3, up=up)

    def _aims(self) -> list[tuple[Mode, str, list[int]]]:
        """What may be struck: role, name, process ids."""
        found: list[tuple[Mode, str, list[int]]] = []
        for role in ROLES:
            ranks = self._ranks(role)
            found += [(role, f"{role} rank {number}", [pid]) for number, pid in enumerate(ranks)]
            found += [(role, "all prefill ranks", ranks)] if ranks and role == "prefill" else []
        return found

    def _ranks(self, role: Mode) -> list[int]:
        """Process ids, in the order of the ranks."""
        return [pid for module in RANKS[self._args.kind] for pid in processes_of(self._servers[role], module)]

    def _strike(self, role: Mode, what: str, pids: Sequence[int], *, stopped: bool, up: bool) -> None:
        strike = Strike(role, what, "stopped" if stopped else "killed", time.perf_counter(), up)
        for pid in pids:
            with suppress(ProcessLookupError):  # it may have ended since
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        if stopped:
            self._stopped.add(asyncio.create_task(self._go_on(pids)))
        self._strikes.append(strike)
        for live in self._live:
            live.strikes.append(strike)

    async def _go_on(self, pids: Sequence[int]) -> None:
        await asyncio.sleep(self._rng.uniform(0.5, 1) * self._args.stopped_seconds)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # ---------------------------------------------------------------- what servers say

    async def _count(self) -> None:
        """Add up what the decode worker's engines have taken over: each begins with nothing."""
        before: dict[str, float] = {}
        while True:
            now = await self._said("decode")
            for mine, name in (("handed_over", "num_requests_done"), ("local", "num_local_prefills")):
                count = now.get(f"kv_transfer_{name}", 0)
                new = count - before.get(name, 0) if count >= before.get(name, 0) else count
                setattr(self.summary, mine, getattr(self.summary, mine) + round(new))
                before[name] = count
            await asyncio.sleep(0.3)

    async def _settle(self) -> None:
        """Until both workers are up and hold nothing."""
        end = time.perf_counter() + PATIENCE_S
        for role in ROLES:
            while True:
                said = await self._said(role)
                held = {name: said[name] for name in IDLE if said.get(name)}
                up = await asyncio.to_thread(is_up, self._servers[role].url)
                if up and not held:
                    break
                if time.perf_counter() > end:
                    self.summary.fail(
                        f"the {role} worker {f'holds {held}' if up else 'is not up'} after the last request"
                    )
                    break
                await asyncio.sleep(0.3)

    async def _said(self, role: Mode) -> dict[str, float]:
        """The worker's metrics; none if it has ended."""
        with suppress(OSError):
            return await asyncio.to_thread(metrics, self._servers[role].url)
        return {}

    async def _sum_up(self) -> None:
        done, strikes = self.summary, self._strikes
        done.finished, done.tokens = len(self.finished), sum(len(each.ids) for each in self.finished)
        done.met_a_strike = sum(bool(each.strikes) for each in self.finished)
        done.strikes = dict(Counter(f"{each.what} {each.how}" for each in strikes))
        done.errors = dict(self._errors)
        if self._errors[ON_TRIAL] > sum(each.role == "decode" for each in strikes):
            self.summary.fail("more requests than strikes of the decode worker have ended two engines")
        if not done.handed_over:
            self.summary.fail("no request was handed over")
        done.pause_s = pauses(self.finished)
        for role, server in self._servers.items():
            done.restarts[role] = round((await self._said(role)).get("num_engine_restarts", 0))
            done.memory_mib[role] = [resident_mib(pid) for pid in (server.pid, *self._ranks(role))]

    @property
    def _is_broken(self) -> bool:
        return len(self.summary.failures) >= MOST_FAILURES


def pauses(finished: Sequence[Live]) -> dict[str, dict[str, float]]:
    """Median and longest, of streams by the worst that they had met when their longest gap ended."""
    found: dict[str, list[float]] = {}
    for live in finished:
        first_s = live.strikes[0].at_s if live.strikes else float("inf")
        times = [first_s, *(each for each in live.event_s if each > first_s)]
        if len(times) > 1:
            begin, end = max(pairwise(times), key=lambda gap: gap[1] - gap[0])
            met = {each.kind for each in live.strikes if each.at_s < end}
            found.setdefault(next(each for each in WORST_FIRST if each in met), []).append(end - begin)
    return {
        name: {"median": round(statistics.median(each), 3), "longest": round(max(each), 3)}
        for name, each in sorted(found.items())
    }


def resident_mib(pid: int) -> float:
    with suppress(FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return 0.0


def served_options(config: EngineConfig) -> dict[str, Any]:
    """What `treetop serve` is to be told."""
    table, given = options_of(EngineConfig), asdict(config)
    own = {name: value for name, value in given.items() if name in table and value != table[name].default}
    return {
        **{name: value for name, value in own.items() if name != "model"},
        "device": config.device,
        "disaggregation_lease": LEASE_S,
        "engine_restarts": 1000,
        "drain_timeout": 10,
    }


async def soak(args: argparse.Namespace, config: EngineConfig, fresh: LLM) -> SoakKills:
    rng = random.Random(args.seed)
    async with workers(config.model or "", served_options(config), ROLES, second="decode") as servers:
        run = SoakKills(
            servers, args, lambda: replace(random_params(rng, fresh), stop=()), fresh.engine.spec.vocab_size
        )
        await run.run()
        if run.summary.failures:
            for role, server in servers.items():
                print(*(f"{role}: {line}" for line in [*server.said][-40:]), sep="\n", file=sys.stderr)
    return run


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Soak and compare; what is printed."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(args.model) if args.model else save_tiny(Path(folder), args.tiny))
        if args.kind == "tp":
            config = replace(config, ep_size=1, tp_size=args.ranks)
        fresh = LLM(**{**alone(config), "tp_size": 1, "max_total_tokens": 8 * (args.context_length + 64)})
        done = asyncio.run(soak(args, config, fresh))
        done.compare(fresh, args.sample)
    return asdict(done.summary)
