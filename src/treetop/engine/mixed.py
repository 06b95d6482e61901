"""Two forwards of the target in one: what each part gives its tokens is what it would give them alone.

    chunks of a prefill, padded  |  nodes of a round    one token a row, one after the other

Products, norms and feed-forwards take all tokens at once, so the weights are read once; each part attends as it does
alone (`attention/mixed.py`).
"""

import torch
from torch import Tensor

from treetop.attention.mixed import MixedAttention, Part
from treetop.engine.model_runner import ModelRunner, TargetInput
from treetop.models.target import TargetOutput


def run_together(runner: ModelRunner, given: tuple[TargetInput, ...], exchanged: int = 0) -> list[TargetOutput]:
    """The target's forward of all that is given, and what it gave each. Rows of different parts are different.

    exchanged: tokens that ranks with shared experts exchange, where these are more than there are.
    """
    parts = tuple(Part(each.attend, *each.tokens.shape) for each in given)
    attend = MixedAttention(parts, runner.target_layers, exchanged)
    return _divided(runner.run_target(_joined(given, attend)), parts)


def _joined(given: tuple[TargetInput, ...], attend: MixedAttention) -> TargetInput:
    """Every token is a row of its own: [N, 1]."""
    rows = torch.cat([each.rows[:, None].expand_as(each.tokens).reshape(-1) for each in given])
    tokens, positions = (
        torch.cat([column.reshape(-1) for column in columns])[:, None]
        for columns in zip(*((each.tokens, each.positions) for each in given), strict=True)
    )
    return TargetInput(rows, tokens, positions, attend)


def _divided(output: TargetOutput, parts: tuple[Part, ...]) -> list[TargetOutput]:
    """What the forward gave each part's tokens."""
    counts = [part.count for part in parts]

    def divided(flat: Tensor) -> list[Tensor]:
        return [part.of(own) for part, own in zip(parts, flat.split(counts), strict=True)]

    hidden, aux_hidden = divided(output.hidden), [divided(each) for each in output.aux_hidden]
    experts = [None] * len(parts) if output.experts is None else divided(output.experts)
    return [TargetOutput(own, tuple(each[i] for each in aux_hidden), experts[i]) for i, own in enumerate(hidden)]
