"""Structured output: what it costs, and what it leaves of the trees.

    python benchmarks/structured.py [--rows 8] [--max-tokens 96] [--repeats 5] [--json]
    python benchmarks/structured.py --rounds [--kinds flat regex] [--model builtin:smollm2]
    python benchmarks/structured.py --preset llama-3.1-8b --shape 5,4,16     on a GPU, some 100 s

Decodes JSON schemas with the embedded pair, greedily, and checks each text. It prints:

accept      tokens a round and row: of the structures; of the same texts, drafted without branches; without structures
tokens/s    of `rows` structures at once, and of one alone; without structures
others      what a batch of `rows` gives to each row without a structure, where one has one and where none has
rounds      texts of `max-tokens` with each kind of structure against such without, one row and all, in pairs. Rounds a
            second are tokens a second at the same accept length: `processor` by the processor time of all threads,
            `wall` by time that passes. `tokens`: tokens a second as they are, from the request to its end
masks       milliseconds a round of the host's walk along the trees, of all rows and of one, and the share of the time
            that `rows` structures take

Medians of `repeats`, of which each runs every kind in turn. To compare two commits run it in both by turns.

--preset takes random weights of a model's shape (`rounds.py`), with the embedded tokenizer and tokens of random letters
up to its vocabulary. Such a head is never right, so only others and masks are measured.
"""

import json
import random
import shutil
import statistics
import string
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from frame import NAMES, end_with, parser_of, preset, say

from treetop import LLM, RequestOutput, SamplingParams, StructuredOutput
from treetop.checkpoints.folder import resolve_folder
from treetop.types.config import BUILTIN_MODEL
from treetop.types.default_model import PAIRS
from treetop.types.messages import RoundPlan

