"""A long run of all forms at once: ranks that share experts prefill for ranks that share experts, with MTP drafts.

    python scripts/soak_roles.py --rounds 20000 --seed 0
    python scripts/soak_roles.py --rounds 500 --threads

Two groups of `--ranks` ranks each, of one machine: a process a rank, over NIXL, or a thread a rank, copying memory.
Requests come at random, to one decode rank or to all, and some are aborted, wherever they stand. Pools are too small
for the rows, slots too few for the pieces. Each rank accounts for its rows, pages and slots between its steps, and
says what it has done. At half time and at the end nothing runs: nothing may be held, and memory is what it was. A
random sample of what was finished gets the same tokens and accepted lengths from one engine that has seen nothing.

A run of many rounds may be done in parts: `--rounds` with another `--seed` each. `--seconds` ends a part early. With
`--device cuda` prefill ranks have the first GPUs, decode ranks the next, or the same ones if there are no more. Without
--model it is a small model with random weights, of GLM-4.5's kind, or with `--tiny glm-5` of GLM-5.2's, whose
attention is compressed and sparse. Says on stderr how far it is, and prints one JSON
object; exit code 1 if anything failed, 2 for an option that cannot work.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch
from rank_books import audits
from soak import near_tie, random_params

from treetop import LLM, SamplingParams
from treetop.cli import OneLineParser, exit_code
from treetop.core.wire import ProcessOptions
from treetop.debug.random_checkpoint import random_tensors, write_config, write_tensors
from treetop.distributed.remote_engine import RankLink
from treetop.distributed.remote_thread import RemoteThread
from treetop.engine.startup.plan import plan_engine
from treetop.llm import RequestOutput
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError, InvariantError
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import SECRET_VARIABLE, DisaggregationOptions, parse_address
from treetop.types.options import options_of
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.patching import instead, replaced

PHASES = ((0,), (0, 1), (1, 0, 0), (1,), (0, 1, 1), (0, 1))
"""Decode ranks, modulo their number, among which a phase spreads its requests."""
LOADS = (1, 2, 4, 6, 10)
"""Live requests that a phase aims at."""
SILENCE_S = 120.0
"""After which nothing will come any more."""
SLACK_BYTES = {"resident": 48 << 20, "allocated": 1 << 20}
"""Growth of a rank's memory from half time to the end that is no leak; threads share one process."""
LEASE_S = 3.0

GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}

GLM_5 = {
    **{key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "use_qk_norm")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 12,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "indexer_types": ["full", "full", "shared"],
}
TINY = {"glm-4.5": GLM, "glm-5": GLM_5}


@dataclass(slots=True)
class Summary:
    """What a soak did and found. rounds: of the decode group, each with all of its ranks. idle_rounds: with a rank that
    had no rows in them; likewise of prefill steps. local: requests that were not handed over, or not to their end.
    """

    seed: int
    rounds: int = 0
    idle_rounds: int = 0
    prefills: int = 0
    idle_prefills: int = 0
    exports: int = 0
    imports: int = 0
    audits: int = 0
    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    handed_over: int = 0
    local: int = 0
    megabytes: float = 0.0
    retractions: int = 0
    tokens: int = 0
    accept_length: float = 0.0
    compared: int = 0
    ties: int = 0
    unequal: int = 0
    elapsed_s: float = 0.0
    growth_bytes: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Live:
    """A request, and what has come of it. retracted: its rounds began anew, and are others."""

    asked: EngineRequest
    ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    given_up: bool = False
    retracted: bool = False

    def equals(self, want: RequestOutput) -> bool:
        same = self.retracted or tuple(self.accept_lens) == want.metrics.accept_lens
        return same and tuple(self.ids) == want.token_ids


