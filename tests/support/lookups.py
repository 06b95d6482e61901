"""An engine that drafts from the text, or by what else needs no folder of a draft."""

from treetop import LLM


def lookup(pair, shape, **options) -> LLM:
    k, steps, size = shape
    tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
    options = {"speculative_algorithm": "NGRAM", "dtype": "float64", "context_length": 160, "page_size": 4, **options}
    return LLM(str(pair.target), **tree, **options)
