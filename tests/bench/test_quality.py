"""What `benchmarks/quality.py` asks, and what it takes for right."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("quality")
    sys.modules.pop("quality", None)


def test_a_seed_gives_the_same_questions_of_each_kind(quality):
    """Figures of two runs are of the same questions; another seed gives others."""
    one, same, other = (quality.questions(40, seed) for seed in (0, 0, 1))
    assert [q.text for q in one] == [q.text for q in same] != [q.text for q in other]
    assert {kind: sum(q.kind == kind for q in one) for kind in ("arithmetic", "copy", "format", "choice")} == {
        "arithmetic": 10, "copy": 10, "format": 10, "choice": 10,
    }  # fmt: skip


def test_a_right_answer_is_right_and_another_is_not(quality):
    """For every kind, with the answer worked out from the question's words alone."""
    for question in quality.questions(80, 3):
        words = question.text
        match question.kind:
            case "arithmetic":
                a, sign, b = words.removeprefix("What is ").split("?")[0].split()
                right = str(int(a) + int(b) if sign == "+" else int(a) - int(b))
            case "copy":
                right = words.split(": ")[1].capitalize() + "."
            case "format":
                word = words.split('"')[1]
                right = word.upper() if "capital" in words else f'```json\n{{"{word}": 1}}\n```'
            case _:
                name = words.split(" is a ")[1].split(":")[0]
                right = f"The {next(o for o in quality.SETS[name] if o in words)} is."
        assert question.is_right(right), (words, right)
        assert not question.is_right("I do not know."), words


def test_the_option_named_first_is_the_answer(quality):
    """An answer that names two options has chosen the first."""
    choice = next(q for q in quality.questions(8, 0) if q.kind == "choice")
    options = choice.text.split(": ")[1].split("?")[0].split(", ")
    right = next(option for option in options if choice.is_right(option))
    wrong = next(option for option in options if option != right)
    assert choice.is_right(f"{right}, not {wrong}")
    assert not choice.is_right(f"{wrong}, not {right}")