class Group:
    """Ranks with a role. said: the last words of each rank, by its file."""

    def __init__(self, config: EngineConfig, disaggregation: DisaggregationOptions, folder: Path) -> None:
        self.folder = folder
        self.thread = RemoteThread(ProcessOptions("", config, disaggregation=disaggregation))
        self.core, self.size = self.thread.core, config.ep_size

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]

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
        self.summary, self._rng = Summary(seed), random.Random(seed)
        self._thread = decode.thread
        self._heard: SimpleQueue[list[RequestUpdate]] = SimpleQueue()
        self._live: dict[RequestId, Live] = {}
        self.finished: list[Live] = []
        self._favoured: tuple[int, ...] = (0,)
        decode.core.engines[0].place = self._place
        self._vocab, self._context = decode.core.info.vocab_size, decode.core.info.max_context

    def run(self, rounds: int, seconds: float = float("inf")) -> Summary:
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
            self._fail(f"after {self._rounds()} rounds: {type(error).__name__}: {error}")
        done.elapsed_s = round(time.monotonic() - begun, 1)
        self._thread.close()
        return done

    def _tell(self, what: str, begun: float) -> None:
        rounds, took = self._rounds(), time.monotonic() - begun
        print(f"{what}: {rounds} rounds, {self.summary.finished} requests, {took:.0f} s", file=sys.stderr)

    def compare(self, fresh: LLM, count: int) -> None:
        """Answer a sample of the finished requests again on an engine that has seen nothing."""
        done, rng = self.summary, random.Random(0)
        sample = rng.sample(self.finished, min(count, len(self.finished)))
        prompts, params = [[*each.asked.prompt_ids] for each in sample], [each.asked.params for each in sample]
        for live, want in zip(sample, fresh.generate(prompts, params), strict=True):
            done.compared += 1
            if live.equals(want):
                continue
            have = replace(want, token_ids=tuple(live.ids))
            same = have.token_ids == want.token_ids
            if fresh.engine.dtype == torch.float32 and (same or near_tie(fresh, live.asked.params, want, have)):
                done.ties += 1
            else:
                done.unequal += 1
                asked = f"{live.asked.params} after {[*live.asked.prompt_ids]}"
                self._fail(f"one engine answers {asked} otherwise: {want.token_ids}, not {have.token_ids}")

    def _soak(self, rounds: int, until_s: float) -> list[dict[str, Any]]:
        """Change the load every now and then; then let everything drain. Returns the last words of all ranks."""
        rng, load, change = self._rng, 1, 0
        while (now := self._rounds()) < rounds and time.monotonic() < until_s:
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
        while self._live:
            self._hear()
        return [*self.prefill.idle(), *self.decode.idle()]

    def _place(self, request: EngineRequest, engine: int) -> RankLink:
        """Of the decode group, whose client asks."""
        return self.decode.core.engines[0].links[self._rng.choice(self._favoured) % self.decode.size]

    def _rounds(self) -> int:
        """Of the decode group, so far."""
        return self.decode.count("rounds") // self.decode.size

    def _arrive(self, count: int) -> None:
        rng = self._rng
        for _ in range(count):
            length = rng.randint(1, rng.choice((8, self._context // 3, self._context - 2)))
            kept = [each.asked.prompt_ids for each in self.finished[-8:]]
            start = rng.choice(kept)[: length // 2] if kept and rng.random() < 0.3 else ()
            prompt = (*start, *rng.choices(range(self._vocab), k=length - len(start)))
            params = self._params(rng)
            asked = EngineRequest(self._thread.next_id(), prompt, params, params.seed or 0)
            self._live[asked.request_id] = Live(asked)
            self.summary.arrived += 1
            self._thread.add([asked], self._heard.put)

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
            live.accept_lens += [] if update.accept_len is None else [update.accept_len]
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
        live.retracted = update.stats.num_retractions > 0
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
        lens = [each for live in self.finished for each in live.accept_lens]
        done.accept_length = round(1 + sum(lens) / max(len(lens), 1), 3)

    def _compare_memory(self, half: list[dict[str, Any]], end: list[dict[str, Any]]) -> None:
        for name, slack in SLACK_BYTES.items():
            growth = max(b["memory"][name] - a["memory"][name] for a, b in zip(half, end, strict=True))
            self.summary.growth_bytes[name] = growth
            if growth > slack:
                self._fail(f"a rank's memory ({name}) grew by {growth} bytes after half time")

    def _fail(self, what: str) -> None:
        if len(self.summary.failures) < 10:
            self.summary.failures.append(what)


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


def save_tiny_glm(folder: Path, name: str = "glm-4.5") -> Path:
    """A checkpoint of this kind with an MTP layer and random weights, which all matter to the logits."""
    write_config(folder, TINY[name])
    planned = plan_engine(EngineConfig(str(folder), speculative_algorithm="MTP", load_format="dummy", device="cpu"))
    assert planned.draft is not None
    params = [*planned.target.params, *planned.draft.params]
    write_tensors(folder, random_tensors(params, torch.Generator().manual_seed(8)))
    return folder


def config_of(args: argparse.Namespace, model: Path) -> EngineConfig:
    try:
        steps, topk, size = map(int, args.speculative.split(","))
    except ValueError:
        raise InputError(f"--speculative must be S,K,T, got {args.speculative}") from None
    return EngineConfig(
        str(model),
        speculative_algorithm="MTP",
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=size,
        ep_size=args.ranks,
        device=args.device,
        dtype=args.dtype,
        graphs=args.graphs,
        check_level=args.check_level,
        page_size=args.page_size,
        context_length=args.context_length,
        max_running_requests=6,
        chunked_prefill_size=32,
        max_total_tokens=5 * args.context_length // 2,
        overlap=True,
        disaggregation_slots=4,
        disaggregation_slot_bytes=args.slot_bytes,
    )


def alone(config: EngineConfig) -> dict[str, Any]:
    """Options of one engine for the same requests, with room for all."""
    changes = {"ep_size": 1, "disaggregation_slots": 0, "disable_radix_cache": True, "max_total_tokens": None}
    return {**asdict(config), **changes, "graphs": "off", "overlap": None}


def run(args: argparse.Namespace) -> int:
    """Soak, compare, print. Raises UserError for options that cannot work."""
    for name, minimum in (("rounds", 1), ("sample", 0), ("context_length", 16), ("ranks", 2)):
        if getattr(args, name) < minimum:
            raise InputError(f"--{name.replace('_', '-')} must be at least {minimum}, got {getattr(args, name)}")
    host, port = parse_address(args.listen, "--listen")
    os.environ.setdefault(SECRET_VARIABLE, f"of this soak: {random.SystemRandom().getrandbits(128)}")
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(args.model) if args.model else save_tiny_glm(Path(folder), args.tiny))
        fresh = LLM(**alone(config))
        peers = [f"{host}:{port + rank}" for rank in range(args.ranks)]
        with both_groups(config, peers, args.threads) as (prefill, decode):
            soak = SoakRoles(prefill, decode, lambda rng: random_params(rng, fresh), args.seed)
            summary = soak.run(args.rounds, args.seconds)
        soak.compare(fresh, args.sample)
    print(json.dumps(asdict(summary)))
    return int(bool(summary.failures))


def main() -> int:
    parser = OneLineParser(prog="soak_roles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end this part early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="of each group")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of this process, on a CPU")
    parser.add_argument("--model", metavar="FOLDER", help="one with experts and an MTP layer")
    parser.add_argument("--tiny", default="glm-4.5", choices=sorted(TINY), help="the model without --model")
    parser.add_argument("--speculative", default="3,2,6", metavar="S,K,T", help="of the model's MTP layer")
    parser.add_argument("--sample", type=int, default=64, help="finished requests that one engine answers again")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float64", choices=("float32", "float64"))
    parser.add_argument("--graphs", default="sim", choices=options_of(EngineConfig)["graphs"].choices)
    parser.add_argument("--check-level", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--context-length", type=int, default=160)
    parser.add_argument("--slot-bytes", type=int, default=1 << 18, help="of each of four staging slots")
    parser.add_argument("--listen", default="127.0.0.1:23456", metavar="HOST:PORT", help="of the first prefill rank")
    args = parser.parse_args()
    return exit_code("soak_roles", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
