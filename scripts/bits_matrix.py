"""The long matrix of `--exactness bits`: whole engines with trees give tokens and log-probabilities of plain decoding.

    python scripts/bits_matrix.py --device cuda --family dense --dtype bfloat16 float16 --seconds 200
    python scripts/bits_matrix.py --device cuda --family gpt-oss --part 2/4 --seconds 200 > part2.jsonl
    python scripts/bits_matrix.py --device cpu --family dense --seconds 60 --requests 1 4 --chunks 16 333 --tokens 8

Tiny models of `tests/support`. What is compared with is plain decoding of one request at a time. An engine has one of
20 tree shapes, a chunk of prefill and a launcher, and serves so many requests at once, greedy, sampled and with changed
logits; further cells are of retractions, prefix hits, a hand-over between pages of 16 and of 8 tokens, shapes that
switch, calibration that learns meanwhile, constrained tokens, chunks of prompts in a round's forward, K/V in FP8, and,
so that it is seen that the comparison sees something, `--exactness ties`, which has to differ.

One line of JSON a cell: `sequences`, `tokens` and `logprobs` compared; `other_tokens` and `other_logprobs`, the
sequences that differ; `accepted` drafts. Cells are in an order in which the first ones have every mechanism, then
every shape, number of requests and chunk; no engine is made when --seconds are over, nor for cells that a file of
--done has. A last line sums up, what was done before apart. Exit code 1 if a cell of either differs or fails, 2 for an
option that cannot work; what an engine refuses by name is counted.
"""

import argparse
import importlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from treetop import LLM, SamplingParams
from treetop.cli import OneLineParser, exit_code
from treetop.doctor.conformance import RandomShapes
from treetop.types.errors import InputError, UserError

TESTS = Path(__file__).parent.parent / "tests"
SHAPES = (
    *((5, 4, 16), (1, 6, 7), (8, 5, 60), (2, 3, 6), (4, 5, 16), (1, 1, 2), (10, 6, 60), (3, 2, 9), (8, 8, 32)),
    *((1, 2, 3), (2, 8, 20), (6, 3, 24), (1, 3, 4), (4, 3, 16), (8, 1, 9), (2, 2, 5), (1, 4, 5), (4, 2, 12)),
    *((2, 4, 8), (8, 6, 64)),
)
"""(k, S, T)."""
REQUESTS, CHUNKS = (1, 33, 64, 128), (16, 333, 2048, 8192)
LENGTHS = (1, 4, 17, 60, 63, 121, 126, 500, 507, 250, 16, 64)
"""Of prompts in turn: outputs cross ends of attention's blocks, of 64 positions, and of its first segment, of 512."""
SIZES = {"vocab_size": 12, "max_position_embeddings": 1024}
"""Of so few tokens a head that knows nothing is often right."""
EVEN = {"q_lora_rank": 32, "v_head_dim": 8, "moe_intermediate_size": 48, "intermediate_size": 48}
"""Of families with compressed attention, so that a GPU's products are exact."""
CHOSEN = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "index_topk": 70, "index_head_dim": 32}
"""Of sparse attention: fewer keys than most prompts have, and more than a block."""
FAMILIES = ("dense", "gpt-oss", "qwen3-moe", "deepseek-v3", "glm-5")
MECHANISMS = ("retraction", "prefix", "handover", "switched", "learning", "constrained", "mixed", "fp8", "ties")
ROWS = 8
"""Of an engine of a mechanism, which has twice as many requests."""


@dataclass(frozen=True, slots=True)
class Cell:
    """kind: "grid", or one of `MECHANISMS`. shape: (k, S, T). requests: at once. graphs: as `--graphs`."""

    family: str
    dtype: str
    kind: str
    shape: tuple[int, int, int]
    chunk: int
    graphs: str
    requests: int

    @property
    def engine(self) -> tuple[object, ...]:
        """What cells of one engine have in common."""
        return (self.family, self.dtype, self.kind, self.shape, self.chunk, self.graphs)


