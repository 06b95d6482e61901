"""Verifying: the target chooses a token after every node of a tree, and each row follows its choices.

The rule that accepts is `accept` in `kernels/tree/accept.py`. A prompt's first token is chosen and accepted in the same
way: its tree is the root alone.
"""

import torch
from torch import Tensor

from treetop.kernels.flat import spread_nodes
from treetop.kernels.sampling.sampling import PartialArgmax, SampledTokens, SamplingMetadata
from treetop.kernels.table import Ops
from treetop.kernels.tree.commit import feature_nodes
from treetop.models.target import Target
from treetop.types.sampling import SamplingMode
from treetop.types.tree import Accepted, DraftTree, FlatNodes, PathLogprobs


def logits_for(target: Target, hidden: Tensor, how: SamplingMode) -> Tensor:
    """What `choose` takes: the largest logit is found among a rank's own, anything else among all."""
    return target.piece(hidden) if how is SamplingMode.GREEDY else target.logits(hidden)


def choose(  # noqa: PLR0917
    ops: Ops,
    logits: Tensor,
    sampler: SamplingMetadata,
    rows: Tensor,
    positions: Tensor,
    tree: DraftTree,
    how: SamplingMode,
    allowed: Tensor | None = None,
) -> SampledTokens | PartialArgmax:
    """The target's token after each node, in a form that `ops.accept` takes: the only way from logits to tokens.

    logits: [rows, T, vocab] of `logits_for`, which stay as they are. sampler: of all rows; `rows` [rows] picks.
    positions: [rows, T] int64, where the nodes stand. how: what the batch needs; it is known on the host, so a captured
    round has one. allowed: what may follow each node, as `ops.process` takes it, if a row is constrained; the batch
    then changes logits.

    What changes logits before a token is chosen is `ops.process`, and nothing else; see `kernels/sampling/process.py`.
    """
    if how is SamplingMode.GREEDY:
        return ops.greedy(logits)
    if how.processes and sampler.processors is not None:
        logits = ops.process(logits, sampler.processors, rows, positions, tree, allowed)
    return ops.draw(logits, sampler, rows, positions, how.filters)


def spread_choice(flat: FlatNodes, chosen: SampledTokens | PartialArgmax) -> SampledTokens | PartialArgmax:
    """`spread_nodes` of the target's tokens."""
    if isinstance(chosen, PartialArgmax):
        return PartialArgmax(spread_nodes(flat, chosen.key))
    logprob = None if chosen.logprob is None else spread_nodes(flat, chosen.logprob)
    return SampledTokens(spread_nodes(flat, chosen.token), spread_nodes(flat, chosen.finite), logprob)


def path_logprobs(
    ops: Ops, logits: Tensor, chosen: SampledTokens | PartialArgmax, accepted: Accepted, maximum: int
) -> PathLogprobs:
    """Log-probabilities where each token of a path was chosen, of the logits [rows, T, vocab] as the target gave them,
    and of what it was drawn from.

    chosen: what was drawn after each node. maximum: how many of the best.
    """
    assert isinstance(chosen, SampledTokens), "a batch with log-probabilities draws"
    assert chosen.logprob is not None
    width = accepted.path.shape[1]
    lines = logits.flatten(0, 1).index_select(0, feature_nodes(accepted.path, logits.shape[1]))
    drawn = chosen.logprob.gather(1, accepted.path).reshape(-1)
    values, ids = token_logprobs(ops, lines, accepted.tokens.reshape(-1), maximum, drawn)
    return PathLogprobs(values.view(-1, width, 2 + maximum), ids.view(-1, width, maximum))


def token_logprobs(
    ops: Ops, logits: Tensor, tokens: Tensor, maximum: int, drawn: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens [n] and of the best ones, of the logits [n, vocab] that each was chosen from.

    drawn: [n] float32, those that the tokens were drawn with; None for a prompt's. Returns values [n, 2 + maximum] and
    the ids of the best [n, maximum], as `PathLogprobs`.
    """
    best, ids = ops.top_logprobs(logits, maximum, None)
    of_best, of_token = (logits.gather(1, each).float() for each in (ids[:, :1], tokens[:, None]))
    own = best[:, :1] + (of_token - of_best)
    return torch.cat([own, own if drawn is None else drawn[:, None], best], dim=1), ids
