"""Time between completions: what each kernel of a stretch of time cost, where kernels start before others have ended.

Under programmatic dependent launch a kernel starts early and waits inside for the one before it, so durations overlap
and add up to more than the time that passed. Completions do not overlap:

    |--- a ---|
         |------- b -------|        durations a + b + c exceed the whole;
                 |----- c -----|    shares: a to its end, b from a's end to its own, c from b's end to its own
"""

from collections.abc import Sequence

Span = tuple[str, float, float]
"""A kernel's name, start and end, in one unit of time."""


def shares(kernels: Sequence[Span]) -> list[tuple[str, float]]:
    """Each kernel's name and time since the completion before it, in order of completion.

    The first counts from the earliest start, so the shares add up to the latest end minus the earliest start.
    """
    if not kernels:
        return []
    before = min(start for _, start, _ in kernels)
    found = []
    for name, _, end in sorted(kernels, key=lambda kernel: kernel[2]):
        found.append((name, end - before))
        before = end
    return found