@dataclass(frozen=True, slots=True)
class Found:
    """A request's tokens, log-probabilities as their exact digits, and accepted drafts."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]
    accepted: int = 0


class EveryThird:
    """A `RevocableConstraint`: of each three neighbouring tokens one may not come next, by the place in the output."""

    def __init__(self, vocab: int) -> None:
        self._vocab, self._length = vocab, 0

    def allowed(self, new_ids: Sequence[int]) -> Iterable[int]:
        self._length += len(new_ids)
        return [token for token in range(self._vocab) if (token + self._length) % 3]

    def rollback(self, num_tokens: int) -> None:
        self._length -= num_tokens


# ---------------------------------------------------------------------------------------------------- what is there


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All, in their order: the first shape, every mechanism, the other shapes; then with other chunks and launchers."""
    graphs = args.graphs
    for turn in range(len(args.chunks)):
        for dtype, family in itertools.product(args.dtype, args.family):
            for number, shape in enumerate(args.shapes):
                chunk = args.chunks[(number + turn) % len(args.chunks)]
                for requests in args.requests:
                    launcher = graphs[(number + turn) % len(graphs)]
                    yield Cell(family, dtype, "grid", shape, chunk, launcher, requests)
                if number == 0:
                    yield from _of_mechanisms(args, family, dtype, turn)


def _of_mechanisms(args: argparse.Namespace, family: str, dtype: str, turn: int) -> Iterator[Cell]:
    """Those of a turn over the shapes."""
    for number, kind in enumerate(args.kinds):
        shape = args.shapes[(number + 5 * turn) % len(args.shapes)]
        chunk = args.chunks[(number + turn) % len(args.chunks)]
        yield Cell(family, dtype, kind, shape, chunk, args.graphs[turn % len(args.graphs)], 2 * args.rows)


def pair_of(family: str, folder: Path) -> Any:
    """A tiny target of the family and a head, in `folder`."""
    tiny: Any = importlib.import_module("support.tiny_models")
    if family == "dense":
        target = tiny.save_random_llama(folder / "target", seed=8, **SIZES)
    elif family == "gpt-oss":
        stacked = tiny.save_random_experts(folder / "stacked", "gpt_oss", seed=4, intermediate_size=64, **SIZES)
        target = tiny.save_mxfp4(folder / "target", stacked, seed=5)
    elif family == "qwen3-moe":
        target = tiny.save_random_experts(folder / "target", "qwen3_moe", seed=3, moe_intermediate_size=48, **SIZES)
    else:
        made_of: Any = importlib.import_module("support.families").FAMILIES[family.replace("-", " ")]
        sizes = {**EVEN, **(CHOSEN if "index_topk" in made_of.config else {})}
        made: Any = replace(made_of, config={**made_of.config, **sizes}).save(folder / "own")
        target = tiny.copy_folder(made.pair.target, folder / "target", max_position_embeddings=1024)
    return tiny.Pair(target, tiny.save_random_head(folder / "head", target, draft_vocab=11, seed=2))


