"""How many examples a long property tries: some each day, others each day, and all of them in `make test-all`."""

import os

from hypothesis import settings

EVERYTHING = os.environ.get("TREETOP_TESTS") == "all"
"""Whether this session is one of `make test-all`."""


def some_of(daily: int, everything: int, **options: int) -> settings:
    return settings(max_examples=everything if EVERYTHING else daily, deadline=None, **options)
