"""Conformance: production rounds equal a dense oracle over the matrix, reduced so that every pair of values occurs."""

from itertools import combinations, product
from pathlib import Path

import pytest
from allpairspy import AllPairs

from support.engines import build, greedy
from support.grids import few_of
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop.debug.oracle import DensePair
from treetop.doctor.conformance import (
    AXES,
    WINDOW,
    Conformance,
    ConformanceCase,
    all_cases,
    calibrate,
    follow,
    quick_cases,
)
from treetop_debug.faults import fault

NAMES = list(AXES)


def pairwise() -> list[ConformanceCase]:
    return [ConformanceCase(*values) for values in AllPairs([list(values) for values in AXES.values()])]


@pytest.fixture(scope="module")
def conformance():
    with Conformance() as made:
        yield made


@pytest.fixture(scope="module")
def accepting_pair(tmp_path_factory) -> Pair:
    """A random pair of six tokens: a tree holds most of what can come, so the head is often right."""
    folder = tmp_path_factory.mktemp("accepting")
    target = save_random_llama(folder / "target", seed=8, vocab_size=6)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=6, seed=2, **layers))


# ---------------------------------------------------------------------------------------------- the matrix


def test_every_pair_of_values_occurs_in_the_reduced_cases():
    """Any two values of any two axes meet in some case, and no case lies outside the matrix."""
    cases = [tuple(getattr(case, name) for name in NAMES) for case in pairwise()]
    met = {(a, b, case[a], case[b]) for case in cases for a, b in combinations(range(len(NAMES)), 2)}
    wanted = {
        (a, b, x, y) for a, b in combinations(range(len(NAMES)), 2) for x, y in product(AXES[NAMES[a]], AXES[NAMES[b]])
    }
    assert met == wanted
    assert len(list(all_cases())) > 100 * len(cases)


@pytest.mark.parametrize(
    "case", few_of(pairwise(), *range(0, 32, 2)), ids=lambda case: "-".join(str(getattr(case, n)) for n in NAMES)
)
def test_a_case_of_the_matrix_agrees_with_the_dense_oracle(conformance, case):
    """At level 3, on poisoned buffers: every tree and every emitted token of every round of every row."""
    outcome = conformance.run(case)
    assert outcome.failure is None
    assert outcome.rounds > 0
    assert outcome.ties == 0 or case.dtype == "float32"


def test_the_document_says_how_many_cases_there_are():
    """How much was run is part of the result. The reduced cases are no fewer than the pairs of the two longest axes."""
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    assert f"at random}}: {len(list(all_cases())):,} cases" in text
    longest = sorted(len(values) for values in AXES.values())[-2:]
    assert longest[0] * longest[1] <= len(pairwise()) <= 2 * longest[0] * longest[1]


def test_the_doctors_quick_cases_hold_every_value_of_every_axis():
    cases = quick_cases(24)
    assert len(cases) == len({repr(case) for case in cases}) == 24
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases} == set(values), name


# ---------------------------------------------------------------------------------------------- accepted paths


DEEP = [  # (k, S, T), page size, chunk, runner
    ((1, 4, 5), 2, 7, "sim"),
    ((2, 3, 11), 1, 16, "off"),
    ((2, 5, 16), 16, 5, "sim"),
    ((4, 3, 16), 4, 64, "sim"),
    ((5, 2, 20), 1, 3, "off"),
]


@pytest.mark.parametrize(("shape", "page", "chunk", "graphs"), few_of(DEEP, 0, 4))
def test_rounds_that_accept_long_paths_agree_with_the_dense_oracle(accepting_pair, shape, page, chunk, graphs):
    """The random pair of the matrix accepts little; here paths are long, and batches grow and shrink under poison."""
    llm = build(
        accepting_pair,
        shape,
        page_size=page,
        chunked_prefill_size=chunk,
        graphs=graphs,
        check_level=3,
        context_length=64,
        max_running_requests=5,
        speculative_calibration="off",
    )
    calibrate(llm, page)
    prompts = accepting_pair.prompts([9, 1, 14, 4, 17, 6], seed=page)
    params = [greedy(n) for n in (12, 20, 8, 16, 10, 14)]
    oracle = DensePair(accepting_pair.target, accepting_pair.head)
    rounds, ties, failure = follow(llm, oracle, prompts, params)
    assert failure is None
    assert ties == 0
    assert sum(p.max_tokens - 1 for p in params) > 1.15 * rounds, "almost nothing was accepted"


def test_the_start_up_proof_raises_no_false_alarm_at_level_3(accepting_pair):
    """Rows of one batch may differ in their last bits, and in the proof they all write to the null page."""
    build(accepting_pair, (5, 2, 20), page_size=4, check_level=3, context_length=64, max_running_requests=5)


# ---------------------------------------------------------------------------------------------- conformance sees faults


SEEN_BY_THE_MATRIX = ["sgl-26628-twice", "sgl-25015", "sgl-27545", "column-ancestors", "chunk-tail"]
FAULTLESS = ConformanceCase("torch", "sim", 2, 2, 3, "largest", WINDOW, 5, "shuffled", "float64", True)
SEEN_ON_LONG_PATHS = ["sgl-26628-missed", "in-place-compaction"]


@pytest.mark.parametrize("name", SEEN_BY_THE_MATRIX)
def test_a_fault_makes_a_case_of_the_matrix_fail(conformance, name):
    """Without any guard, the comparison with the oracle alone finds the bug."""
    with fault(name):
        assert conformance.run(FAULTLESS, check_level=0).failure is not None


def test_the_case_that_each_of_them_makes_fail_agrees_without_them(conformance):
    assert conformance.run(FAULTLESS).failure is None


@pytest.mark.parametrize("name", SEEN_ON_LONG_PATHS)
def test_a_fault_of_the_accepted_path_makes_a_deep_case_fail(accepting_pair, name):
    """Bugs that need an accepted path show where paths are accepted."""
    oracle = DensePair(accepting_pair.target, accepting_pair.head)
    with fault(name):
        llm = build(
            accepting_pair, (2, 3, 11), page_size=2, context_length=64, check_level=0, speculative_calibration="off"
        )
        assert follow(llm, oracle, accepting_pair.prompts([9, 1, 14]), [greedy(12, whole=True)] * 3)[2] is not None


def test_a_fault_of_the_windows_table_stops_a_case(conformance):
    """Full-group addresses in the window's pool leave it."""
    case = ConformanceCase("torch", "off", 2, 2, 3, "largest", WINDOW, 5, "shuffled", "float64", True)
    with pytest.raises(IndexError), fault("sgl-24617"):
        conformance.run(case, check_level=0)