class Runs:
    """Engines of one family and dtype, and what plain decoding of one request at a time gives."""

    def __init__(self, family: str, dtype: str, folder: Path, args: argparse.Namespace) -> None:
        self.pair = pair_of(family, folder)
        self.bits: Any = importlib.import_module("support.bits")
        self.folder, self.args = folder, args
        context = max(args.lengths) + args.tokens + 24
        self.context = context
        self.own = {"exactness": "bits", "dtype": dtype, "device": args.device, "context_length": context}
        self.own |= {"page_size": 16, "speculative_policy": "fixed", "speculative_calibration": "off"}
        self.pages = -(-(context + 8) // 16) * 16
        self._alone: dict[str, LLM] = {}
        self._known: dict[tuple[object, ...], Found] = {}

    def asked(self, cell: Cell) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters. In a cell of retractions rows have two pages as they begin, and three as they end."""
        lengths = list(itertools.islice(itertools.cycle(self.args.lengths), cell.requests))
        if cell.kind == "retraction":
            lengths = [16] * (self.pages // 16)
        prompts = self.pair.prompts(lengths)
        return prompts, [_of_length(each, self.args.tokens) for each in self.bits.asked(prompts)]

    def engine(self, shape: tuple[int, int, int] | None, **options: Any) -> LLM:
        engines: Any = importlib.import_module("support.engines")
        made: LLM = engines.build(self.pair, shape, **{**self.own, **options})
        return made

    def alone(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], kind: str) -> list[Found]:
        """By plain decoding, one after the other, constrained or with K/V in FP8 as in a cell of this kind."""
        kept, limited = _kept_in(kind), kind == "constrained"
        if kept not in self._alone:
            options = {"max_running_requests": 1, "disable_radix_cache": True, "kv_cache_dtype": kept}
            self._alone[kept] = self.engine(None, **options)
        found = []
        for prompt, each in zip(prompts, params, strict=True):
            sampled = self.bits.PARAMS.index(_of_length(each, self.bits.PARAMS[0].max_tokens))
            key = (tuple(prompt), sampled, limited, kept)
            if key not in self._known:
                held = [EveryThird(self.pair.config["vocab_size"])] if limited else None
                (self._known[key],) = found_of(self._alone[kept].generate([prompt], [each], constraints=held))
            found.append(self._known[key])
        return found

    def close(self) -> None:
        for llm in self._alone.values():
            llm.close()


def _kept_in(kind: str) -> str:
    """`--kv-cache-dtype` of cells of a kind."""
    return "fp8_e4m3" if kind == "fp8" else "auto"


def _of_length(params: SamplingParams, tokens: int) -> SamplingParams:
    return replace(params, max_tokens=tokens)


def found_of(outputs: Sequence[Any]) -> list[Found]:
    return [
        Found(
            tuple(output.token_ids),
            tuple(f"{each.logprob.hex()} {[(i, p.hex()) for i, p in each.top]}" for each in output.logprobs),
            sum(output.metrics.accept_lens),
        )
        for output in outputs
    ]


# ------------------------------------------------------------------------------------------------------------ cells


def run_cells(runs: Runs, group: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The lines of the cells of one engine."""
    first = group[0]
    if first.kind == "handover":
        yield _compared(runs, first, *_handed_over(runs, first))
        return
    rows = max(each.requests for each in group) if first.kind == "grid" else runs.args.rows
    options = {"max_running_requests": rows, "chunked_prefill_size": first.chunk, "graphs": first.graphs}
    options |= {"max_total_tokens": rows * runs.pages, "kv_cache_dtype": _kept_in(first.kind)}
    if first.kind == "retraction":
        options |= {"max_total_tokens": runs.pages, "max_running_requests": runs.pages // 32}
    elif first.kind in ("switched", "learning"):
        options |= {"speculative_policy": "auto", "speculative_max_deferred": 4}
    if first.kind == "mixed":
        options["mixed_chunk"] = "on"
    if first.kind == "learning":
        options |= {"speculative_calibration": "learn", "speculative_calibration_dir": str(runs.folder / "learned")}
    llm = runs.engine(first.shape, **options, **({"exactness": "ties"} if first.kind == "ties" else {}))
    try:
        if first.kind in ("switched", "learning"):
            llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, 0)
        for cell in group:
            yield _served(runs, cell, llm)
    finally:
        llm.close()


def _served(runs: Runs, cell: Cell, llm: LLM) -> dict[str, Any]:
    """A cell's line. RuntimeError if what it is for did not happen."""
    prompts, params = runs.asked(cell)
    limited = cell.kind == "constrained"
    held = [EveryThird(runs.pair.config["vocab_size"]) for _ in prompts] if limited else None
    got = llm.generate(prompts, params, constraints=held)
    more: dict[str, Any] = {}
    if cell.kind == "prefix":
        prompts = [[*prompt, *output.token_ids[:-3]] for prompt, output in zip(prompts, got, strict=True)]
        got = llm.generate(prompts, params)
        more["hits"] = sum(output.metrics.num_cached_tokens for output in got)
    elif cell.kind == "retraction":
        more["retractions"] = llm.scheduler.num_retractions
    elif cell.kind == "switched":
        policy = llm.scheduler.policy
        assert isinstance(policy, RandomShapes)
        more["shapes_run"] = len(set(policy.chosen))
    llm.scheduler.check_integrity()
    if limited and not all((token + at) % 3 for output in got for at, token in enumerate(output.token_ids)):
        raise RuntimeError("a token that was not allowed")
    if 0 in more.values() or more.get("shapes_run") == 1:
        raise RuntimeError(f"{cell.kind} did not happen: {more}")
    return _compared(runs, cell, runs.alone(prompts, params, cell.kind), found_of(got), **more)


def _handed_over(runs: Runs, cell: Cell) -> tuple[list[Found], list[Found]]:
    """What plain decoding and what a decode worker gives that has its prompts from another one."""
    handing: Any = importlib.import_module("support.handing")
    options = {**runs.own, "max_running_requests": runs.args.rows, "chunked_prefill_size": cell.chunk}
    options |= {"graphs": cell.graphs, "max_total_tokens": runs.args.rows * runs.pages}
    workers = [handing.Worker(runs.pair, cell.shape, **{**options, "page_size": size}) for size in (16, 8)]
    try:
        relay = handing.Relay(*workers, 96)
        prompts, params = runs.asked(cell)
        ids = relay.submit(prompts, params, handing.IDS)
        relay.run()
        if relay.local:
            raise RuntimeError("a request was prefilled where it was decoded")
        results = [relay.result(each) for each in ids]
        got = [Found(tuple(ids), tuple(p.logprob.hex() for p in logprobs), sum(a)) for ids, a, logprobs in results]
        want = runs.alone(prompts, params, cell.kind)
        return [Found(each.tokens, tuple(p.split()[0] for p in each.logprobs)) for each in want], got
    finally:
        for worker in workers:
            worker.close()


def _compared(runs: Runs, cell: Cell, want: Sequence[Found], got: Sequence[Found], **more: object) -> dict[str, Any]:
    pairs = list(zip(want, got, strict=True))
    return {
        **asdict(cell),
        "outcome": "compared",
        "sequences": len(pairs),
        "tokens": sum(len(one.tokens) for one in want),
        "logprobs": sum(len(one.logprobs) for one in want),
        "other_tokens": sum(one.tokens != other.tokens for one, other in pairs),
        "other_logprobs": sum(one.logprobs != other.logprobs for one, other in pairs),
        "accepted": sum(each.accepted for each in got),
        **more,
    }


def is_good(line: dict[str, Any]) -> bool:
    """Whether a cell is as it has to be: of `ties` that is that something differs."""
    if line["outcome"] != "compared":
        return bool(line["outcome"] == "refused")
    differs = line["other_tokens"] + line["other_logprobs"] > 0
    return bool(differs == (line["kind"] == "ties"))


# -------------------------------------------------------------------------------------------------------------- run


def run(args: argparse.Namespace) -> int:
    begun, counts = time.monotonic(), Counter[str]()
    part, parts = _part(args.part)
    sys.path.insert(0, str(TESTS))
    quiet: Any = importlib.import_module("transformers.utils.logging")
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    torch.set_num_threads(args.threads)
    done = {_key(line): line for file in args.done for line in _lines(file)}
    asked = {_key(asdict(cell)): cell for cell in cells(args)}
    left = [cell for key, cell in asked.items() if key not in done]
    before = Counter[str]()
    for key in asked.keys() & done.keys():
        _count(before, done[key])
    groups = [list(group) for _, group in itertools.groupby(left, key=lambda cell: cell.engine)]
    kept: dict[tuple[str, str], Runs] = {}
    with tempfile.TemporaryDirectory(prefix="treetop-bits-") as folder:
        for number, group in enumerate(groups):
            if number % parts != part:
                continue
            if time.monotonic() - begun > args.seconds:
                counts["left"] += len(group)
                continue
            name = (group[0].family, group[0].dtype)
            if name not in kept:
                kept[name] = Runs(*name, Path(folder) / "-".join(name), args)
            for line in _told(kept[name], group):
                _count(counts, line)
                _say(line)
        for runs in kept.values():
            runs.close()
    _say({"summary": vars(args), "done": before, **counts, "seconds": round(time.monotonic() - begun, 1)})
    compared = counts["good"] > 0 or (before["good"] > 0 and counts["left"] == 0)
    return int(counts["bad"] + before["bad"] > 0 or not compared)


SUMMED = ("sequences", "tokens", "logprobs", "other_tokens", "other_logprobs", "accepted")


def _count(counts: Counter[str], line: dict[str, Any]) -> None:
    counts["good" if is_good(line) else "bad"] += 1
    counts[line["outcome"]] += 1
    if line["outcome"] == "compared" and line["kind"] != "ties":
        counts.update({key: line[key] for key in SUMMED})


def _told(runs: Runs, group: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The lines of an engine's cells; an engine that is refused or fails is one of its first cell."""
    begun = time.monotonic()
    try:
        for line in run_cells(runs, group):
            now = time.monotonic()
            yield {**line, "seconds": round(now - begun, 2)}
            begun = now
    except UserError as error:
        yield {**asdict(group[0]), "outcome": "refused", "why": str(error)[:200]}
    except Exception as error:  # the other cells are to be run
        yield {**asdict(group[0]), "outcome": "failed", "why": f"{type(error).__name__}: {error}"[:300]}


def _key(line: dict[str, Any]) -> str:
    return json.dumps([line.get(name) for name in Cell.__dataclass_fields__])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for text in file.read_text().splitlines():
        if text.startswith("{") and json.loads(text).get("outcome") in ("compared", "refused"):
            yield json.loads(text)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line, default=str), flush=True)


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise InputError(f"--part {text}: it is NUMBER/PARTS, as 1/4")
    return int(number) - 1, int(parts)


