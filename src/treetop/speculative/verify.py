"""Verifying: the target chooses a token after every node of a tree, and each row follows its choices.

The rule that accepts is `accept` in `kernels/accept.py`. A prompt's first token is chosen and accepted in the same way:
its tree is the root alone.
"""

from torch import Tensor

from treetop.kernels.sampling import PartialArgmax, SampledTokens, Sampler
from treetop.kernels.table import Ops
from treetop.types.sampling import Choice


def choose(
    ops: Ops, logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, how: Choice
) -> SampledTokens | PartialArgmax:
    """The target's token after each node, in a form that `ops.accept` takes: the only way from logits to tokens.

    logits: [rows, T, vocab]. sampler: of all rows; `rows` [rows] picks. positions: [rows, T] int64, where the nodes
    stand. how: what the batch needs; it is known on the host, so a captured round has one.

    What changes logits by row before a token is chosen (a bias, a penalty with history, a mask of a grammar) goes
    here, as one more operation of the table, in front of every way to choose; and nowhere else. Where such an operation
    needs what a node's ancestors are, `tree.tokens` and `tree.mask` have them.
    """
    if how is Choice.GREEDY:
        return ops.greedy(logits)
    return ops.draw(logits, sampler, rows, positions, how is Choice.FILTER)
