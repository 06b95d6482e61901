"""Pairs that `recipes/nestling/variant.sh` trained: windows, sinks and experts with an EAGLE-3 head, and an MTP layer.

Prompts of 512 to 1500 tokens of files that no training saw. Figures recorded beside the checkpoints are by
`recipes/nestling/measure.py`, with the settings that stand there.
"""

import json
from pathlib import Path

import pytest

from support.engines import accept_lens, greedy, tokens
from treetop import LLM
from treetop.types.ids import FULL, WINDOW

FOLDER = Path(__file__).parents[1] / "checkpoints"
HYBRID, HEAD, MTP = FOLDER / "nestling-hybrid", FOLDER / "nestling-hybrid-eagle3", FOLDER / "nestling-mtp"
LARGEST = 8_000_000
OPTIONS = {"dtype": "float64", "device": "cpu", "context_length": 1664, "max_running_requests": 2, "page_size": 16}
TOGETHER = {"prefill_tokens_per_round": 256, "chunked_prefill_size": 256}
"""Prefills so fast beside rounds that two long prompts come to decode together."""
TREE, CHAIN = (4, 5, 16), (1, 5, 6)
FLOORS = {
    ("own", TREE): 3.9,
    ("own", CHAIN): 3.4,
    ("after-norm", TREE): 4.3,
    ("after-norm", CHAIN): 3.5,
    ("before-norm", TREE): 4.3,
    ("before-norm", CHAIN): 3.5,
}
"""A little below the recorded accept lengths, which a new training would move."""


def prompts(stride=1):
    lines = (FOLDER / "long_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[::stride]]


FEW = prompts(5)
"""Three of the twelve."""
FEW_FLOORS = {(HYBRID, TREE): 4.2, (HYBRID, CHAIN): 2.5, (MTP, TREE): 3.3, (MTP, CHAIN): 2.5}
"""What three prompts must reach. Their means scatter: the MTP tree has 3.58 here and 4.56 over all, the hybrid's 4.56
and 4.12; with fault `sgl-27545` the hybrid's has 4.0."""


def recorded(folder, name, shape) -> tuple[dict, float]:
    """The settings under which a figure was measured, and the accept length."""
    found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))[name]
    (result,) = (each for each in found["results"] if tuple(each["shape"]) == shape)
    assert result["differing_prompts"] == 0
    return found, result["accept_length"]


def with_tree(target, shape, **options) -> LLM:
    topk, num_steps, size = shape
    tree = {"speculative_eagle_topk": topk, "speculative_num_steps": num_steps, "speculative_num_draft_tokens": size}
    return LLM(str(target), **tree, **{**OPTIONS, **TOGETHER, **options})


def hybrid(shape, **options) -> LLM:
    return with_tree(HYBRID, shape, draft=str(HEAD), **options)


def mtp(shape, recurrence) -> LLM:
    return with_tree(MTP, shape, speculative_algorithm="MTP", speculative_mtp_recurrence=recurrence)


def mean_accept_length(outputs) -> float:
    lens = [accepted for each in accept_lens(outputs) for accepted in each]
    return 1 + sum(lens) / len(lens)


@pytest.fixture(scope="module")
def plain():
    """The 40 tokens that a target writes without drafts after a few prompts; made once a target."""
    made = {}

    def of(target):
        if target not in made:
            made[target] = tokens(LLM(str(target), draft=None, **OPTIONS).generate(FEW, greedy(40)))
        return made[target]

    return of


@pytest.mark.parametrize("folder", [HYBRID, HEAD, MTP], ids=lambda folder: folder.name)
def test_a_checkpoint_is_small(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST


@pytest.mark.parametrize(
    ("shape", "graphs"),
    [
        (TREE, "off"),
        pytest.param(TREE, "sim", marks=pytest.mark.slow),
        pytest.param(CHAIN, "off", marks=pytest.mark.slow),
    ],
)
def test_the_hybrid_writes_with_drafts_what_it_writes_without(plain, shape, graphs):
    """Contexts far past the window, prefix cache on and then hit, a window's pool a fraction of the full one."""
    llm = hybrid(shape, graphs=graphs)
    pages = llm.engine.layout.num_pages
    assert 4 * pages[WINDOW] < pages[FULL]
    first = llm.generate(FEW, greedy(40))
    assert all(len(output.prompt_token_ids) >= 512 for output in first)
    assert tokens(first) == plain(HYBRID)
    assert mean_accept_length(first) >= FEW_FLOORS[HYBRID, shape]
    (again,) = llm.generate(FEW[-1:], greedy(40))  # whose window nobody has taken the pages of yet
    assert again.token_ids == plain(HYBRID)[-1]
    assert again.metrics.num_cached_tokens >= 512
    llm.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recurrence"),
    [
        (TREE, "after-norm"),
        pytest.param(TREE, "before-norm", marks=pytest.mark.slow),
        pytest.param(CHAIN, "after-norm", marks=pytest.mark.slow),
        pytest.param(CHAIN, "before-norm", marks=pytest.mark.slow),
    ],
)
def test_the_mtp_target_writes_with_its_layer_what_it_writes_without(plain, shape, recurrence):
    outputs = mtp(shape, recurrence).generate(FEW, greedy(40))
    assert tokens(outputs) == plain(MTP)
    assert mean_accept_length(outputs) >= FEW_FLOORS[MTP, shape]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "after-norm", "before-norm"])
@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_the_recorded_accept_length_is_met(shape, name):
    """Over the prompts and settings of the record; no near tie of these prompts should move it by more."""
    settings, length = recorded(HEAD if name == "own" else MTP, name, shape)
    llm = hybrid(shape) if name == "own" else mtp(shape, name)
    measured = mean_accept_length(llm.generate(prompts(settings["stride"]), greedy(settings["new_tokens"], whole=True)))
    assert measured == pytest.approx(length, rel=0.02)
    assert measured >= FLOORS[name, shape]


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_windows_cost_the_trained_head_less_than_a_tenth(shape):
    """The records themselves: the same prompts, settings and recipe, with and without windows."""
    own, with_windows = recorded(HEAD, "own", shape)
    other, without = recorded(HEAD, "unwindowed", shape)
    assert [own[key] for key in ("prompts", "new_tokens")] == [other[key] for key in ("prompts", "new_tokens")]
    assert with_windows >= 0.9 * without


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_the_trained_layer_drafts_alike_by_both_recurrences(shape):
    """It was trained after the norm, as MiMo's reference goes on; before it, it was measured 0.1 and 0.5 % better.

    The next pass begins with a norm of its own, so only the weights of the last norm tell the two apart.
    """
    before, after = (recorded(MTP, name, shape)[1] for name in ("before-norm", "after-norm"))
    assert after == pytest.approx(before, rel=0.02)
