"""Ways to decode that must not change a token, and which cases of a long matrix are run each time."""

from collections.abc import Sequence
from typing import Any

import pytest

_PARAM = type(pytest.param())


def few_of(cases: Sequence[Any], *kept: int) -> list[Any]:
    """The cases, of which all but these are slow. kept: their places."""
    assert max(kept) < len(cases)

    def slow(values: Any) -> Any:
        if isinstance(values, _PARAM):
            return pytest.param(*values.values, marks=(*values.marks, pytest.mark.slow), id=values.id)
        return pytest.param(*(values if isinstance(values, tuple) else (values,)), marks=pytest.mark.slow)

    return [values if place in kept else slow(values) for place, values in enumerate(cases)]


def few_values(values: Sequence[Any], *kept: int) -> list[Any]:
    """As `few_of`, of one parameter, whose values may be tuples, or have marks of their own."""
    return few_of([value if isinstance(value, _PARAM) else pytest.param(value) for value in values], *kept)


GRID = [
    ((1, 1, 2), 1, 512, 8),
    ((1, 3, 4), 16, 7, 3),
    ((1, 5, 6), 4, 5, 8),
    ((2, 1, 3), 64, 5, 8),
    ((2, 3, 4), 1, 7, 8),
    ((2, 3, 11), 4, 16, 1),
    ((2, 4, 8), 2, 5, 8),
    ((3, 2, 13), 16, 1, 3),
    ((4, 2, 2), 2, 7, 3),
    ((4, 3, 37), 1, 512, 8),
    ((4, 5, 16), 16, 512, 8),
    ((4, 5, 16), 64, 7, 1),
    ((4, 5, 16), 2, 16, 8),
    ((5, 1, 6), 4, 7, 3),
    ((8, 2, 40), 16, 5, 8),
    ((8, 4, 9), 4, 512, 8),
    ((1, 8, 9), 2, 5, 3),
    ((1, 0, 1), 4, 7, 8),
]
