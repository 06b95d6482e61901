"""Engines whose prefill steps may be of blocks, and what requests get there."""

from collections import Counter, deque

from support.engines import submit
from treetop.types.messages import PrefillPlan

SHAPE = (2, 3, 6)
LAYERS = (("target", 3), ("draft", 2))
OPTIONS = {
    "chunked_prefill_size": 32, "page_size": 4, "max_running_requests": 4, "graphs": "sim", "check_level": 3,
    "prefill_graph_max_tokens": 2048,
}  # fmt: skip
"""Captured batches of 2 to 32 tokens in blocks of 2 and of 1."""
KINDS = ("gemma4", "glm 5.2")
"""Families that are tried in each run of the suite; the others are slow."""


def run(llm, prompts, params, dice=None):
    """What requests get, and how many prefill steps there were of each size; they come one after another, at random."""
    scheduler, plans, out, requests = llm.scheduler, [], deque(), []
    coming = deque(zip(prompts, params, strict=True))
    while coming or scheduler.has_work:
        while coming and (dice is None or not scheduler.has_work or dice.random() < 0.3):
            prompt, each = coming.popleft()
            requests += submit(llm, [prompt], [each])
        while (plan := scheduler.plan()) is not None:
            out.append(llm.engine.launch(plan))
            plans.append(plan)
        step = out.popleft()
        scheduler.commit(step.plan, llm.engine.collect(step))
    sizes = Counter((plan.packed, plan.block) for plan in plans if isinstance(plan, PrefillPlan))
    return [tuple(request.output_ids) for request in requests], sizes
