"""A pair whose heads several ranks can share, what it is asked, and what one rank answers."""

from pathlib import Path

from support.engines import greedy, sampled
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop import LLM

SHAPE = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 6}

LENGTHS = [3, 60, 40, 90, 17]

PARAMS = [greedy(10), sampled(5, 10), greedy(10), sampled(9, 10, top_k=5, logprobs=2), sampled(3, 10)]


def save_pair(folder: Path) -> Pair:
    """Sizes that four ranks can divide; two KV heads, so that four ranks share them."""
    target = save_random_llama(folder / "target", seed=8, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=8, seed=2))


def options_of(pair, **options):
    small = {"dtype": "float64", "context_length": 128, "max_running_requests": 8, "chunked_prefill_size": 16}
    return {"model": str(pair.target), "draft": str(pair.head), **SHAPE, **small, **options}


def answers(pair):
    """Token ids and accept lengths of one rank for `PARAMS`."""
    llm = LLM(**options_of(pair))
    outputs = llm.generate(pair.prompts(LENGTHS), PARAMS)
    llm.close()
    return [(output.token_ids, [*output.metrics.accept_lens]) for output in outputs]
