"""A batch drains row by row, across its buckets and from eager to replayed rounds, and no token changes."""

import pytest

from support.drain import Crossover, staggered, watch_rows
from support.engines import build, tokens

COUNT = 9


@pytest.mark.parametrize(("graphs", "largest"), [("off", 0), ("sim", 4), ("sim", 9)])
def test_a_draining_batch_gives_the_tokens_of_requests_alone(strong_pair, graphs, largest):
    """Float64: nine requests end one after the other; buckets 9, 8, 4, 2, 1, eager above `largest` (sgl-28569)."""
    params = staggered(COUNT, 2, 4)
    prompts = strong_pair.prompts([3 + 2 * i for i in range(COUNT)], seed=2)
    expected = tokens(build(strong_pair, None, max_running_requests=1).generate(prompts, params))
    llm = build(strong_pair, (2, 3, 8), max_running_requests=COUNT, graphs=graphs, page_size=4)
    llm.engine.launcher = crossover = Crossover(llm.engine, largest)
    rows = watch_rows(llm)
    assert tokens(llm.generate(prompts, params)) == expected
    llm.scheduler.check_integrity()
    assert rows[0] == COUNT
    assert rows[-1] == 1
    assert len(set(rows)) >= COUNT - 3
    buckets = set(llm.engine.layout.buckets)
    prefilled = {0} if graphs == "sim" else set()  # a captured prefill step is a round of no rows
    assert crossover.launched["own"] | crossover.launched["eager"] == buckets | prefilled
    assert crossover.launched["eager"] == {bucket for bucket in buckets if bucket > largest}
