"""A mixed step: the chunks of a prefill and the nodes of a round in one forward of the target.

    DRAFT of the round  |  one forward  |  VERIFY's end: accept, commit   |  EXTEND of the round
                        |               |  the prefill's end: sample,     |
                        |               |  have the draft read the chunks |

Rows of both are different, and what a phase writes is by row. So either end may come first.
"""

import torch
from torch import Tensor

from treetop.attention.mixed import MixedAttention, Part
from treetop.engine.model_runner import ModelRunner, TargetInput
from treetop.engine.prefill import FirstTokens, PrefillBatch, begin_prefill, end_prefill
from treetop.engine.rounds import RoundKey, begin_verify, end_verify, poison_undeclared
from treetop.models.target import TargetOutput
from treetop.types.errors import CheckError
from treetop.types.phase import Phase


def mixed_verify(runner: ModelRunner, batch: PrefillBatch, key: RoundKey, max_kv_len: int) -> FirstTokens:
    """VERIFY of a round whose trees are grown, and a prefill beside it; see `prefill` and `verify_phase`.

    batch: of other rows, in memory of its own.
    """
    if runner.check_level >= 1 and batch.rows.data_ptr() == runner.buffers.rows.data_ptr():
        raise CheckError("mixed step: the rows of its prefill lie where those of its round do")
    if runner.check_level >= 3:
        poison_undeclared(runner, Phase.VERIFY)
    prompts, nodes = begin_prefill(runner, batch), begin_verify(runner, key, max_kv_len)
    given = (prompts.given, nodes.given)
    parts = tuple(Part(each.attend, *each.tokens.shape) for each in given)
    attend = MixedAttention(parts, runner.target_layers, batch.exchanged and batch.exchanged + parts[1].count)
    output = runner.run_target(_joined(given, attend))
    of_prompts, of_nodes = _divided(output, parts)
    end_verify(runner, key, nodes, of_nodes)
    return end_prefill(runner, prompts, of_prompts)


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
    return [TargetOutput(own, tuple(each[i] for each in aux_hidden)) for i, own in enumerate(hidden)]
