"""How many examples a long property tries, and which: the same each day, others each time in `make test-all`."""

import os
import random

import hypothesis
import torch

EVERYTHING = os.environ.get("TREETOP_TESTS") == "all"
"""Whether this session is one of `make test-all`."""
SEED = int(os.environ.setdefault("TESTS_SEED", str(random.randrange(10**6) if EVERYTHING else 0)))
"""Of what tests draw and give no seed: that of the environment, where pytest's worker processes have it from."""


def register() -> None:
    """A day's examples are found by hash of the test, and nothing is kept of the day before."""
    same = {"derandomize": True, "database": None}
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,  # on any machine
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        **({"print_blob": True} if EVERYTHING else same),
    )
    hypothesis.settings.load_profile("tests")


def some_of(daily: int, everything: int, **options: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=everything if EVERYTHING else daily, deadline=None, **options)


def fewer(tokens: int) -> int:
    """Of a run of so many tokens, those that a day decodes: all of 8, of more a third. `make test-all` decodes all, and
    so does a GPU.
    """
    return tokens if EVERYTHING or tokens <= 8 or torch.cuda.is_available() else 8 + (tokens - 8) // 3
