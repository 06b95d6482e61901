"""What a library says of the committed keys, to be merged with a tail."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """What a library says of the committed keys.

    out: [rows, n, heads, value_dim], dense in its last dimension. lse: [rows, n, heads] float32, any strides; times
    `unit` it is the natural logarithm. kv_len: [rows] int64, the number of keys. Where a row has none, or the lse is
    -inf, neither counts, whatever lies there: libraries differ on what they leave for an empty prefix. An lse of a row
    with keys that is NaN or +inf is an error before, and shows.
    """

    out: Tensor
    lse: Tensor
    kv_len: Tensor
    unit: float = 1.0

    def normalised(self) -> tuple[Tensor, Tensor]:
        """(out, lse) as the contract has them: natural, and 0 and -inf where nothing was seen."""
        seen = (self.kv_len > 0)[:, None, None] & (self.lse != float("-inf"))
        return torch.where(seen[..., None], self.out, 0), torch.where(seen, self.lse * self.unit, float("-inf"))
