"""Logits as the production engine computes them."""

from dataclasses import replace

import torch

from treetop import LLM


def record_logits(llm: LLM) -> list[torch.Tensor]:
    """From now on, keep the logits of every position that the target runs: [rows, n, vocab] a forward. The last layer
    goes on with all of them.
    """
    target, seen = llm.engine.runner.target, []
    forward = target.forward

    def recording(tokens, positions, attend, tells_experts=False, last=None):
        output = forward(tokens, positions, attend, tells_experts)
        seen.append(target.logits(output.hidden))
        return output if last is None else replace(output, hidden=last.of(output.hidden))

    target.forward = recording
    return seen


def record_last_logits(llm: LLM) -> list[torch.Tensor]:
    """From now on, keep the logits of what a prefill reads: [lines, vocab] each."""
    target, seen = llm.engine.runner.target, []
    forward = type(target).forward.__get__(target)

    def recording(tokens, positions, attend, tells_experts=False, last=None):
        output = forward(tokens, positions, attend, tells_experts, last)
        if last is not None:
            assert output.hidden.shape[:2] == (len(last.columns), 1)
            seen.append(target.logits(output.hidden)[:, 0])
        return output

    target.forward = recording
    return seen
