"""What the recipe of SmolLM2's head does to data, without a model."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    yield importlib.import_module
    for path in RECIPE.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_assistants_tokens_alone_are_its_own(script):
    """From behind each opening to the end mark, which it wrote too; what the user says is not."""
    marks = script("answers").marks
    opening, end = [1, 7, 8], 2
    ids = [1, 5, 8, 30, 2, 1, 7, 8, 40, 41, 2, 1, 5, 8, 31, 2, 1, 7, 8, 42]
    assert [token for token, own in zip(ids, marks(ids, opening, end), strict=True) if own] == [40, 41, 2, 42]


def test_rows_hold_every_conversation_once_and_whole(script):
    """Random lengths: what a row holds under a number is that conversation, its positions count from 0."""
    packed, draw = script("head").packed, np.random.default_rng(0)
    given = [(draw.integers(0, 99, n), draw.random(n) < 0.5) for n in draw.integers(1, 90, 50)]
    pack = packed(given, 64)
    seen = set()
    for row in range(len(pack.ids)):
        for number in set(pack.document[row].tolist()) - {-1}:
            here = pack.document[row] == number
            ids, own = (part[:64] for part in given[number])
            assert pack.ids[row][here].tolist() == ids.tolist()
            assert pack.own[row][here].tolist() == own.tolist()
            assert pack.position[row][here].tolist() == list(range(len(ids)))
            assert number not in seen
            seen.add(number)
    assert len(seen) == len(given)


def test_a_conversation_sees_itself_alone_and_backwards(script):
    """The relation from first principles, for every pair."""
    document = torch.tensor([[0, 0, 1, 1, 1, -1]])
    seen = script("network").visible(document)[0, 0]
    for query in range(6):
        for key in range(6):
            assert bool(seen[query, key]) == (key <= query and document[0, query] == document[0, key])


def test_prompts_of_a_held_out_topic_are_never_trained_on(script):
    """The texts of all kinds, from passages of both sides."""
    prompts, texts = script("prompts"), script("texts")
    passages = [
        {"source": source, "name": str(n), "text": f"words of passage {n} " * 9, "held_out": n % 5 == 0}
        for n in range(60) for source in ("docs", "code")
    ]  # fmt: skip
    maker, held = prompts.Maker(passages, 0), [topic for topic in prompts.TOPICS if texts.held_out(topic)]
    assert held
    for kind, make in maker.kinds.items():
        for _ in range(200):
            made = make()
            says = any(f"passage {n} " in made.turns[0] for n in range(0, 60, 5))
            assert not says or made.held, kind
