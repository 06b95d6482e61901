"""All forms of ranks at once: a group that share experts prefills for another, with MTP drafts.

Two groups of `--ranks` ranks each, of one machine: a process a rank, over NIXL, or a thread a rank, copying memory.
Requests come at random, to one decode rank or to all, and some are aborted, wherever they stand. Pools are too small
for the rows, slots too few for the pieces. Each rank accounts for its rows, pages and slots between its steps, and
says what it has done. At half time and at the end nothing runs: nothing may be held, and memory is what it was. A
random sample of what was finished gets the same tokens and accepted lengths from one engine that has seen nothing.

A run of many rounds may be done in parts: `--rounds` with another `--seed` each. `--seconds` ends a part early. With
`--device cuda` prefill ranks have the first GPUs, decode ranks the next, or the same ones if there are no more. Without
--model it is a small model with random weights, of GLM-4.5's kind, or with `--tiny glm-5` of GLM-5.2's, whose attention
is compressed and sparse, or with `--tiny qwen3-next` with gated delta nets. Says on stderr how far it is.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch

from soaks.common import (
    LEASE_S,
    MOST_TIMES,
    Answered,
    Summary,
    alone,
    compare,
    config_of,
    random_params,
    random_prompt,
    save_tiny,
)
from soaks.rank_books import audits
from treetop import LLM, SamplingParams
from treetop.core.wire import ProcessOptions
from treetop.distributed.background import BackgroundClient
from treetop.distributed.remote_engine import RankLink
from treetop.types.config import EngineConfig
from treetop.types.errors import InvariantError
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import SECRET_VARIABLE, DisaggregationOptions, parse_address
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.patching import instead, replaced

LEAST = (("rounds", 1), ("seconds", 0), ("ranks", 2))
PHASES = ((0,), (0, 1), (1, 0, 0), (1,), (0, 1, 1), (0, 1))
"""Decode ranks, modulo their number, among which a phase spreads its requests."""
LOADS = (1, 2, 4, 6, 10)
"""Live requests that a phase aims at."""
SILENCE_S = 120.0
"""After which nothing will come any more."""
SLACK_BYTES = {"resident": 48 << 20, "allocated": 1 << 20}
"""Growth of a rank's memory from half time to the end that is no leak; threads share one process."""


@dataclass(slots=True, kw_only=True)
class RolesSummary(Summary):
    """rounds: of the decode group, each with all of its ranks. idle_rounds: with a rank that had no rows in them;
    likewise of prefill steps. local: requests that were not handed over, or not to their end.
    """

    rounds: int = 0
    idle_rounds: int = 0
    prefills: int = 0
    idle_prefills: int = 0
    exports: int = 0
    imports: int = 0
    audits: int = 0
    handed_over: int = 0
    local: int = 0
    megabytes: float = 0.0


@dataclass(slots=True, eq=False)
class Live(Answered):
    """A request, and what has come of it. rounds: lengths accepted in each, of all that it ran."""

    rounds: list[int] = field(default_factory=list)
    given_up: bool = False


class Group:
    """Ranks with a role. said: the last words of each rank, by its file."""

    def __init__(self, config: EngineConfig, disaggregation: DisaggregationOptions, folder: Path) -> None:
        self.folder = folder
        self.thread = BackgroundClient(ProcessOptions("", config, disaggregation=disaggregation))
        self.core, self.size = self.thread.core, config.ep_size

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]

    def faults(self) -> list[str]:
        """What ranks found wrong in their books."""
        return [file.read_text() for file in sorted(self.folder.glob("*.fault"))]

    def count(self, name: str) -> int:
        return sum(said["counts"].get(name, 0) for said in self.said())

    def idle(self) -> list[dict[str, Any]]:
        """What all ranks say once nothing runs, nothing is held, and all have been in the same steps."""
        end, begun = time.monotonic() + SILENCE_S, time.time()
        while True:
            if self.core.failure is not None:
                raise self.core.failure
            said = self.said()
            fresh = [file.stat().st_mtime > begun for file in self.folder.glob("*.json")]
            if len(said) == self.size and all(fresh) and all(each["idle"] for each in said):
                steps = {tuple(each["counts"].get(name, 0) for name in ("rounds", "prefills")) for each in said}
                if len(steps) == 1:
                    return said
            if time.monotonic() > end:
                raise InvariantError(f"something is held {SILENCE_S:g} s after the last request has ended: {said}")
            time.sleep(0.05)


