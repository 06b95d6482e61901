"""A digest of each round, so that ranks which diverge are found before a token leaves.

Trees, paths and tokens of all ranks are the same bytes, because all choose from the same bytes; so are features, for
sums are added in one order. A digest of them travels with each step's results, and the host compares
(`distributed/tp_executor.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from treetop.engine.buffers import RoundBuffers
from treetop.engine.rounds import RoundKey

StepDigest = Callable[[Tensor, RoundBuffers, RoundKey], None]
"""(out, buffers, key): writes into out [1] int64 what a round came to."""
_FEATURES = 64
"""Numbers of each token's features that are looked at: what goes wrong in a sum spreads to all of them."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""
_FACTOR, _STEP = 0x5851F42D4C957F2D, 0x14057B7EF767814E


def no_digest(out: Tensor, buffers: RoundBuffers, key: RoundKey) -> None:
    """Of one rank nothing is asked."""


class TreeAndPathDigest:
    """A `StepDigest`: the digest of a round's trees and accepted paths, their scores and features, of padding too."""

    def __init__(self) -> None:
        self._factors: dict[int, Tensor] = {}

    def __call__(self, out: Tensor, buffers: RoundBuffers, key: RoundKey) -> None:
        tree, accepted = buffers.tree_of(key.bucket, key.shape), buffers.accepted_of(key.bucket, key.shape)
        features = buffers.aux_hidden_of(key.bucket, key.shape)[..., :_FEATURES]
        numbers = (tree.tokens, tree.parent, accepted.path, accepted.accept_len, accepted.tokens)
        flat = torch.cat([each.reshape(-1) for each in (*numbers, bits(tree.logprob), bits(features))])
        if len(flat) not in self._factors:
            self._factors[len(flat)] = factors(len(flat), out.device)
        torch.sum(flat * self._factors[len(flat)], dim=0, keepdim=True, out=out)


def bits(numbers: Tensor) -> Tensor:
    """Floating-point numbers as integers."""
    return numbers.contiguous().view(_INTEGERS[numbers.itemsize])


def factors(count: int, device: torch.device) -> Tensor:
    """[count] int64: a sum of integers times these changes with any one of them."""
    return torch.arange(count, device=device) * _FACTOR + _STEP | 1  # odd: no bit of a number is lost, but overflow
