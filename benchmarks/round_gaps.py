"""How much long prompts that stream in stretch the time between two decode rounds, on one thread of a CPU.

    python benchmarks/round_gaps.py [--prompt-tokens 8192] [--prefill-tokens-per-round 64 256] [--rows 8] [--rounds 100]

The embedded pair, with as many positions as the prompts need and a forced accept length: its text means nothing then,
its time does. `rows` requests decode, first alone, then while a prompt is always being processed. One JSON object a
line: milliseconds of processor time between the ends of two rounds, median, p90 and p99, and their ratio; and how many
prompt tokens a second were processed meanwhile.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch

from treetop import LLM, SamplingParams
from treetop.checkpoints.folder import resolve_folder
from treetop.types.ids import RequestId
from treetop.types.messages import PrefillPlan, RoundPlan
from treetop.types.requests import EngineRequest

PAIR = ("nestling", "nestling-eagle3")
ROOM = 2048
"""Positions that a decoding request may fill."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def with_positions(folder: Path, positions: int) -> None:
    """The embedded pair in `folder`, with so many positions."""
    for name in PAIR:
        shutil.copytree(resolve_folder(f"builtin:{name}"), folder / name)
        path = folder / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions}))


class Load:
    """Requests that decode, and prompts beside them."""

    def __init__(self, folder: Path, rows: int, prompt_tokens: int, tokens_per_round: int | None) -> None:
        options: dict[str, Any] = {} if tokens_per_round is None else {"prefill_tokens_per_round": tokens_per_round}
        self.llm = LLM(
            str(folder / PAIR[0]),
            str(folder / PAIR[1]),
            max_running_requests=rows + 1,
            max_total_tokens=(rows + 1) * ROOM + prompt_tokens + ROOM,
            simulate_accept_length=4,
            disable_radix_cache=True,
            **options,
        )
        self._rows, self._prompt_tokens = rows, prompt_tokens
        self._ids, self._random = count(10**6), random.Random(0)
        for _ in range(rows):
            self._add(64, ROOM - 64)

    def gaps_ms(self, rounds: int, prompts: bool) -> tuple[dict[str, float], float]:
        """Of so many rounds, whose ends are one gap more; and the prompt tokens processed in a second of all that."""
        scheduler, ends, tokens = self.llm.scheduler, list[float](), 0
        while len(ends) <= rounds:
            queues = scheduler.queues
            if prompts and len(queues.by_id) == self._rows:
                self._add(self._prompt_tokens, 1)
            plan = scheduler.plan()
            assert plan is not None, "the requests that decode have ended: ask for fewer --rounds"
            scheduler.commit(plan, self.llm.engine.step(plan))
            if isinstance(plan, RoundPlan):
                ends.append(time.process_time())
            elif isinstance(plan, PrefillPlan) and ends:
                tokens += sum(len(chunk.token_ids) for chunk in plan.chunks)
        gaps = sorted(1e3 * (b - a) for a, b in pairwise(ends))
        found = {name: round(gaps[int(share * (len(gaps) - 1))], 1) for name, share in QUANTILES.items()}
        return found, tokens / (ends[-1] - ends[0])

    def _add(self, prompt_tokens: int, max_tokens: int) -> None:
        prompt = tuple(self._random.randrange(5, 4000) for _ in range(prompt_tokens))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.llm.scheduler.add(EngineRequest(RequestId(next(self._ids)), prompt, params, 0))


def measured(folder: Path, args: argparse.Namespace, tokens_per_round: int | None) -> dict[str, Any]:
    load = Load(folder, args.rows, args.prompt_tokens, tokens_per_round)
    load.gaps_ms(20, False)
    (alone, _), (beside, tokens_per_s) = load.gaps_ms(args.rounds, False), load.gaps_ms(args.rounds, True)
    load.llm.close()
    return {
        "prefill_tokens_per_round": load.llm.engine.config.prefill_tokens_per_round,
        "alone_ms": alone,
        "with_prompts_ms": beside,
        "ratio": {name: round(beside[name] / alone[name], 2) for name in QUANTILES},
        "prompt_tokens_per_s": round(tokens_per_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prefill-tokens-per-round", type=int, nargs="*", help="instead of the default")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        with_positions(Path(name), args.prompt_tokens + ROOM)
        for tokens in args.prefill_tokens_per_round or [None]:
            print(json.dumps(measured(Path(name), args, tokens)), flush=True)


if __name__ == "__main__":
    main()
