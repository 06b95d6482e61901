"""Accept length and tokens a second of plain decoding, n-gram drafts, chains and trees on held-out prompts, one at a time.

    python recipes/smollm2/measure.py --model builtin:smollm2 --head builtin:smollm2-eagle3 --json build/smollm2/figures.json
    python recipes/smollm2/measure.py --model FOLDER --head OTHER --shapes plain 5,1,6 5,4,16 --prompts 8
    python recipes/smollm2/measure.py --head builtin:smollm2-eagle3 build/smollm2/smollm2-dspark --shapes plain 7,1,8 8,8,64 \
        --json build/smollm2/heads.json --limit-s 400

Each configuration is an engine of its own: it answers `--warm` prompts that do not count, of which `learn` learns its
calibration, then the same prompts of each kind greedily and at temperature 0.8. Accept length: tokens a round, the bonus
token included, the first token of an answer not. The interval is of 95 %, by resampling prompts 2,000 times. Greedy tokens
are compared with those of plain decoding; where they part, the count says so (near ties of rounding in 16 bits).
A JSON file that is there keeps its rows, and what they measured is not measured again; plain decoding is, to compare with.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from texts import BUILD

from treetop import LLM, SamplingParams

SHAPES = ("plain", "ngram", "3,1,4", "5,1,6", "7,1,8", "5,4,8", "7,4,8", "5,4,16", "8,8,32")
CHOSEN = ("5,1,6+learn", "5,4,8+learn", "7,4,8+learn", "5,4,16+learn")
WITHOUT_HEAD = ("plain", "ngram")
KINDS = ("chat", "code", "summary", "json")
Prompts = dict[str, list[list[dict[str, str]]]]


class Answer(NamedTuple):
    """What one prompt gave. emitted: tokens of rounds."""

    tokens: tuple[int, ...]
    emitted: int
    rounds: int
    seconds: float


def read_prompts(file: Path, count: int, warm: int) -> tuple[Prompts, list[list[dict[str, str]]]]:
    """The first turn of `count` prompts a kind, and `warm` others."""
    rows = [json.loads(line) for line in file.open(encoding="utf-8")]
    counted: Prompts = {}
    others = []
    for kind in KINDS:
        some = [[{"role": "user", "content": row["turns"][0]}] for row in rows if row["kind"] == kind]
        counted[kind], rest = some[:count], some[count:]
        others += rest[: warm // len(KINDS)]
    return counted, others


def engine(args: argparse.Namespace, head: str, name: str) -> LLM:
    """The engine of a configuration: plain, ngram, or S,k,T with an optional +learn."""
    options = {"max_running_requests": 1, "context_length": args.context, "speculative_policy": "fixed"}
    if args.dtype:
        options["dtype"] = args.dtype
    shape, _, calibration = name.partition("+")
    if shape == "plain":
        return LLM(args.model, None, **options)
    if shape == "ngram":
        return LLM(args.model, None, speculative_algorithm="NGRAM", **options)
    steps, topk, nodes = (int(number) for number in shape.split(","))
    return LLM(
        args.model, head, speculative_num_steps=steps, speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes, speculative_calibration=calibration or "off", **options,
    )  # fmt: skip


def answer(llm: LLM, messages: list[dict[str, str]], temperature: float, tokens: int, seed: int) -> Answer:
    """One prompt alone."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    began = time.perf_counter()
    output = llm.chat(messages, params)[0]
    return Answer(output.token_ids, output.round_tokens, output.metrics.target_forwards, time.perf_counter() - began)


def interval(answers: list[Answer]) -> tuple[float, float, float]:
    """Accept length, and its 95 % interval by resampling prompts."""
    answers = [each for each in answers if each.rounds]
    pick = random.Random(0)

    def length(some: list[Answer]) -> float:
        return sum(each.emitted for each in some) / sum(each.rounds for each in some)

    drawn = sorted(length(pick.choices(answers, k=len(answers))) for _ in range(2000))
    return length(answers), drawn[50], drawn[1949]


def main() -> None:
    """Measure every configuration, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument(
        "--head", nargs="+", default=["builtin:smollm2-eagle3"], help="each is measured with all shapes"
    )
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *CHOSEN])
    parser.add_argument("--heldout", type=Path, default=BUILD / "heldout.jsonl")
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    parser.add_argument("--warm", type=int, default=64, help="prompts that do not count")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=float, default=3600, help="begin no configuration after so many seconds")
    args = parser.parse_args()
    began = time.perf_counter()
    counted, others = read_prompts(args.heldout, args.prompts, args.warm)
    plain: dict[tuple[str, float, int], tuple[int, ...]] = {}
    speeds: dict[tuple[str, float], float] = {}
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    own = [name for name in args.shapes if name in WITHOUT_HEAD]
    drafting = [name for name in args.shapes if name not in WITHOUT_HEAD]
    for head, name in [("", name) for name in own] + [(head, name) for name in drafting for head in args.head]:
        if name == "plain":
            rows = [row for row in rows if row["configuration"] != "plain"]
        if any((row["head"], row["configuration"]) == (head, name) for row in rows):
            continue
        if time.perf_counter() - began > args.limit_s:
            print(f"time is up before {head} {name}; run this again")
            break
        llm = engine(args, head, name)
        found = []
        for number, messages in enumerate(others if "learn" in name else others[:8]):
            answer(llm, messages, 0.8 * (number % 2), args.max_tokens, number)
        for temperature in args.temperatures:
            for kind in KINDS:
                given = [answer(llm, m, temperature, args.max_tokens, i) for i, m in enumerate(counted[kind])]
                speed = sum(len(each.tokens) for each in given) / sum(each.seconds for each in given)
                keys = [(kind, temperature, number) for number in range(len(given))]
                if name == "plain":
                    plain |= {key: each.tokens for key, each in zip(keys, given, strict=True)}
                    speeds[kind, temperature] = speed
                differ = sum(plain.get(key, each.tokens) != each.tokens for key, each in zip(keys, given, strict=True))
                length, low, high = interval(given)
                row = {
                    "head": head, "configuration": name, "kind": kind, "temperature": temperature,
                    "accept_length": round(length, 3), "low": round(low, 3), "high": round(high, 3),
                    "tokens_per_second": round(speed, 1),
                    "over_plain": round(speed / speeds[kind, temperature], 3) if speeds else None,
                    "tokens": sum(len(each.tokens) for each in given), "prompts": len(given), "differ_from_plain": differ,
                }  # fmt: skip
                found.append(row)
                print(json.dumps(row), flush=True)
        rows += found
        llm.close()
        del llm
        if args.json:
            write(args, rows)


def write(args: argparse.Namespace, rows: list[dict]) -> None:
    """All rows so far, and on what they were measured."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"machine": machine, "torch": torch.__version__, "model": args.model, "rows": rows}
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
