"""Token ids, accepted drafts of each round, finish reasons and texts of the frozen runs."""

import pytest

from frozen import golden
from frozen.checkpoints import digests
from frozen.runs import HOSTILE_PADDED, Setup, build_setup, perform, setups

SETUPS = setups()


def test_the_checkpoints_are_those_of_the_golden_runs():
    """If this fails, the weights differ and no run can be compared."""
    assert digests() == golden.load("checkpoints")


def test_every_run_has_a_golden_record():
    """No engine without a record, no record without an engine, and two hundred runs at least."""
    known = golden.load("runs")
    assert {setup.name: len(setup.runs) for setup in SETUPS} == {name: len(runs) for name, runs in known.items()}
    assert sum(map(len, known.values())) >= 200


def compare(setup: Setup, pairs) -> None:
    """Each run of an engine, in order, gives what is recorded."""
    llm, known = build_setup(setup, pairs[setup.pair]), golden.load("runs")[setup.name]
    found = [perform(llm, pairs[setup.pair], run) for run in setup.runs]
    for run, expected, got in zip(setup.runs, known, found, strict=True):
        assert got == expected, f"{setup}\n{run}"
    if setup.retracts:
        assert any(retracted(record) for run in found for record in run), "nothing was retracted"


def retracted(record: list) -> bool:
    """A request that came back got a token from its second prefill: it has more than its rounds gave."""
    ids, lens = record[:2]
    return len(ids) > 1 + sum(int(accepted, 16) + 1 for accepted in lens)


@pytest.mark.parametrize("setup", [each for each in SETUPS if each is not HOSTILE_PADDED], ids=lambda setup: setup.name)
def test_an_engine_gives_what_it_gave(setup, pairs):
    """Token ids, accept lengths, finish reasons, texts; retraction where the pool is small."""
    compare(setup, pairs)


def test_a_padding_row_does_no_harm_under_a_hostile_target(pairs):
    """Three requests in a batch of four, and a target that says token 0 after token 0."""
    compare(HOSTILE_PADDED, pairs)
