"""Verifying: the target chooses a token after every node of a tree, and each row follows its choices.

The rule that accepts is `accept` in `kernels/accept.py`. A prompt's first token is chosen and accepted in the same way:
its tree is the root alone.
"""

import torch
from torch import Tensor

from treetop.kernels.commit import feature_nodes
from treetop.kernels.process import Processors
from treetop.kernels.sampling import PartialArgmax, SampledTokens, Sampler
from treetop.kernels.table import Ops
from treetop.models.target import Target
from treetop.types.sampling import Choice
from treetop.types.tree import Accepted, DraftTree, PathLogprobs

NO_TOKEN = -1
"""What no target chooses."""


def logits_for(target: Target, hidden: Tensor, how: Choice) -> Tensor:
    """What `choose` takes: the largest logit is found among a rank's own, anything else among all."""
    return target.piece(hidden) if how is Choice.GREEDY else target.logits(hidden)


def choose(
    ops: Ops, logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, tree: DraftTree, how: Choice
) -> SampledTokens | PartialArgmax:
    """The target's token after each node, in a form that `ops.accept` takes: the only way from logits to tokens.

    logits: [rows, T, vocab] of `logits_for`, which stay as they are. sampler: of all rows; `rows` [rows] picks.
    positions: [rows, T] int64, where the nodes stand. how: what the batch needs; it is known on the host, so a captured
    round has one.

    What changes logits before a token is chosen is `ops.process`, and nothing else; see `kernels/process.py`.
    """
    if how is Choice.GREEDY:
        return ops.greedy(logits)
    if how.processes and sampler.processors is not None:
        logits = ops.process(logits, sampler.processors, rows, positions, tree)
    return ops.draw(logits, sampler, rows, positions, how.filters)


def withhold_drafts(tree: DraftTree, processors: Processors | None, rows: Tensor, how: Choice) -> None:
    """Write `NO_TOKEN` over the drafts of constrained rows: only what follows their roots is known to be allowed.

    To be called when everything but accepting has read the trees.
    """
    if how.processes and processors is not None:
        tree.tokens[:, 1:].masked_fill_(processors.constrained[rows][:, None], NO_TOKEN)


def path_logprobs(ops: Ops, logits: Tensor, accepted: Accepted, most: int) -> PathLogprobs:
    """Log-probabilities where each token of a path was chosen, of the logits [rows, T, vocab] as the target gave them.

    most: how many of the best.
    """
    width = accepted.path.shape[1]
    lines = logits.flatten(0, 1).index_select(0, feature_nodes(accepted.path, logits.shape[1]))
    values, ids = token_logprobs(ops, lines, accepted.tokens.reshape(-1), most)
    return PathLogprobs(values.view(-1, width, 1 + most), ids.view(-1, width, most))


def token_logprobs(ops: Ops, logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens [n] and of the best ones, of the logits [n, vocab] that each was chosen from.

    Returns values [n, 1 + most], each token's own first, and the ids of the best [n, most].
    """
    best, ids = ops.top_logprobs(logits, most, None)
    of_best, of_token = (logits.gather(1, each).float() for each in (ids[:, :1], tokens[:, None]))
    return torch.cat([(best[:, :1] + (of_token - of_best)), best], dim=1), ids
