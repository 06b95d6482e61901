"""The target answers every prompt with this engine: build/smollm2/answers/NUMBER.npz, what the head is trained on.

    python recipes/smollm2/answers.py --model FOLDER --limit-s 420
    python recipes/smollm2/answers.py --model FOLDER --prompts heldout --greedy

Resumable: a part of 1,000 prompts is a file, and a part that is there is not written again. A conversation is answered
turn by turn. A file: ids [tokens] uint16, all conversations one behind another, each as the chat template has it;
own [tokens] bool, which of them the target wrote; starts [conversations] int64; kinds [conversations], names.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from texts import BUILD

from treetop import LLM, SamplingParams

PART = 1000
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # as its chat template has it


def marks(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """Which ids the assistant wrote: from behind each `opening` to the next `end`, which is one of them."""
    own, inside, width = [False] * len(ids), False, len(opening)
    for place, token in enumerate(ids):
        own[place] = inside
        if inside and token == end:
            inside = False
        elif ids[place + 1 - width : place + 1] == opening:
            inside = True
    return own


class Writer:
    """Answers conversations with one engine."""

    def __init__(self, llm: LLM, max_tokens: int, context: int) -> None:
        self._llm, self._max_tokens, self._context = llm, max_tokens, context
        encode = llm.tokenizer.encode
        self._opening, self._end = encode("<|im_start|>assistant\n"), encode("<|im_end|>")[0]

    def answer(self, rows: list[dict], greedy: bool, seed: int) -> list[tuple[str, list[int]]]:
        """(kind, ids) of each conversation, its last answer's tokens as they were drawn."""
        said: list[list[dict]] = [[] for _ in rows]
        ids: list[list[int]] = [[] for _ in rows]
        for turn in range(max(len(row["turns"]) for row in rows)):
            asked = [
                i
                for i, row in enumerate(rows)
                if len(row["turns"]) > turn and (turn == 0 or ids[i]) and self._fits(len(ids[i]), row["turns"][turn])
            ]
            if not asked:
                continue
            params = []
            for i in asked:
                said[i].append({"role": "user", "content": rows[i]["turns"][turn]})
                temperature = 0.0 if greedy else rows[i]["temperature"]
                params.append(SamplingParams(temperature=temperature, max_tokens=self._max_tokens, seed=seed + i))
            prompts = [self._prompt(said[i]) for i in asked]
            for i, output in zip(asked, self._llm.generate(prompts, params), strict=True):
                said[i].append({"role": "assistant", "content": output.text})
                ids[i] = [*output.prompt_token_ids, *output.token_ids]
        return [(row["kind"], each) for row, each in zip(rows, ids, strict=True) if each]

    def _prompt(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation, as the chat template lays it out, up to where the assistant's turn begins."""
        turns = [{"role": "system", "content": SYSTEM}, *messages]
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        return self._llm.tokenizer.encode(text + "<|im_start|>assistant\n")

    def _fits(self, before: int, text: str) -> bool:
        return before + len(self._llm.tokenizer.encode(text)) + 64 + self._max_tokens <= self._context

    def save(self, file: Path, answered: list[tuple[str, list[int]]]) -> int:
        """Write a part; returns how many tokens the target wrote."""
        own = [marks(ids, self._opening, self._end) for _, ids in answered]
        lengths = [len(ids) for _, ids in answered]
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            file,
            ids=np.concatenate([np.asarray(ids, np.uint16) for _, ids in answered]),
            own=np.concatenate([np.asarray(each, bool) for each in own]),
            starts=np.cumsum([0, *lengths[:-1]]),
            kinds=np.asarray([kind for kind, _ in answered]),
        )
        return sum(map(sum, own))


def main() -> None:
    """Answer part after part, until all are there or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", default="prompts", help="prompts or heldout")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument(
        "--shard", default="0/1", help="I/N: every Nth part, from the Ith on; several processes share a GPU"
    )
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument("--limit-s", type=float, default=480)
    args = parser.parse_args()
    began = time.perf_counter()
    rows = [json.loads(line) for line in (BUILD / f"{args.prompts}.jsonl").open(encoding="utf-8")]
    folder = BUILD / ("answers" if args.prompts == "prompts" else args.prompts)
    llm = LLM(
        args.model, None, context_length=args.context, max_running_requests=args.rows,
        chunked_prefill_size=8192, prefill_tokens_per_round=8192, mem_fraction_static=args.memory,
    )  # fmt: skip
    writer = Writer(llm, args.max_tokens, args.context)
    for part, start in enumerate(range(0, len(rows), PART)):
        file = folder / f"{part:03}.npz"
        if part % int(args.shard.split("/")[1]) != int(args.shard.split("/")[0]) or file.exists():
            continue
        if time.perf_counter() - began > args.limit_s:
            print(f"time is up before part {part}; run this again")
            break
        since = time.perf_counter()
        own = writer.save(file, writer.answer(rows[start : start + PART], args.greedy, start))
        took = time.perf_counter() - since
        print(f"part {part}: {own / 1e6:.2f} M tokens written in {took:.0f} s, {own / took:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
