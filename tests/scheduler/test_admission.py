"""Who gets a row, by what requests have been, and how large steps are while rows are empty and prompts wait."""

import pytest

from support.fake_core import PagedEngine, ask, make_core
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.policy import FixedShape
from treetop.types.ids import FULL
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape


def served(core, requests):
    """All of them, added at once: their tokens, and the most rows that ran."""
    for request in requests:
        core.add(request)
    got, most = {request.request_id: [] for request in requests}, 0
    while core.scheduler.has_work:
        for update in core.step():
            assert update.error is None
            got[update.request_id] += update.new_ids
        most = max(most, len(core.scheduler.rows.by_row))
        core.scheduler.check_integrity()
    return got, most


def burst(first, count=16, max_tokens=100):
    return [ask(first + number, [7 * number + 1, 3], max_tokens, ignore_eos=True) for number in range(count)]


@pytest.mark.parametrize("learned", [False, True])
def test_requests_wait_for_pages_that_those_that_run_will_want(learned):
    """Pages for four requests of 102 tokens, and 16 rows: with nothing known all enter, and are retracted in turn; by
    what requests have been as many enter as will stay. Tokens are the same.
    """
    core = make_core(PagedEngine, rows=16, context=128, pages=112)
    if learned:
        served(core, burst(0))
        before = core.scheduler.num_retractions
    got, most = served(core, burst(100))
    assert all(len(tokens) == 100 for tokens in got.values())
    for number in range(16):
        assert got[100 + number] == list(range(4, 104))
    if learned:
        assert most < 10
        assert core.scheduler.num_retractions - before < 4
    else:
        assert most == 16
        assert core.scheduler.num_retractions > 12


def test_one_alone_always_enters():
    """However long requests have been: pools hold one at the context wall."""
    core = make_core(PagedEngine, rows=4, context=128, pages=40)
    served(core, burst(0, 20))
    got, most = served(core, burst(100, 2, 120))
    assert [len(tokens) for tokens in got.values()] == [120, 120]
    assert most >= 1


def test_lengths_are_told_once_enough_was_seen():
    """After 16 requests and each 64, prompt and output together; those that were aborted count for nothing."""
    told = []
    core = make_core(rows=4)
    core.scheduler._lengths._keep = told.append
    core.add(ask(999, [1, 2, 3], 400, ignore_eos=True))
    core.step()
    core.abort(999)
    served(core, burst(0, 15, 30))
    assert told == []
    served(core, burst(50, 1, 30))
    assert told == [pytest.approx(32)]
    served(core, burst(100, 48, 30))
    assert told == [pytest.approx(32)] * 2


def test_a_step_is_as_large_whoever_waits():
    """Beside rounds it has the usual size, and as many nodes as the round that runs now; a mixed one is larger by as
    much as more rows would decode. A target for gaps, and a size that was asked for, are kept.
    """
    group, chain, tree = (KVGroup(FULL, 1, paired(1, 8)),), SpecShape(1, 3, 4), SpecShape(4, 5, 16)
    layout = Layout((PLAIN, chain, tree), 16, 256, 40_000, 8192, group, 10**6)
    policy = FixedShape(tree)
    budget = PrefillBudget(layout, PrefillCosts(512, 2048, None, 1024), None, shape=lambda: policy.shape)
    assert {budget.tokens(64, 0, waiting) for waiting in (0, 1, 192, 1000)} == {2048}
    assert budget.tokens(256, 0, 1000) == 4096
    assert budget.tokens(0, 0, 1000) == 8192
    assert [budget.tokens(64, 0, waiting, mixed=True) for waiting in (0, 1, 4, 1000)] == [1024, 1280, 2048, 8192]
    asked = PrefillBudget(layout, PrefillCosts(512, 2048, None), None, 700, shape=lambda: PLAIN)
    assert asked.tokens(64, 0, 1000) == 700
    gaps = PrefillBudget(layout, PrefillCosts(512, 2048, None), 0.05, shape=lambda: PLAIN)
    assert gaps.tokens(64, 0, 1000) == gaps.tokens(64, 0)
    assert not budget.goes_on(256, 6000)
    for policy.shape in (chain, PLAIN):
        assert budget.tokens(256, 0) == 2048
        assert budget.goes_on(256, 6000)
    assert budget.tokens(64, 0, 4, mixed=True) == 1088
