"""Memory set aside for captured rounds is compared with what capturing took; what would not serve is refused."""

import pytest

from support.engines import build
from support.fake_recorder import FakeRecorder
from support.refusing import refused
from treetop.engine import engine as engines
from treetop.engine.cuda_graphs import CudaGraphs, num_rounds
from treetop.engine.graph_memory import GraphMemory
from treetop.engine.memory import BYTES_PER_GRAPH, SLACK, Budget, DeviceMemory, activation_allowance
from treetop.types.errors import CapacityError

GIB, MIB = 2**30, 2**20
PEAK, ROUNDS = 3 * GIB, 20


def budget(fraction=0.9) -> Budget:
    return Budget(DeviceMemory(80 * GIB, 60 * GIB), 16 * GIB, activation_allowance(PEAK, ROUNDS), fraction)


@pytest.mark.parametrize("each", [MIB, 24 * MIB, 100 * MIB, GIB])
def test_what_capture_takes_serves_exactly_as_long_as_the_worst_step_and_later_graphs_fit(each):
    """4 of 20 rounds are captured, and 16 will take as much as each after the first."""
    need = PEAK + 16 * each
    made = [GraphMemory(4, ROUNDS, 2 * GIB, 3 * each, free) for free in (need, need - 1)]
    made[0].check(budget())
    message = refused(CapacityError, lambda: made[1].check(budget()), "--graphs off", "--mem-fraction-static to 0.8")
    assert "4 of at most 20 rounds took" in message
    assert (
        f"{ROUNDS * 24 / 1024:.2f} GiB were set aside" in message or f"{ROUNDS * 24}.00 MiB were set aside" in message
    )


def test_graphs_that_take_what_was_set_aside_serve():
    """The plan's own estimate never refuses itself, whatever allocator's rounding took of its slack."""
    free = activation_allowance(PEAK, ROUNDS) - 4 * BYTES_PER_GRAPH - SLACK
    GraphMemory(4, ROUNDS, BYTES_PER_GRAPH, 3 * BYTES_PER_GRAPH, free).check(budget())


def test_the_fraction_that_is_advised_would_serve():
    """80 GiB, of which 8 more are needed: a tenth less."""
    short = GraphMemory(4, ROUNDS, GIB, 0, PEAK - 8 * GIB)
    refused(CapacityError, lambda: short.check(budget(0.9)), "to 0.8 or less", "8.00 GiB too little")
    refused(CapacityError, lambda: short.check(budget(0.05)), "lower --max-running-requests")


def test_a_single_round_tells_nothing_of_others():
    assert GraphMemory(1, 5, GIB, 0, GIB).to_come == 4 * BYTES_PER_GRAPH


def test_capturing_at_start_measures_the_first_round_and_the_others(strong_pair):
    """By a device that loses 1,000 bytes to the pool and 10 to each round after it."""
    llm, recorder = build(strong_pair, (4, 5, 16), max_running_requests=6), FakeRecorder()
    graphs = CudaGraphs(
        llm.engine.runner, recorder, lambda: 10**6 - 990 * bool(recorder.recorded) - 10 * len(recorder.recorded)
    )
    assert graphs.memory is None
    graphs.capture_all()
    assert graphs.memory == GraphMemory(4, num_rounds(llm.engine.runner), 1000, 30, 10**6 - 1030)


@pytest.mark.parametrize("asked", [None, 1024])
def test_an_engine_whose_graphs_took_too_much_does_not_start(strong_pair, monkeypatch, asked, caplog):
    """With a GPU's capturing replaced by a fake; pools of a size that was asked for draw a warning."""
    free = [50 * GIB]

    def shrinking():
        free[0] = max(free[0] - 25 * GIB, 0)
        return free[0]

    monkeypatch.setattr(engines, "captures", lambda *_: True)
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr(engines, "CudaRecorder", lambda _: None)
    monkeypatch.setattr(engines, "CudaGraphs", type("Fake", (CudaGraphs,), {
        "__init__": lambda self, runner, recorder=None: CudaGraphs.__init__(self, runner, FakeRecorder(), shrinking)
    }))  # fmt: skip

    def start():
        return build(strong_pair, (4, 5, 16), max_running_requests=6, graphs="auto", max_total_tokens=asked)

    if asked is None:
        refused(CapacityError, start, "captured graphs: 12 of at most", "0.00 MiB free", "--graphs off")
    else:
        start()
        assert "--max-total-tokens leaves too little to the worst step" in caplog.text
