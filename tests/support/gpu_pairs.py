"""The embedded pair on a GPU."""

from treetop import LLM

HEAD = "builtin:nestling-eagle3"


def make(draft=HEAD, shape=(5, 4, 16), **options) -> LLM:
    steps, topk, nodes = shape
    tree = {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
    own = {"device": "cuda", "dtype": "float32", "max_running_requests": 8, "context_length": 512}
    options = {**own, "speculative_policy": "fixed", **options}
    options.setdefault("max_total_tokens", 640 * options["max_running_requests"])  # several engines are alive at a time
    return LLM(None, draft, **(tree if draft else {}), **options)
