"""Do answers stay as good: short questions with checkable answers, by plain decoding, trees and each format.

    python benchmarks/quality.py --questions 300 --json build/quality.json
    python benchmarks/quality.py --model FOLDER --draft HEAD --questions 40 --only transformers plain tree

Questions are made by recipe, four kinds alike: arithmetic, copying, following a format, and a choice among three. Every
configuration answers all of them greedily. `plain` in float32 is compared with `transformers` on the same decoded
weights, token by token, and every other configuration with `plain`: a tree must give the same tokens; of formats
(fp8, w4a16 by `treetop quantize`, K/V in FP8) the table says what they lose. A count of equal answers below all of a
configuration that claims equality is an exit status of 1, but for near ties of rounding, which are said.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from treetop import LLM, SamplingParams
from treetop.cli import main as treetop
from treetop.types.engine_options import EngineOptions

WORDS = (
    "apple", "river", "stone", "cloud", "paper", "green", "silver", "window", "garden", "winter", "summer", "music",
    "letter", "bridge", "candle", "forest", "mirror", "pocket", "rabbit", "school", "ticket", "valley", "wagon",
)  # fmt: skip
SETS = {
    "fruit": ("apple", "banana", "cherry", "grape", "orange"), "animal": ("dog", "horse", "lion", "rabbit", "tiger"),
    "colour": ("blue", "green", "red", "yellow", "purple"), "country": ("Brazil", "France", "India", "Japan", "Kenya"),
    "planet": ("Mars", "Venus", "Saturn", "Jupiter", "Neptune"), "metal": ("copper", "gold", "iron", "silver", "zinc"),
}  # fmt: skip
CONTEXT = 512
EXACT = ("tree",)
"""Configurations whose tokens must be plain's."""


class Question(NamedTuple):
    """What is asked, and whether an answer is right."""

    kind: str
    text: str
    is_right: Callable[[str], bool]


class Answers(NamedTuple):
    """Of all questions: texts and tokens, and the seconds they took together."""

    texts: list[str]
    tokens: list[tuple[int, ...]]
    seconds: float


def questions(count: int, seed: int) -> list[Question]:
    """So many questions, the kinds in turn."""
    pick = random.Random(seed)
    kinds = (_arithmetic, _copy, _format, _choice)
    return [kinds[number % len(kinds)](pick) for number in range(count)]


def _arithmetic(pick: random.Random) -> Question:
    a, b = pick.randint(1, 12), pick.randint(1, 12)
    if pick.random() < 0.5:
        return Question("arithmetic", f"What is {a} + {b}? Answer with the number.", lambda t: str(a + b) in t)
    return Question("arithmetic", f"What is {a + b} - {b}? Answer with the number.", lambda t: str(a) in t)


def _copy(pick: random.Random) -> Question:
    words = " ".join(pick.sample(WORDS, 5))
    return Question("copy", f"Repeat the following words exactly: {words}", lambda t: words in t.lower())


def _format(pick: random.Random) -> Question:
    word = pick.choice(WORDS)
    if pick.random() < 0.5:
        return Question("format", f'Write the word "{word}" in capital letters.', lambda t: word.upper() in t)
    return Question(
        "format", f'Write a JSON object with the key "{word}" and the value 1.', lambda t: _is_json(t, word)
    )


def _is_json(text: str, key: str) -> bool:
    begin, end = text.find("{"), text.rfind("}")
    try:
        return json.loads(text[begin : end + 1]) in ({key: 1}, {key: "1"})
    except ValueError:
        return False


def _choice(pick: random.Random) -> Question:
    right, *others = pick.sample(list(SETS), 3)
    options = [pick.choice(SETS[name]) for name in (right, *others)]
    answer = options[0]
    pick.shuffle(options)
    asked = f"Which of these is a {right}: {', '.join(options)}? Answer with one word."
    return Question("choice", asked, lambda t: _first_named(t, options) == answer)


def _first_named(text: str, options: Sequence[str]) -> str | None:
    places = {option: text.lower().find(option.lower()) for option in options}
    found = [option for option in options if places[option] >= 0]
    return min(found, key=lambda option: places[option]) if found else None


def by_treetop(
    asked: list[Question], tokens: int, model: str, draft: str | None, **options: Unpack[EngineOptions]
) -> tuple[Answers, str]:
    """The answers of an engine, and where its model lies."""
    options["context_length"] = CONTEXT
    llm = LLM(model, draft, **options)
    began = time.perf_counter()
    params = SamplingParams(max_tokens=tokens)
    outputs = llm.chat([[{"role": "user", "content": question.text}] for question in asked], params)
    took = time.perf_counter() - began
    llm.close()
    return Answers([o.text for o in outputs], [o.token_ids for o in outputs], took), str(llm.model_path)


def by_transformers(asked: list[Question], tokens: int, folder: str, prompts: list[tuple[int, ...]]) -> Answers:
    """The answers of `transformers` in float32 to the same ids, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    began, given = time.perf_counter(), []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)[0, len(ids) :].tolist()
        given.append(tuple(out))
    took = time.perf_counter() - began
    return Answers([str(tokenizer.decode([*ids], skip_special_tokens=True)) for ids in given], given, took)


def main() -> int:
    """Ask every configuration, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--draft", default="builtin:smollm2-eagle3")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=["plain", "tree", "fp8", "w4a16", "fp8-kv", "transformers"])
    parser.add_argument("--folder", help="of the decoded weights, for transformers and quantize (default: the model's)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = questions(args.questions, args.seed)
    plain, where = by_treetop(asked, args.max_tokens, args.model, None)
    folder, rows, wrong = args.folder or where, [], False
    for name in args.only:
        given = plain if name == "plain" else ask(name, args, asked, folder)
        equal = sum(a == b for a, b in zip(given.tokens, plain.tokens, strict=True))
        wrong |= name in EXACT and equal < len(asked)
        right = {
            kind: sum(q.is_right(t) for q, t in zip(asked, given.texts, strict=True) if q.kind == kind)
            for kind in ("arithmetic", "copy", "format", "choice")
        }
        rows.append({"configuration": name, "right": sum(right.values()), **right, "equal_to_plain": equal,
                     "seconds": round(given.seconds, 1)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"questions": len(asked), "model": args.model, "rows": rows}, indent=1) + "\n")
    return int(wrong)


def ask(name: str, args: argparse.Namespace, asked: list[Question], folder: str) -> Answers:
    """The answers of a configuration other than plain."""
    if name == "tree":
        return by_treetop(asked, args.max_tokens, args.model, args.draft)[0]
    if name == "fp8-kv":
        return by_treetop(asked, args.max_tokens, args.model, None, kv_cache_dtype="fp8_e4m3")[0]
    if name == "transformers":
        llm = LLM(args.model, None, context_length=CONTEXT)
        one = SamplingParams(max_tokens=1)
        outputs = llm.chat([[{"role": "user", "content": question.text}] for question in asked], one)
        llm.close()
        return by_transformers(asked, args.max_tokens, folder, [o.prompt_token_ids for o in outputs])
    with tempfile.TemporaryDirectory() as other:
        status = treetop(["quantize", args.model, "--format", name, "--output", f"{other}/{name}"])
        if status:
            raise SystemExit(status)
        return by_treetop(asked, args.max_tokens, f"{other}/{name}", None)[0]


if __name__ == "__main__":
    sys.exit(main())
