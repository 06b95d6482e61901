"""What a rank says of its rounds, so that ranks which disagree are found out before a token leaves.

Trees, paths and tokens of all ranks are the same bytes, because all choose from the same bytes; so are features, for
sums are added in one order. A digest of them travels with each step's results, and the host compares
(`core/worker_group.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from treetop.engine.buffers import RoundBuffers
from treetop.engine.rounds import RoundKey

Witness = Callable[[Tensor, RoundBuffers, RoundKey], None]
"""(out, buffers, key): writes into out [1] int64 what a round came to."""
_FEATURES = 64
"""Numbers of each token's features that are looked at: what goes wrong in a sum spreads to all of them."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""
_FACTOR, _STEP = 0x5851F42D4C957F2D, 0x14057B7EF767814E


def alone(out: Tensor, buffers: RoundBuffers, key: RoundKey) -> None:
    """Of one rank nothing is asked."""


def tree_and_path(out: Tensor, buffers: RoundBuffers, key: RoundKey) -> None:
    """The digest of a round's trees and accepted paths, their scores and features, of padding too."""
    tree, accepted = buffers.tree_of(key.bucket, key.shape), buffers.accepted_of(key.bucket, key.shape)
    features = buffers.aux_hidden_of(key.bucket, key.shape)[..., :_FEATURES]
    scores = (bits(tree.logprob), bits(features))
    digest(out, tree.tokens, tree.parent, *scores, accepted.path, accepted.accept_len, accepted.tokens)


def bits(numbers: Tensor) -> Tensor:
    """Floating-point numbers as integers."""
    return numbers.contiguous().view(_INTEGERS[numbers.itemsize])


def digest(out: Tensor, *tensors: Tensor) -> None:
    """A number in out [1] int64 that changes with any one number of the tensors, which are of integers."""
    flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors])
    factor = torch.arange(flat.shape[0], device=flat.device) * _FACTOR + _STEP | 1  # odd: no bit is lost, but overflow
    torch.sum((flat + 1) * factor, dim=0, keepdim=True, out=out)
