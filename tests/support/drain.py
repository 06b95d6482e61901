"""A batch that drains, and a launcher that crosses from eager rounds to captured ones while it does."""

import json

from support.engines import greedy
from treetop.checkpoints.folder import resolve_folder
from treetop.engine.rounds import Eager


def held_out(llm, count: int, longest: int = 90) -> list[list[int]]:
    """Prompts of the embedded pair as ids, of lengths 5 to `longest`, evenly spaced over the held-out file."""
    lines = (resolve_folder("builtin:nestling").parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(lines[i * len(lines) // count])["prompt"] for i in range(count)]
    return [llm.tokenizer.encode(text)[: 5 + i * (longest - 5) // count] for i, text in enumerate(chosen)]


def staggered(count: int, first: int, step: int):
    """Greedy parameters under which requests end one after the other, the last places of the batch first or last."""
    return [greedy(first + step * ((7 * i) % count)) for i in range(count)]


class Crossover:
    """Rounds of buckets above `largest` run eagerly, the others as the engine's own launcher has them (sgl-28569)."""

    def __init__(self, engine, largest: int) -> None:
        self._own, self._eager, self._largest = engine.launcher, Eager(engine.runner), largest
        self.launched: dict[str, set[int]] = {"own": set(), "eager": set()}

    def launch(self, key, *rest):
        eager = key.bucket > self._largest
        self.launched["eager" if eager else "own"].add(key.bucket)
        return (self._eager if eager else self._own).launch(key, *rest)

    def __getattr__(self, name):
        return getattr(self._own, name)


def watch_rows(llm) -> list[int]:
    """From now on, the number of live rows of each round."""
    seen: list[int] = []
    llm.engine.observer = lambda plan, tree, accepted: seen.append(len(plan.rows))
    return seen
