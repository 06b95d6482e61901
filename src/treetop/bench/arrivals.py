"""When requests are sent: seconds from the beginning, for a given rate and seed."""

import random
from collections.abc import Callable
from itertools import accumulate

ARRIVALS: dict[str, Callable[[int, float, int, random.Random], list[float]]]
"""Name -> (count, requests a second, burst size, random numbers) -> increasing times in seconds."""


def poisson(count: int, rate: float, burst: int, rng: random.Random) -> list[float]:
    """Exponential gaps of mean 1 / rate."""
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def constant(count: int, rate: float, burst: int, rng: random.Random) -> list[float]:
    return [index / rate for index in range(count)]


def bursts(count: int, rate: float, burst: int, rng: random.Random) -> list[float]:
    """`burst` requests at once, then nothing until the rate holds again."""
    return [index // burst * burst / rate for index in range(count)]


def ramp(count: int, rate: float, burst: int, rng: random.Random) -> list[float]:
    """From nothing to twice the rate: n requests have come after t seconds, n = rate * t^2 / T, T = count / rate."""
    whole_s = count / rate
    return [whole_s * (index / count) ** 0.5 for index in range(count)]


ARRIVALS = {"poisson": poisson, "constant": constant, "bursts": bursts, "ramp": ramp}
