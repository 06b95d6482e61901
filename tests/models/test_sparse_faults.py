"""Faults of compressed and sparse attention: each is caught by its guard, and does harm where nobody looks."""

import pytest

from support.engines import build, greedy, tokens
from support.families import FAMILIES
from treetop_debug.model_faults import SPARSE_FAULTS

LIMITS = (3, 9, 12)
"""The longest prompt leaves first, so that the batch shrinks and its rows move up."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return FAMILIES["glm 5.2"].save(tmp_path_factory.mktemp("sparse"), seed=5).pair


def generated(pair, check_level):
    llm = build(pair, (3, 4, 14), context_length=96, page_size=4, check_level=check_level, max_running_requests=4)
    try:
        return tokens(llm.generate(pair.prompts([50, 12, 20], seed=3), [greedy(limit) for limit in LIMITS]))
    finally:
        llm.close()


@pytest.fixture(scope="module")
def right(pair):
    """At level 2, where nothing fires; `test_families.py` compares this model's tokens with `transformers`."""
    return generated(pair, check_level=2)


@pytest.mark.parametrize("name", SPARSE_FAULTS)
def test_a_fault_is_caught_by_its_guard_and_does_harm_without(pair, right, name):
    """Those without a guard of their own are caught by the comparison of tokens."""
    fault = SPARSE_FAULTS[name]
    if fault.level is not None:
        with fault.active(), pytest.raises(Exception, match=fault.guard):
            generated(pair, check_level=fault.level)
    with fault.active():
        assert generated(pair, check_level=0) != right
