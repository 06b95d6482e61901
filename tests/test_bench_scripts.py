"""What the scripts of `bench/` compute from what they measured: without a GPU, on numbers that are known."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def script(monkeypatch):
    """Loads a script of `bench/` by name; the scripts beside it are found as they are when it runs."""
    monkeypatch.syspath_prepend(str(BENCH))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look
        spec.loader.exec_module(module)
        return module

    return load


# ------------------------------------------------------------------------------------------------------- completions


def test_times_between_completions_add_up_to_the_time_that_passed(script):
    """Durations of kernels that wait inside each other add up to more: 10 + 14 + 18 here, of 25."""
    shares = script("completions").shares
    kernels = [("c", 7.0, 25.0), ("a", 0.0, 10.0), ("b", 2.0, 16.0)]
    assert shares(kernels) == [("a", 10.0), ("b", 6.0), ("c", 9.0)]
    assert sum(end - start for _, start, end in kernels) == 42.0


def test_a_gap_belongs_to_the_kernel_after_it_and_what_ends_at_once_takes_nothing(script):
    shares = script("completions").shares
    assert shares([("a", 5.0, 8.0), ("late", 11.0, 12.0)]) == [("a", 3.0), ("late", 4.0)]
    assert shares([("a", 0.0, 8.0), ("b", 3.0, 8.0)]) == [("a", 8.0), ("b", 0.0)]
    assert shares([("long", 4.0, 9.0), ("inside", 5.0, 6.0)]) == [("inside", 2.0), ("long", 3.0)]
    assert shares([]) == []
