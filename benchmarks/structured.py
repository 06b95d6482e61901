"""Structured output: what it costs, and what it leaves of the trees.

    python benchmarks/structured.py [--rows 8] [--max-tokens 96] [--repeats 5] [--json]

Decodes JSON schemas with the embedded pair, greedily, and checks each text. It prints:

accept      tokens a round and row: of the structures; of the same texts, drafted without branches; without structures
tokens/s    of `rows` structures at once, and of one alone; without structures
others      what a batch of `rows` gives to each row without a structure, where one has one and where none has
masks       milliseconds a round of the host's walk along the trees, and its share of the round

Medians of `repeats`, of which each runs every kind in turn. To compare two commits run it in both by turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from treetop import LLM, RequestOutput, SamplingParams, StructuredOutput
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

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.rows, self.max_tokens = rows, max_tokens
        self.llm = LLM(max_running_requests=rows, context_length=256)
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


def mask_times(bench: Bench) -> tuple[float, float] | None:
    """(milliseconds a round, share of the round) of the walks; None where there are none."""
    engine, scheduler = bench.llm.engine, bench.llm.scheduler
    if not hasattr(engine, "set_tree_masks"):
        return None
    spent: list[float] = []
    rounds: list[float] = []
    walk = scheduler.node_masks

    def timed(call: Callable[[Any], Any], into: list[float]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            began = time.perf_counter()
            found = call(argument)
            if into is spent or isinstance(argument, RoundPlan):
                into.append(time.perf_counter() - began)
            return found

        return run

    engine.set_tree_masks(timed(walk, spent))
    vars(engine)["launch"] = timed(engine.launch, rounds)
    bench.timed(bench.held)
    del vars(engine)["launch"]
    engine.set_tree_masks(walk)
    full = sorted(spent)[len(spent) // 2 :]  # the batch drains: rounds with most rows
    return 1000 * statistics.median(full), sum(spent) / sum(rounds)


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
    others: list[float] = []
    for _ in range(repeats):
        for name, params in kinds.items():
            speeds[name].append(speed(*bench.timed(params)))
        alone, _ = bench.timed(kinds["free"])
        mixed, _ = bench.timed([*kinds["free"][:-1], bench.held[-1]])
        others.append(pace(mixed[:-1]) / pace(alone[:-1]))
    masks = mask_times(bench)
    return {
        "accept": {"structures": accept_length(texts), "forced": accept_length(same), "free": accept_length(free)},
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "others": statistics.median(others),
        "masks_ms": None if masks is None else masks[0],
        "masks_share": None if masks is None else masks[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.rows, args.max_tokens)
    found = measure(bench, args.repeats)
    bench.llm.close()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:18s} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
