"""The journal alone: what a client has received, from however many engines, and who is tried before whom."""

from support.fake_core import ask
from treetop.distributed.journal import TRIAL_S, TRIAL_STEPS, Journal
from treetop.types.requests import RequestUpdate


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(num_requests: int, **options):
    """A journal whose requests are with an engine, its clock, and what they hear."""
    clock, heard = Clock(), []
    journal = Journal(clock)
    journal.opened(4)
    journal.add([ask(i, [1], **options) for i in range(num_requests)], heard.append)
    assert len(journal.due()) == num_requests
    return journal, clock, heard


def due(journal: Journal) -> list[int]:
    return [each.request_id for each in journal.due()]


def test_a_deadline_holds_while_there_is_no_engine_and_counts_what_has_passed():
    journal, clock, heard = opened(2, timeout_s=10)
    clock.now_s = 3
    journal.lost("gone")
    journal.add([ask(7, [1], timeout_s=2)], heard.append)
    clock.now_s = 6
    journal.tend()
    assert [(each.request_id, each.timed_out) for each in heard] == [(7, True)]
    assert "request timed out after 0 tokens" in heard[0].error
    journal.opened(4)
    (first,) = journal.due()
    assert first.timeout_s == 4
    clock.now_s = 11  # the engine's own to end; the other waits for the trial
    journal.tend()
    assert [each.request_id for each in heard] == [7, 1]


def test_suspects_are_tried_one_after_the_other_and_a_long_trial_does_not_hold_up_the_next():
    journal, clock, heard = opened(6)
    journal.take([RequestUpdate(i, (3,)) for i in (1, 4)])
    journal.lost("gone")
    journal.opened(4)
    assert due(journal) == [0]
    for step in range(TRIAL_STEPS):
        assert not journal.settled
        assert due(journal) == []
        journal.take([RequestUpdate(0, (3,), start=step)])
    (second,) = journal.due()
    assert second == ask(1, [1])._replace(received=(3,))
    clock.now_s = TRIAL_S / 2
    journal.tend()
    assert due(journal) == []
    clock.now_s = 1.5 * TRIAL_S
    journal.tend()
    assert due(journal) == [2]
    journal.drop([2])  # its client has gone
    assert due(journal) == [4]
    journal.lost("gone again")
    assert [each.request_id for each in heard if each.error] == [4]
    journal.opened(4)
    given = [due(journal)]
    journal.take([RequestUpdate(1, (3,), None, "length", start=1)])
    given.append(due(journal))
    assert given == [[1], [0, 3, 5]]
    assert journal.settled


def test_a_trial_that_took_too_long_does_not_end_the_one_that_has_begun_since():
    journal, clock, _ = opened(3)
    journal.take([RequestUpdate(i, (3,)) for i in range(3)])
    journal.lost("gone")
    journal.opened(4)
    assert due(journal) == [0]
    clock.now_s = 1.5 * TRIAL_S
    journal.tend()
    assert due(journal) == [1]
    for step in range(TRIAL_STEPS):
        journal.take([RequestUpdate(0, (3,), start=1 + step)])
    assert due(journal) == []


def test_a_request_that_has_received_something_elsewhere_goes_on_behind_it():
    """As behind a replica that has died: an update begins there, and so does what the next engine is asked for."""
    clock, heard = Clock(), []
    journal = Journal(clock)
    journal.opened(4)
    journal.add([ask(0, [1])._replace(received=(5, 6))], heard.append)
    assert journal.due()[0].received == (5, 6)
    assert journal.take([RequestUpdate(0, (7,), start=2)]) == []
    journal.unanswered()
    journal.opened(4)
    assert journal.due()[0].received == (5, 6, 7)


def test_an_update_that_does_not_go_on_ends_its_request_alone():
    journal, _, heard = opened(3)
    journal.take([RequestUpdate(0, (3, 4))])
    assert journal.take([RequestUpdate(0, (9,), start=1), RequestUpdate(1, (3,)), RequestUpdate(2, (3,))]) == [0]
    assert [(each.request_id, each.new_ids) for each in heard] == [(0, (3, 4)), (0, ()), (1, (3,)), (2, (3,))]
    assert (heard[1].finish_reason, heard[1].start, heard[1].engine_failed) == ("abort", 2, False)
    assert len(journal) == 2


def test_without_any_engine_to_come_all_hear_why():
    journal, _, heard = opened(2)
    journal.take([RequestUpdate(1, (3,))])
    journal.fail("no engine comes up")
    assert not journal.open
    assert [(each.request_id, each.error, each.engine_failed, each.start) for each in heard[1:]] == [
        (0, "no engine comes up", True, 0),
        (1, "no engine comes up", True, 1),
    ]
    assert len(journal) == 0
    journal.drop([0, 1])  # which their clients may still do


def test_what_another_engine_takes_over_goes_on_together_and_once():
    """If that one dies before they are past a trial's steps, they wait for a trial; afterwards they may go again."""
    mine, _, heard = opened(3)
    other, _, others_heard = opened(1)
    other.drop([0])
    mine.take([RequestUpdate(0, (3,))])
    mine.lost("gone")
    left = iter([other, other, None])
    assert mine.hand_on(lambda request: next(left)) == 2, "as many as there is room for"
    assert (len(mine), len(other)) == (1, 2)
    given = other.due()
    assert given == [ask(0, [1])._replace(received=(3,)), ask(1, [1])], "side by side"
    assert other.settled, "nobody else waits for them"
    other.take([RequestUpdate(0, (4,), start=1 + step) for step in range(TRIAL_STEPS)])
    assert [each.new_ids for each in heard[1:]] == [(4,)] * TRIAL_STEPS, "to whoever asked"
    other.lost("gone, too")
    assert (mine.hand_on(lambda request: other), len(mine)) == (1, 0), "while there is no engine yet"
    third, _, _ = opened(1)
    assert other.hand_on(lambda request: third) == 1, "request 0 is past it; 1 and 2 have been taken over"
    other.opened(4)
    assert due(other) == [1]
    other.lost("and once more")
    assert [(each.request_id, each.finish_reason) for each in heard if each.error] == [(1, "abort")]
    assert others_heard == []
