"""The runs that are frozen: engines, and what each of them is asked, in this order.

A run is one call with one or more prompts. Nothing is drawn at random here: the axes turn at different rates, so that
every pair of a model and a tree shape meets many sizes of pages, chunks and batches.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from frozen.checkpoints import EOS, Pair
from frozen.names import build, generate
from treetop import LLM

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Run:
    """One call. prompts: (length, seed), (length, seed, shared) with a common beginning, a list of ids, or text."""

    prompts: tuple[Any, ...]
    params: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Setup:
    """An engine, and its runs one after the other."""

    name: str
    pair: str
    shape: Shape | None
    options: dict[str, Any]
    runs: tuple[Run, ...]
    retracts: bool = field(default=False)


SHAPES: tuple[Shape | None, ...] = (
    (4, 5, 16), (1, 3, 4), (2, 3, 6), None, (3, 4, 11), (1, 1, 2), (8, 2, 20), (2, 1, 3), (4, 3, 37), (1, 5, 6),
)  # fmt: skip
PAGES, CHUNKS, ROWS = (4, 16, 1, 8, 2, 32), (16, 512, 7, 33, 64), (2, 4, 1, 3, 5)
WORDS = ("def f(", "the cat", "import os", "x = 1", "class A:")


def setups() -> list[Setup]:
    """All engines, in order."""
    found = []
    for index, (pair, shape) in enumerate(product(("llama", "qwen3", "window", "text"), SHAPES)):
        options = {
            "page": PAGES[index % 6],
            "chunk": CHUNKS[index % 5],
            "rows": ROWS[(index // 2) % 5],
            "context": 96,
            "graphs": ("off", "sim")[index % 2],
            "overlap": index % 3 == 0,
            "level": (1, 2, 3, 0)[index % 4],
            "radix": index % 4 in (0, 3) and pair != "window",  # it refuses windows
        }
        name = f"{pair}-{'plain' if shape is None else '.'.join(map(str, shape))}"
        found.append(Setup(name, pair, shape, options, _common_runs(index, pair)))
    return [*found, *_walls(), *_retracting(), *_texts(), *_hostile(), HOSTILE_PADDED]


def perform(llm: LLM, pair: Pair, run: Run) -> list[list[Any]]:
    """The records of one run."""
    return generate(llm, [_prompt(pair, each) for each in run.prompts], run.params)


def build_setup(setup: Setup, pair: Pair) -> LLM:
    return build(pair.target, pair.head, setup.shape, setup.options)


def build_plain(setup: Setup, pair: Pair) -> LLM:
    """Who is right: the same context, one row, no draft, no cache."""
    return build(pair.target, pair.head, None, {"context": setup.options["context"], "rows": 1})


def _prompt(pair: Pair, given: Any) -> Any:
    if isinstance(given, str | list):
        return given
    length, seed, *shared = given
    ids = pair.prompt(length, seed)
    return [*pair.prompt(shared[0], 77), *ids[shared[0] :]] if shared else ids


def _greedy(**changes: Any) -> dict[str, Any]:
    return {"max_tokens": 16, "ignore_eos": True, **changes}


def _sampled(index: int, **changes: Any) -> dict[str, Any]:
    """Each combination of filters in turn."""
    filters = (
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 7, "top_p": 0.9},
        {"top_p": 0.7, "min_p": 0.05},
    )
    chosen = filters[index % 6]
    return {"max_tokens": 14, "temperature": (0.7, 1.0, 1.6)[index % 3], "seed": 1000 + index, **chosen, **changes}


def _common_runs(index: int, pair: str) -> tuple[Run, ...]:
    """Greedy and ragged; sampled with EOS; stop ids and small limits; prompts that begin alike, twice."""
    lengths = (3, 17, 30, 9, 1, 24, 40, 12)
    ragged = tuple((lengths[(index + i) % 8], 10 * index + i) for i in range(1 + index % 4))
    known = {"llama": 30, "qwen3": 50, "window": 9, "text": 160}[pair]
    stops = ({"stop_token_ids": tuple(range(5, known, 3))}, {"max_tokens": 1}, {"max_tokens": 2 + index % 5})
    shared = tuple((22 + i, 30 * index + i, 18) for i in range(2))
    more = (*shared[:1], (25, 30 * index + 2, 20))
    return (
        Run(ragged, tuple(_greedy(max_tokens=12 + (5 * index + 7 * i) % 9) for i in range(len(ragged)))),
        Run(ragged[:2], tuple(_sampled(index + i, ignore_eos=index % 3 == 0) for i in range(len(ragged[:2])))),
        Run(tuple((6 + i, 20 * index + i) for i in range(3)), tuple(_greedy(**each) for each in stops)),
        Run(shared, (_greedy(max_tokens=8), _sampled(index + 3, max_tokens=9))),
        Run(more, (_greedy(max_tokens=10, ignore_eos=False), _greedy(max_tokens=6))),
    )


def _walls() -> list[Setup]:
    """Requests that end at the context, in the middle of a path; one prompt leaves room for one token."""
    found = []
    for index, (pair, shape) in enumerate((("llama", (4, 5, 16)), ("window", (2, 3, 6)), ("text", (1, 5, 6)))):
        options = {"page": (4, 1, 16)[index], "rows": 4, "context": 40, "overlap": index == 1, "level": 3 - index}
        runs = (
            Run(((39, 1), (30, 2), (35, 3)), (_greedy(max_tokens=10**6),) * 3),
            Run(((38, 4), (20, 5)), (_sampled(index, max_tokens=99, ignore_eos=True), _greedy(max_tokens=20))),
        )
        found.append(Setup(f"wall-{pair}", pair, shape, options, runs))
    return found


def _retracting() -> list[Setup]:
    """Four requests in a pool for little more than one: the youngest go back to the queue and resume."""
    found = []
    kinds = (("llama", (2, 3, 6)), ("text", (4, 5, 16)), ("window", None), ("qwen3", (1, 3, 4)))
    for index, (pair, shape) in enumerate(kinds):
        options = {
            "page": (4, 2, 4, 1)[index],
            "rows": 4,
            "context": 64,
            "pool": 84,
            "chunk": 16,
            "level": 1 + index % 3,
        }
        options |= {"overlap": index % 2 == 1, "radix": index in (1, 3), "graphs": ("off", "sim")[index % 2]}
        prompts = tuple((8 + 3 * i, 500 + 10 * index + i) for i in range(4))
        runs = (
            Run(prompts, tuple(_greedy(max_tokens=34 + i) for i in range(4))),
            Run(prompts, tuple(_sampled(index + i, max_tokens=30, ignore_eos=True) for i in range(4))),
        )
        found.append(Setup(f"retract-{pair}", pair, shape, options, runs, retracts=True))
    return found


def _texts() -> list[Setup]:
    """Text in and out: stop strings of one and several tokens, several at once, together with ids and limits."""
    found = []
    stops = (("h",), ("ca", "zz"), ("b/v", "e"), ("=",), ("nothing of the kind",))
    for index, shape in enumerate(((4, 5, 16), None)):
        options = {"page": 8, "rows": 3, "context": 128, "graphs": ("sim", "off")[index], "radix": index == 0}
        runs = [
            Run(
                (WORDS[i], WORDS[(i + 1) % 5]),
                (_greedy(max_tokens=24, stop=stop), _greedy(max_tokens=10 + i, stop=stop)),
            )
            for i, stop in enumerate(stops)
        ]
        runs.append(Run((WORDS[0],), (_sampled(4, stop=("a", "e"), max_tokens=30),)))
        runs.append(Run(WORDS[:3], (_greedy(max_tokens=20, stop=("c",), stop_token_ids=(89, 33)),) * 3))
        found.append(Setup(f"stops-{'plain' if shape is None else 'tree'}", "text", shape, options, tuple(runs)))
    return found


def _hostile() -> list[Setup]:
    """A target that says the last token again, EOS included; all rows are live."""
    found = []
    for index, shape in enumerate(((4, 5, 16), (1, 3, 4), (2, 3, 6), None)):
        options = {"page": (1, 4, 16, 2)[index], "rows": 2, "context": 80, "radix": index < 2, "overlap": index == 1}
        options |= {"graphs": ("sim", "off")[index % 2], "level": (3, 2, 1, 1)[index]}
        runs = (
            Run(((5, 1), (17, 2)), (_greedy(max_tokens=20),) * 2),
            Run(((5, 1),), (_sampled(index, max_tokens=30),)),
            Run(((9, 3), (9, 4)), (_greedy(max_tokens=17), _greedy(max_tokens=17))),
            Run(([9, 12, EOS],), (_greedy(ignore_eos=False),)),
            Run(([9, EOS], [12]), (_greedy(), _greedy(stop_token_ids=(EOS, 12)))),
        )
        found.append(Setup(f"repeat-{index}", "repeat", shape, options, runs))
    return found


HOSTILE_PADDED = Setup(
    "repeat-padded",
    "repeat",
    (4, 5, 16),
    {"page": 4, "rows": 4, "context": 80},
    (Run(((5, 1), (17, 2), (30, 3)), (_greedy(max_tokens=20),) * 3),),
)
"""Three rows in a batch of four: the padding row meets a target that says token 0 after token 0."""