def _shape(text: str) -> tuple[int, int, int]:
    k, steps, nodes = (int(each) for each in text.split(","))
    return k, steps, nodes


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        prog="bits_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    add("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), help="default: of a GPU both of 16 bits")
    add("--seconds", type=float, default=200.0, help="no engine is made later")
    add("--part", default="1/1", help="NUMBER/PARTS of the engines, for processes side by side")
    add("--done", nargs="*", type=Path, default=[], help="files of lines: their cells count, and are not run again")
    add("--shapes", nargs="+", type=_shape, default=list(SHAPES), metavar="K,S,T")
    add("--requests", nargs="+", type=int, default=list(REQUESTS), help="at once")
    add("--chunks", nargs="+", type=int, default=list(CHUNKS), help="--chunked-prefill-size")
    add("--graphs", nargs="+", choices=("auto", "off", "sim"), help="in turn; default: captured, and eager of a CPU")
    add("--kinds", nargs="*", choices=MECHANISMS, default=list(MECHANISMS))
    add("--lengths", nargs="+", type=int, default=list(LENGTHS), help="of prompts, in turn")
    add("--tokens", type=int, default=24, help="of each output")
    add("--rows", type=int, default=ROWS, help="of an engine of a mechanism")
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    args.dtype = args.dtype or (["bfloat16", "float16"] if args.device == "cuda" else ["float32"])
    args.graphs = args.graphs or ["auto"]
    return exit_code("bits_matrix", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
