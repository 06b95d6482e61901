"""Tokens a second of treetop, `transformers` and llama.cpp on the same prompts and the same weights, on this CPU.

    python recipes/smollm2/folder.py build/smollm2/target32 --dtype float32
    python recipes/smollm2/peers.py --turns 2

Greedy, one request at a time; chat template and prompt are part of a call. treetop decodes plainly and with the head's
tree, in float32, in bfloat16, and with the file's 4 bits packed; `transformers` in float32, plainly and by prompt
lookup, its assisted generation that needs no second model (another of this vocabulary is larger); llama.cpp, where `llama-cpp-python` is installed, reads the GGUF file as it is (Q4_1). Each
runs in a process of its own, in turns; a figure is the best turn. Their tokens are
compared: `transformers` has the same weights, llama.cpp computes in fewer bits.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from texts import BUILD

from treetop import LLM, SamplingParams
from treetop.bench.prompts import as_questions, read_kinds
from treetop.checkpoints.folder import resolve_folder

NUMBERS: dict[str, dict[str, str | bool]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "packed": {"dtype": "bfloat16", "dequantize_weights": False},
}
"""In what treetop computes: options by name."""
Answer = Callable[[list[int]], list[int]]


def treetop(args: argparse.Namespace, shape: str | None, numbers: str) -> Answer:
    """shape: S,k,T; None decodes plainly. numbers: one of `NUMBERS`."""
    options = {"max_running_requests": 1, "context_length": args.context, "device": "cpu", **NUMBERS[numbers]}
    if shape is not None:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        options |= dict(zip(names, map(int, shape.split(",")), strict=True))
    llm = LLM(args.model, None if shape is None else args.head, **options)
    params = SamplingParams(max_tokens=args.max_tokens)
    return lambda ids: list(llm.generate([ids], params)[0].token_ids)


def transformers(args: argparse.Namespace, lookup: int | None) -> Answer:
    """lookup: tokens that prompt lookup proposes; None decodes plainly."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    more = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}

    def answer(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=args.max_tokens, do_sample=False, **more
            )
        return out[0, len(ids) :].tolist()

    return answer


def llama_cpp(args: argparse.Namespace) -> Answer:
    from llama_cpp import Llama

    (file,) = sorted(resolve_folder(args.model).glob("*.gguf"))
    model = Llama(str(file), n_ctx=args.context, n_threads=torch.get_num_threads(), verbose=False)

    def answer(ids: list[int]) -> list[int]:
        found: list[int] = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            found.append(token)
            if len(found) == args.max_tokens or token == model.token_eos():
                break
        model.reset()
        return found

    return answer


_FIRST = "treetop, plain, float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--head", default="builtin:smollm2-eagle3")
    parser.add_argument("--folder", type=Path, default=BUILD / "target32", help="what folder.py wrote")
    parser.add_argument("--shapes", nargs="+", default=["5,4,8", "5,4,16"])
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--treetop-alone", action="store_true", help="without transformers and llama.cpp")
    parser.add_argument("--only", help="one system, in this process; otherwise each in a process of its own")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measured(args, args.only)))
        return
    kinds = ["plain", *(f"tree ({shape})" for shape in args.shapes)]
    names = [f"treetop, {kind}, {numbers}" for numbers in NUMBERS for kind in kinds]
    if not args.treetop_alone:
        names += ["transformers, plain", "transformers, prompt lookup"]
        if importlib.util.find_spec("llama_cpp") is not None:
            names.append("llama.cpp, Q4_1")
        else:
            print("llama-cpp-python is not installed: without it")
    best: dict[str, float] = {}
    said: dict[str, list[list[int]]] = {}
    for _ in range(args.turns):
        for name in names:
            found = subprocess.run([sys.executable, *sys.argv, "--only", name], stdout=subprocess.PIPE, check=True)
            speed, said[name] = json.loads(found.stdout.splitlines()[-1])
            best[name] = max(best.get(name, 0.0), speed)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, speed in best.items():
        equal = sum(a == b for a, b in zip(said[name], said[_FIRST], strict=True))
        ratio = speed / best[_FIRST]
        print(
            f"{name:36} {speed:6.1f} tokens/s {ratio:5.2f} of plain in float32, {equal} of {len(said[name])} answers equal"
        )


def measured(args: argparse.Namespace, name: str) -> tuple[float, list[list[int]]]:
    """Tokens a second of one system, and its answers."""
    asked = [text for texts in read_kinds(None).values() for text in texts[: args.prompts]]
    folder = resolve_folder(args.model)
    prompts, _ = as_questions(folder, args.context, asked)
    if name.startswith("treetop"):
        shape = None if "plain" in name else name.partition("(")[2].partition(")")[0]
        answer = treetop(args, shape, name.rpartition(", ")[2])
    elif name.startswith("transformers"):
        answer = transformers(args, None if "plain" in name else 5)
    else:
        answer = llama_cpp(args)
    answer(prompts[0])
    started_s = time.perf_counter()
    answers = [answer(ids) for ids in prompts]
    return sum(map(len, answers)) / (time.perf_counter() - started_s), answers


if __name__ == "__main__":
    main()
