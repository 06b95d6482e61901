"""Who keeps a draft while the head is watched."""

import pytest

from treetop.scheduler.drafting import Drafting
from treetop.types.layout import PLAIN


class Stub:
    def __init__(self, **held):
        self.__dict__.update(held)


def request_of(deferred, drafts=True):
    held = Stub(lease=Stub(drafts=drafts), deferred=deferred)
    return Stub(params=Stub(speculative=True), held=held, constrained=None)


@pytest.mark.parametrize(("rows", "stay"), [(128, 2), (127, 1), (63, 1)])
def test_of_more_newcomers_than_a_trial_takes_the_last_to_come_keep_their_draft(rows, stay):
    """A row that ends may make one of two too many; the trial is held with the other."""
    stopped = []
    policy = Stub(pays_to_catch_up=lambda *_: False, watches=True, looks=True, alone=False)
    layout = Stub(defers=lambda _: True, max_deferred=32)
    drafting = Drafting(layout, lambda: policy, None, Stub(stop_drafting=stopped.append))
    first, second = request_of(5), request_of(2)
    batch = [first, second, *(request_of(0, drafts=False) for _ in range(rows - 2))]
    took = drafting.settled(batch, PLAIN)
    assert took[:stay] == [second, first][:stay]
    assert [id(each) for each in stopped] == [id(first)][: 2 - stay]
