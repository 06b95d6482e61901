"""Logits as the production engine computes them."""

import torch

from treetop import LLM


def record_logits(llm: LLM) -> list[torch.Tensor]:
    """From now on, keep the logits of every position that the target runs: [rows, n, vocab] a forward."""
    target, seen = llm.engine.runner.target, []
    forward = target.forward

    def recording(tokens, positions, attend, tells_experts=False):
        output = forward(tokens, positions, attend, tells_experts)
        seen.append(target.logits(output.hidden))
        return output

    target.forward = recording
    return seen