PROMPTS = (
    "def load_config(path):\n    return json.load(open(path))\n\n# config.json\n",
    "import json\n\nuser = json.loads('''",
    "response = client.post('/items', data='",
    "class Settings:\n    DEFAULTS = ",
)
FIELDS: tuple[dict[str, Any], ...] = (
    {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer"}, "active": {"type": "boolean"}},
    {"path": {"type": "string", "maxLength": 24}, "size": {"type": "integer"}, "mode": {"enum": ["read", "write"]}},
    {"items": {"type": "array", "items": {"type": "integer"}, "maxItems": 6}, "total": {"type": "integer"}},
    {"description": {"type": "string", "maxLength": 32}, "timeout_seconds": {"type": "number"}},
)


def schema_of(number: int) -> dict[str, Any]:
    fields = FIELDS[number % len(FIELDS)]
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {**schema, "x-guidance": {"whitespace_flexible": False}}  # or a small model writes spaces to the end


def many(item: dict[str, Any], least: int = 24) -> dict[str, Any]:
    """A list that no answer comes to the end of, with white space as it is by default."""
    return {"type": "array", "items": item, "minItems": least}


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


_INTEGER, _TEXT = {"type": "integer"}, {"type": "string", "maxLength": 24}
_PLACE = record(street=_TEXT, number=_INTEGER, position=record(latitude=_INTEGER, longitude=_INTEGER))
LONG: dict[str, StructuredOutput] = {
    name: StructuredOutput("json_schema", json.dumps(schema))
    for name, schema in {
        "flat": many(record(**FIELDS[0])),
        "nested": many(record(user=record(name=_TEXT, place=_PLACE), tags=many(_TEXT, 2))),
        "enums": many(record(mode={"enum": ["read", "write", "append"]}, level={"enum": ["debug", "info", "error"]})),
        "arrays": many(many(_INTEGER, 4)),
        "strings": many({"type": "string", "minLength": 60, "maxLength": 200}),
    }.items()
} | {"regex": StructuredOutput("regex", r"(\n    [a-z_]{3,12} = (None|True|[0-9]{1,4}|\"[^\"\n]{0,20}\")){40}")}
"""Structures that hold a text to the end of its tokens."""


class Follow:
    """Allows a text that is known, token for token, and one token beside, so that the target chooses."""

    def __init__(self, text: Sequence[int], beside: int) -> None:
        self._text, self._place, self._beside = text, 0, beside

    def allowed(self, new_ids: Sequence[int]) -> list[int]:
        self._place += len(new_ids)
        return [self._text[self._place], self._beside] if self._place < len(self._text) else []

    def rollback(self, num_tokens: int) -> None:
        self._place -= num_tokens


class Bench:
    """One engine, and what is asked of it."""

    def __init__(self, rows: int, max_tokens: int, options: dict[str, Any]) -> None:
        """options: of the engine."""
        self.rows, self.max_tokens = rows, max_tokens
        self.llm = LLM(max_running_requests=rows, context_length=256, **options)
        self.prompts = [PROMPTS[i % len(PROMPTS)] for i in range(rows)]
        self.free = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        schemas = [StructuredOutput("json_schema", json.dumps(schema_of(i))) for i in range(rows)]
        self.held = [SamplingParams(max_tokens=max_tokens, structured_output=each) for each in schemas]

    def timed(self, params: Sequence[SamplingParams], constraints: Any = None) -> tuple[list[RequestOutput], float]:
        began = time.perf_counter()
        outputs = self.llm.generate(self.prompts[: len(params)], list(params), constraints)
        return outputs, time.perf_counter() - began

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.error is not None or (
                output.finish_reason == "stop" and not isinstance(json.loads(output.text), dict)
            ):
                raise SystemExit(f"not what was asked for: {output.text!r} {output.error}")


def accept_length(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a round and row."""
    rounds = sum(len(output.metrics.accept_lens) for output in outputs)
    return sum(len(output.token_ids) - 1 for output in outputs) / rounds


def speed(outputs: Sequence[RequestOutput], seconds: float) -> float:
    return sum(len(output.token_ids) for output in outputs) / seconds


def pace(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a second of a request, each by its own time."""
    return statistics.mean(output.metrics.tokens_per_second or 0.0 for output in outputs)


def mask_times(bench: Bench, params: Sequence[SamplingParams]) -> tuple[float, float]:
    """(milliseconds a round, share of all time) of the walks of these requests."""
    engine, walk = bench.llm.engine, bench.llm.scheduler.node_masks
    spent: list[float] = []

    def timed(trees: Any) -> Any:
        began = time.perf_counter()
        found = walk(trees)
        spent.append(time.perf_counter() - began)
        return found

    engine.set_tree_masks(timed)
    _, seconds = bench.timed(params)
    engine.set_tree_masks(walk)
    full = sorted(spent)[len(spent) // 2 :]  # the batch drains: rounds with most rows
    return 1000 * statistics.median(full), sum(spent) / seconds


def others_and_masks(bench: Bench, repeats: int) -> dict[str, Any]:
    """What a structure costs those beside it, and what masks take."""
    free = [bench.free] * bench.rows
    mixed = [*free[:-1], replace(bench.held[-1], ignore_eos=True)]
    for params in (free, mixed):
        bench.timed(params)  # captures what they run
    found = list[float]()
    for _ in range(repeats):
        alone, _ = bench.timed(free)
        beside, _ = bench.timed(mixed)
        found.append(pace(beside[:-1]) / pace(alone[:-1]))
    of_all, share = mask_times(bench, bench.held)
    return {
        "others": statistics.median(found),
        "others_all": found,
        "masks_ms": of_all,
        "masks_ms_of_one": mask_times(bench, mixed)[0],
        "masks_share": share,
    }


class RoundClock:
    """Processor time of all threads, and time that passes, from one launch of a round of so many rows to the next."""

    def __init__(self, llm: LLM, rows: int) -> None:
        self._engine, self._launch, self._rows = llm.engine, llm.engine.launch, rows
        self._last: tuple[float, float] | None = None
        self.spent: list[tuple[float, float]] = []

    def __enter__(self) -> "RoundClock":
        vars(self._engine)["launch"] = self._launched
        return self

    def __exit__(self, *_: object) -> None:
        del vars(self._engine)["launch"]

    def _launched(self, plan: Any) -> Any:
        now, last = (time.process_time(), time.perf_counter()), self._last
        is_full = isinstance(plan, RoundPlan) and len(plan.rows) == self._rows
        if is_full and last is not None:
            self.spent.append((now[0] - last[0], now[1] - last[1]))
        self._last = now if is_full else None
        return self._launch(plan)


def rounds_of(bench: Bench, structure: StructuredOutput, rows: int, repeats: int) -> dict[str, Any]:
    """Rounds of `rows` texts with this structure and without, by turns. A round's time is a run's median."""
    kinds = {
        "structure": SamplingParams(max_tokens=bench.max_tokens, structured_output=structure),
        "free": SamplingParams(max_tokens=bench.max_tokens, ignore_eos=True),
    }
    accept, spent = dict[str, float](), defaultdict[str, list[list[float]]](list)
    speeds = defaultdict[str, list[float]](list)
    for turn in range(repeats + 1):
        for name, params in kinds.items():
            with RoundClock(bench.llm, rows) as clock:
                outputs, seconds = bench.timed([params] * rows)
            if any(len(output.token_ids) != bench.max_tokens for output in outputs):
                raise SystemExit(f"{structure}: {[output.text for output in outputs]} {outputs[0].error}")
            accept[name] = max(accept.get(name, 0.0), accept_length(outputs))  # a walk that is held up withholds drafts
            if turn:  # the first compiles
                spent[name].append([statistics.median(each) for each in zip(*clock.spent, strict=True)])
                speeds[name].append(speed(outputs, seconds))
    pairs = [*zip(spent["free"], spent["structure"], strict=True)]
    return {
        "accept": accept,
        "round_ms": {name: 1000 * statistics.median(each[0] for each in found) for name, found in spent.items()},
        "processor": statistics.median(free[0] / held[0] for free, held in pairs),
        "wall": statistics.median(free[1] / held[1] for free, held in pairs),
        "tokens": statistics.median(
            held / free for held, free in zip(speeds["structure"], speeds["free"], strict=True)
        ),
    }


def rounds(bench: Bench, repeats: int, kinds: Sequence[str] = tuple(LONG)) -> dict[str, dict[str, Any]]:
    """`rounds_of` structures, one row and all, and the medians of the kinds."""
    found = {
        f"{name}, {rows}": rounds_of(bench, LONG[name], rows, repeats)
        for rows in dict.fromkeys((1, bench.rows))
        for name in kinds
    }
    for rows in dict.fromkeys((1, bench.rows)):
        of_kinds = [found[f"{name}, {rows}"] for name in kinds]
        found[f"median, {rows}"] = {
            ratio: statistics.median(each[ratio] for each in of_kinds) for ratio in ("processor", "wall", "tokens")
        }
    return found


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Each kind once, unmeasured, then `repeats` times by turns."""
    texts, _ = bench.timed(bench.held)
    bench.check(texts)
    beside = min({*range(1000)} - {token for output in texts for token in output.token_ids})
    forced = [Follow(output.token_ids, beside) for output in texts]
    same, _ = bench.timed([replace(bench.free, logit_bias=((beside, -100.0),))] * bench.rows, forced)
    if [output.token_ids for output in same] != [output.token_ids for output in texts]:
        raise SystemExit("the forced texts are others")
    free, _ = bench.timed([bench.free] * bench.rows)
    kinds: dict[str, list[SamplingParams]] = {
        "structures": bench.held,
        "one structure": bench.held[:1],
        "free": [bench.free] * bench.rows,
        "one free": [bench.free],
    }
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, params in kinds.items():
            speeds[name].append(speed(*bench.timed(params)))
    return {
        "accept": {"structures": accept_length(texts), "forced": accept_length(same), "free": accept_length(free)},
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "rounds": rounds(bench, repeats),
        **others_and_masks(bench, repeats),
    }


def filled(model: Path, folder: Path) -> Path:
    """A copy of a configuration, with a tokenizer of as many tokens."""
    shutil.copy(model / "config.json", folder)
    tokenizer = json.loads((resolve_folder("builtin:nestling") / "tokenizer.json").read_text(encoding="utf-8"))
    size, rng = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"], random.Random(0)
    vocab = tokenizer["model"]["vocab"]
    while len(vocab) < size:
        vocab.setdefault("".join(rng.choices(string.ascii_letters, k=rng.randint(3, 9))), len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", action="store_true", help="rounds alone")
    parser.add_argument("--kinds", nargs="+", choices=LONG, default=[*LONG], help="of --rounds")
    parser.add_argument("--model", choices=[model for model, _ in PAIRS.values()], default=BUILTIN_MODEL)
    parser.add_argument("--preset", choices=NAMES, help="random weights of this shape, for others and masks alone")
    parser.add_argument("--shape", default="5,4,16", metavar="S,k,T", help="of the trees, with --preset")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        options: dict[str, Any] = {"model": args.model, "draft": dict(PAIRS.values())[args.model]}
        if args.preset is not None:
            model, draft = preset(args.preset)
            steps, topk, nodes = map(int, args.shape.split(","))
            options = {"model": str(filled(Path(model), Path(made))), "draft": draft, "load_format": "dummy"}
            options |= {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
            options |= {"speculative_num_draft_tokens": nodes}
        bench = Bench(args.rows, args.max_tokens, options)
        if args.rounds:
            found = rounds(bench, args.repeats, args.kinds)
        else:
            found = (measure if args.preset is None else others_and_masks)(bench, args.repeats)
        bench.llm.close()
    if args.json:
        say(found)
    else:
        for name, value in found.items():
            print(f"{name:18s} {value}")
    return 0


if __name__ == "__main__":
    end_with(main)
