"""Requests of every kind, and what of their outputs must be the same to the bit."""

from support.engines import sampled
from treetop import SamplingParams

PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2),
    sampled(11, 24, logprobs=2, whole=True),
    sampled(12, 24, logprobs=0, top_p=0.8, temperature=0.7, whole=True),
    sampled(13, 24, logprobs=3, top_k=4, min_p=0.05, frequency_penalty=0.6, repetition_penalty=1.2, whole=True),
]
"""Greedy, sampled, with filters, and with logits that are changed."""


def bits(outputs) -> list:
    """Tokens, and log-probabilities as float32 has them, which tell any two logits apart that matter to one."""
    return [(o.token_ids, [(t.logprob.hex(), [(i, p.hex()) for i, p in t.top]) for t in o.logprobs]) for o in outputs]


def asked(prompts):
    return [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
