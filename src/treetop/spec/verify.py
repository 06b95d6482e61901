"""Accepting: the path of the tree that equals what the target itself chooses.

The target chooses a token at every node: the argmax, or a draw by a coin that depends only on the request's seed and
the token's position. A draft is accepted iff it equals its parent's choice; the last choice on the path is the bonus.

Why this is lossless: the children of a node are a fixed set, so drawing x from the target and moving to the child
that equals x, or stopping with x, emits exactly x ~ target. It accepts with probability sum over children of
p(child), the same as multi-round rejection with point-mass proposals, and it makes sampled output with a tree equal,
token for token, to sampled output without one.
"""

import torch
from torch import Tensor

from treetop.kernels.sampling import Sampler, WarpParams, draw, philox_coin, warp
from treetop.types.tree import Accepted, DraftTree


def greedy_choice(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The target's token after each node. logits: [rows, T, vocab].

    Returns the tokens, and whether a node's logits are finite (bool), both [rows, T].
    """
    best, token = logits.max(dim=-1)  # NaN wins a maximum, so `best` tells of it
    return token, torch.isfinite(best)


def sampled_choice(
    logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, filtered: bool
) -> tuple[Tensor, Tensor]:
    """As `greedy_choice`, drawn from the warped target.

    sampler: of all rows; `rows` [rows] picks. positions: [rows, T] int64, where the nodes stand; a token stands one
    further. filtered: see `warp`.
    """
    count, width, vocab = logits.shape
    finite = torch.isfinite(logits.max(dim=-1).values)
    params, each_row = sampler.params, rows.repeat_interleave(width)
    each = WarpParams(*(v[each_row] for v in (params.temperature, params.top_k, params.top_p, params.min_p)))
    safe = torch.where(finite[:, :, None], logits, 0)
    coins = philox_coin(sampler.seed[rows][:, None].expand(count, width), positions + 1)
    token = draw(warp(safe.reshape(count * width, vocab), each, filtered), coins.reshape(-1))
    return token.reshape(count, width), finite


def force(choice: Tensor, finite: Tensor, accept_len: int, commit_width: int) -> Accepted:
    """A path of the first `accept_len` nodes after the root, right or wrong: for measuring speed only."""
    rows = choice.shape[0]
    column = torch.arange(commit_width, device=choice.device).expand(rows, -1)
    path = torch.where(column <= accept_len, column, 0)
    tokens = choice.gather(1, path)
    lengths = torch.full((rows,), accept_len, dtype=torch.int64, device=choice.device)
    return Accepted(path, lengths, tokens, tokens[:, accept_len], finite.gather(1, path).all(dim=1))


def accept(tree: DraftTree, choice: Tensor, finite: Tensor, commit_width: int) -> Accepted:
    """Follow the target's choices through each tree.

    choice: [rows, T] int64, the target's token after each node. finite: [rows, T] bool, of its logits there. The path
    is the line from the root to the deepest node that, with all its ancestors, equals its parent's choice. A live row's
    siblings differ, so there is one such node; the dummy row's are equal, and of several the first is taken. A line has
    one node a depth, so no path is longer than its tree is deep, whatever the tree. Logits off the path are not looked
    at (but a value that is not finite spoils its whole tree: in attention even a masked one counts 0 times NaN).
    """
    rows, width = tree.tokens.shape
    wanted = tree.tokens == choice.gather(1, tree.parent)
    wanted[:, 0] = True
    agreed = ~(tree.mask & ~wanted[:, None, :]).any(dim=2)  # [rows, T], itself and its ancestors
    accept_len, last = torch.where(agreed, tree.depth, -1).max(dim=1)  # the first of the deepest
    on_path = tree.mask.gather(1, last[:, None, None].expand(-1, 1, width))[:, 0]  # its line, [rows, T]
    place = torch.where(on_path, tree.depth, commit_width)  # nodes off the path go to a column that is cut
    nodes = torch.arange(width, device=choice.device).expand(rows, -1)
    path = torch.zeros((rows, commit_width + 1), dtype=torch.int64, device=choice.device)
    path = path.scatter_(1, place, nodes)[:, :commit_width]
    tokens = choice.gather(1, path)
    sound = (finite | ~on_path).all(dim=1)
    return Accepted(path, accept_len, tokens, tokens.gather(1, accept_len[:, None])[:, 0], sound)
