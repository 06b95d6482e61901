"""Of a matrix of parameters, what a day runs: of three and more all pairs of values, of two each value."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def leave_the_rest(items: Sequence[pytest.Item]) -> None:
    """Marks slow what `covering` does not choose of each test marked `pairwise`, among the cases that are not slow."""
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and not item.get_closest_marker("slow"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        daily = covering([{name: repr(value) for name, value in case.callspec.params.items()} for case in cases])
        for place, case in enumerate(cases):
            if place not in daily:
                case.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Places of the cases that hold what all hold: greedily, in an order that is the same each day."""
    names = [name for name in sorted(cases[0]) if len({case[name] for case in cases}) > 1]
    together = [*combinations(names, 2)] if len(names) > 2 else [(name,) for name in names]
    held = [{(which, tuple(case[name] for name in which)) for which in together} for case in cases]
    left, places, chosen = set[Any]().union(*held), [*range(len(cases))], set[int]()
    random.Random(0).shuffle(places)
    while left:
        best = max(places, key=lambda place: len(held[place] & left))
        chosen.add(best)
        left -= held[best]
    return chosen