class SoakRoles:
    """Drives a decode group as its clients would."""

    def __init__(self, prefill: Group, decode: Group, params: Callable[[random.Random], SamplingParams], seed: int):
        self.prefill, self.decode, self._params = prefill, decode, params
        self.summary, self._rng = RolesSummary(seed=seed), random.Random(seed)
        self._thread = decode.thread
        self._heard: SimpleQueue[list[RequestUpdate]] = SimpleQueue()
        self._live: dict[RequestId, Live] = {}
        self.finished: list[Live] = []
        self._favoured: tuple[int, ...] = (0,)
        decode.core.engines[0].place = self._place
        self._vocab, self._context = decode.core.info.vocab_size, decode.core.info.max_context

    def run(self, rounds: int, seconds: float = float("inf")) -> RolesSummary:
        """Until the decode group has run so many rounds, or for so long, with an idle moment at half time."""
        begun, done = time.monotonic(), self.summary
        try:
            half = self._soak(rounds // 2, begun + seconds / 2)
            self._tell("half time", begun)
            end = self._soak(rounds, begun + seconds)
            self._tell("end", begun)
            self._compare_memory(half, end)
            self._sum_up(end)
        except Exception as error:  # a probe, a lost page, a rank that died: all end a soak
            self.summary.fail(f"after {self._rounds()} rounds: {type(error).__name__}: {error}")
            for fault in (*self.prefill.faults(), *self.decode.faults()):  # the error may be another rank's
                self.summary.fail(fault)
        done.elapsed_s = round(time.monotonic() - begun, 1)
        self._thread.close()
        return done

    def _tell(self, what: str, begun: float) -> None:
        rounds, took = self._rounds(), time.monotonic() - begun
        print(f"{what}: {rounds} rounds, {self.summary.finished} requests, {took:.0f} s", file=sys.stderr)

    def compare(self, fresh: LLM, count: int) -> None:
        """Answer a sample of the finished requests again on an engine that has seen nothing."""
        sample = random.Random(0).sample(self.finished, min(count, len(self.finished)))
        compare(self.summary, fresh, sample)

    def _soak(self, rounds: int, until_s: float) -> list[dict[str, Any]]:
        """Change the load every now and then; then let everything drain. Returns the last words of all ranks.

        Threads say which rounds run, what is handed over and whether a request ends before it is given up: it goes on
        past `rounds` until each has happened, but not for ever.
        """
        rng, load, change = self._rng, 1, 0
        while time.monotonic() < until_s:
            now = self._rounds()
            if now >= rounds and (self._has_met_all or now >= MOST_TIMES * rounds):
                break
            if self.prefill.core.failure is not None:  # decode ranks would go on without
                raise self.prefill.core.failure
            if now >= change:
                load, self._favoured, change = rng.choice(LOADS), rng.choice(PHASES), now + rng.randrange(5, 40)
            for _ in range(8):  # updates between two looks at the books
                if len(self._live) < load and rng.random() < 0.5:
                    self._arrive(rng.randint(1, load - len(self._live)))
                if self._live and rng.random() < 0.04:
                    self._abort(rng.choice([*self._live]))
                self._hear()
        for _ in range(MOST_TIMES):
            self._arrive(1)
            self._abort(next(reversed(self._live)))
            while self._live:
                self._hear()
            if self.summary.aborted:
                break
        return [*self.prefill.idle(), *self.decode.idle()]

    @property
    def _has_met_all(self) -> bool:
        """Whether a rank was without rows in a round, and a request was handed over."""
        handed_over = any(said["kv_transfer"]["num_requests_done"] for said in self.decode.said())
        return handed_over and self.decode.count("idle_rounds") > 0

    def _place(self, request: EngineRequest, engine: int) -> RankLink:
        """Of the decode group, whose client asks."""
        return self.decode.core.engines[0].links[self._rng.choice(self._favoured) % self.decode.size]

    def _rounds(self) -> int:
        """Of the decode group, so far."""
        return self.decode.count("rounds") // self.decode.size

    def _arrive(self, count: int) -> None:
        for _ in range(count):
            prompt = random_prompt(self._rng, self._context, self._vocab, self.finished)
            live = Live(prompt, self._params(self._rng))
            asked = EngineRequest(self._thread.next_id(), tuple(prompt), live.params, live.params.seed or 0)
            self._live[asked.request_id] = live
            self.summary.arrived += 1
            self._thread.submit([asked], self._heard.put)

    def _abort(self, request_id: RequestId) -> None:
        self._live[request_id].given_up = True
        self._thread.abort([request_id])

    def _hear(self) -> None:
        if not self._live:
            return
        try:
            updates = self._heard.get(timeout=SILENCE_S)
        except Empty:
            raise InvariantError(f"nothing has come for {SILENCE_S:g} s; {len(self._live)} requests wait") from None
        for update in updates:
            live = self._live[update.request_id]
            live.ids += update.new_ids
            live.rounds += [] if update.accept_len is None else [update.accept_len]
            if update.error is not None:
                raise InvariantError(f"a request failed: {update.error}")
            if update.finish_reason is not None:
                del self._live[update.request_id]
                self._ended(live, update)

    def _ended(self, live: Live, update: RequestUpdate) -> None:
        if update.finish_reason == "abort":
            if not live.given_up:
                raise InvariantError("a request was aborted that nobody had given up")
            self.summary.aborted += 1
            return
        assert update.stats is not None
        if not update.stats.num_retractions:  # after one, rounds begin anew, and are others
            live.accept_lens = live.rounds
        self.summary.finished += 1
        self.summary.tokens += len(live.ids)
        self.finished.append(live)

    def _sum_up(self, end: list[dict[str, Any]]) -> None:
        done, size = self.summary, self.decode.size
        decode = [each for each in end if each["mode"] == "decode"]
        prefill = [each for each in end if each["mode"] == "prefill"]
        added: Counter[str] = Counter()
        for each in decode:
            added.update(each["counts"])
        done.rounds, done.imports = added["rounds"] // size, added["imports"]
        done.idle_rounds = added["idle_rounds"] // max(size - 1, 1)
        for each in prefill:
            added.update({f"p_{name}": count for name, count in each["counts"].items()})
        done.prefills, done.exports = added["p_prefills"] // self.prefill.size, added["p_exports"]
        done.idle_prefills = added["p_idle_prefills"] // max(self.prefill.size - 1, 1)
        done.audits = added["audits"] + added["p_audits"]
        done.handed_over = sum(each["kv_transfer"]["num_requests_done"] for each in decode)
        done.local = sum(each["kv_transfer"]["num_local_prefills"] for each in decode)
        done.megabytes = round(sum(each["kv_transfer"]["num_bytes"] for each in decode) / 1e6, 1)
        done.retractions = sum(each["retractions"] for each in end)
        lens = [each for live in self.finished for each in live.rounds]
        done.accept_length = round(1 + sum(lens) / max(len(lens), 1), 3)

    def _compare_memory(self, half: list[dict[str, Any]], end: list[dict[str, Any]]) -> None:
        pairs = [*zip(half, end, strict=True)]
        growth = {name: max(b["memory"][name] - a["memory"][name] for a, b in pairs) for name in SLACK_BYTES}
        self.summary.grew("a rank's memory", growth, SLACK_BYTES)


@contextmanager
def both_groups(config: EngineConfig, peers: list[str], threads: bool) -> Iterator[tuple[Group, Group]]:
    """A prefill and a decode group whose ranks keep books, and have met."""
    with ExitStack() as stack:
        folders = {role: Path(stack.enter_context(tempfile.TemporaryDirectory())) for role in ("prefill", "decode")}
        options = {
            "prefill": DisaggregationOptions("prefill", peers[0], lease=LEASE_S),
            "decode": DisaggregationOptions("decode", None, tuple(peers), lease=LEASE_S),
        }
        if threads:
            stack.enter_context(expert_ranks_on_threads())
        groups = []
        for number, (role, disaggregation) in enumerate(options.items()):
            with audits(folders[role]) if threads else ranks_in_processes(folders[role], number):
                groups.append(Group(config, disaggregation, folders[role]))
            stack.callback(groups[-1].thread.close)
        prefill, decode = groups
        decode.idle()
        end = time.monotonic() + SILENCE_S
        while any(each["kv_transfer"]["num_peers"] != len(peers) for each in decode.idle()):
            if time.monotonic() > end:
                raise InvariantError("the groups have not met")
        yield prefill, decode


@contextmanager
def ranks_in_processes(folder: Path, number: int) -> Iterator[None]:
    """number: of the group; each has GPUs of its own."""

    def start(_: str, options: ProcessOptions) -> "subprocess.Popen[bytes]":
        size = options.config.ep_size
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        begin = number * size if len(shown) >= 2 * size else 0
        mine = ",".join(shown[begin : begin + size])
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": mine} if options.config.device == "cuda" else None
        command = [sys.executable, "-P", str(Path(__file__).with_name("rank_books.py")), str(folder)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(options) + b"\n")
        process.stdin.flush()
        return process

    with replaced([instead("treetop.distributed.process:start_process", start)]):
        yield


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Soak and compare; what is printed."""
    host, port = parse_address(args.listen, "--listen")
    os.environ.setdefault(SECRET_VARIABLE, f"of this soak: {random.SystemRandom().getrandbits(128)}")
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(args.model) if args.model else save_tiny(Path(folder), args.tiny))
        fresh = LLM(**alone(config))
        peers = [f"{host}:{port + rank}" for rank in range(args.ranks)]
        with both_groups(config, peers, args.threads) as (prefill, decode):
            soak = SoakRoles(prefill, decode, lambda rng: random_params(rng, fresh), args.seed)
            summary = soak.run(args.rounds, args.seconds)
        soak.compare(fresh, args.sample)
    return asdict(summary)
