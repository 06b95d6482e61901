"""Grafting: nodes that a head's tree would give up go to what followed where the row's text last read as it reads now.

One table of candidates, two proposers. The continuation is a line from the root. As far as the head has proposed its
tokens, their scores rise to what the line is worth; what is left of it hangs on the last of them as further candidates,
behind the head's by index. The best of all become the tree, so a graft takes the place of the nodes that are worth
least. A line's worth is how far matches of its length can be trusted.

The verification takes any tree, so no token depends on it. Plain tensor operations, no host sync.
Source: Graft, arXiv:2605.20104, for the idea; prompt lookup decoding for the matches (`drafts.ngram`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treetop.kernels.tree.row_text import continued, longest_matches

LONGEST, SHORTEST = 8, 2
"""Tokens of a match that are compared, and that it must have."""
GRAFTED = -1
"""In the place of a rank."""


@dataclass(frozen=True, slots=True)
class Graft:
    """Candidates of N nodes in a line; the head's number is n.

    tokens, depth: [rows, N] int64.
    parents: [rows, N] int64, by flat index: the first's is the head's, -1 for the root; that of node i is n + i - 1.
    scores: [rows, N] float32, -inf where the line has ended. They never rise from parent to child.
    """

    tokens: Tensor
    depth: Tensor
    parents: Tensor
    scores: Tensor

    def first(self, count: int) -> "Graft":
        """The part that a batch of so many rows uses."""
        names = self.__dataclass_fields__
        return replace(self, **{name: getattr(self, name)[:count] for name in names})


def trust(length: Tensor) -> Tensor:
    """The chance that what followed a match of so many tokens follows again."""
    return 1 - torch.exp2(-length.to(torch.float32))


@dataclass(frozen=True, slots=True)
class HeadCandidates:
    """Of `TreeBuilder`: tokens, scores [rows, n], parents [rows, 1 + k * S], of which the first 1 + k need not be
    written.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    k: int
    steps: int

    @property
    def above(self) -> Tensor:
        """The parent of each group of candidates, [rows, 1 + k * (S - 1)]: of the first 1 + k always -1 to k - 1."""
        first = torch.arange(-1, self.k, device=self.parents.device).expand(len(self.parents), -1)
        groups = 1 + (self.steps - 1) * self.k
        return torch.cat([first, self.parents[:, self.k + 1 : groups]], dim=1)[:, :groups]


def graft(head: HeadCandidates, out: Graft, text: Tensor, rows: Tensor, end: Tensor) -> None:
    """Write a row's line into `out`, and raise the scores of the head's candidates that are on it.

    text: of all rows, as `kernels.tree.row_text` has it. rows: [rows] int64. end: [rows] int64, where the roots stand.
    """
    n, k, steps, candidates = len(rows), head.k, head.steps, head.tokens.shape[1]
    own = text[rows]
    place, length = longest_matches(own, end, 1, LONGEST)
    line = continued(own, end, place, steps)[:, 0].to(torch.int64)  # [rows, S]
    found = length[:, 0] >= SHORTEST
    worth = trust(length + torch.arange(steps, device=rows.device)).log().cumsum(dim=1)  # [rows, S]

    above = head.above
    children = head.tokens.view(n, above.shape[1], k)
    at, shared, joined = torch.full_like(end, -1), torch.zeros_like(end), found
    for depth in range(steps):
        below = (above == at[:, None])[:, :, None] & (children == line[:, depth, None, None])
        below = below.flatten(1) & joined[:, None]
        joined, flat = below.any(dim=1), below.to(torch.int32).argmax(dim=1)
        score = head.scores.gather(1, flat[:, None])
        raised = torch.where(joined[:, None], torch.maximum(score, worth[:, depth, None]), score)
        head.scores.scatter_(1, flat[:, None], raised)
        at, shared = torch.where(joined, flat, at), shared + joined

    column = torch.arange(out.tokens.shape[1], device=rows.device)
    index = shared[:, None] + column
    there, index = found[:, None] & (index < steps), index.clamp(max=steps - 1)
    out.tokens.copy_(line.gather(1, index))
    out.depth.copy_(index + 1)
    out.parents.copy_(torch.where(column == 0, at[:, None], candidates + column - 1))
    out.scores.copy_(torch.where(there, worth.gather(1, index), float("-inf")))
