"""Trees that rounds verified, on their way to requests that ask for them: integers in one tensor, with the results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.types.tree import Accepted, DraftTree
from treetop.types.verified_tree import VerifiedTree


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """packed: [rows, 3 * nodes + S + 1] int64: tokens, -1 of padding, parents, bits of log-probabilities, path.
    nodes: of a tree.
    """

    packed: Tensor
    nodes: int

    @staticmethod
    def width(nodes: int, commit_width: int) -> int:
        """Integers of a row."""
        return 3 * nodes + commit_width

    @classmethod
    def of(cls, tree: DraftTree, accepted: Accepted) -> "PackedTrees":
        """Copies, on the device."""
        bits = tree.logprob.to(torch.float64).view(torch.int64)
        tokens = tree.tokens.masked_fill(tree.is_padding, -1)
        return cls(torch.cat([tokens, tree.parent, bits, accepted.path], 1), tree.tokens.shape[1])

    def tree_of(self, item: int, accepted: tuple[int, ...]) -> VerifiedTree:
        """Of a row, on the host. accepted: its tokens, of which the last is the bonus."""
        tokens, parents, bits, path = self.packed[item].split(
            [self.nodes] * 3 + [self.packed.shape[1] - 3 * self.nodes]
        )
        count = int((tokens >= 0).sum())
        return VerifiedTree(
            tuple(tokens[:count].tolist()),
            tuple(parents[:count].tolist()),
            tuple(bits[:count].view(torch.float64).tolist()),
            tuple(path[: len(accepted)].tolist()),
            accepted[-1],
        )
