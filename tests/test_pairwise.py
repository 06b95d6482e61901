"""What a day runs of a matrix holds what the matrix holds, and no more than it must."""

from itertools import product

import pytest

from support.pairwise import covering

AXES = {"shape": range(4), "exactness": range(3), "dtype": range(2), "family": range(5)}


def cases(*names: str) -> list[dict[str, int]]:
    return [dict(zip(names, values, strict=True)) for values in product(*(AXES[name] for name in names))]


def test_of_three_axes_and_more_every_pair_of_values_is_run():
    made = cases(*AXES)
    chosen = [made[place] for place in covering(made)]
    for one, other in product(AXES, AXES):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in made}
    assert len(chosen) < len(made) / 4


def test_of_two_axes_every_value_is_run_once_or_as_often_as_the_longer_axis_needs():
    made = cases("shape", "family")
    assert len(covering(made)) == 5
    assert covering(made) == covering(made)


def test_values_that_never_meet_are_not_asked_to():
    assert covering([{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 1}]) == {0, 1}


@pytest.mark.pairwise
@pytest.mark.parametrize("one", range(6))
@pytest.mark.parametrize("other", range(6))
def test_the_rest_is_slow(request, one, other):
    """This one is a matrix itself; `make test` runs six of its 36 cases."""
    assert request.config.option.markexpr != "not slow" or not request.node.get_closest_marker("slow")
