"""E4M3 by its specification, for tests: every number there is, and the nearest of them; nothing of `treetop`.

Source: OCP 8-bit Floating Point Specification 1.0, table 1.
"""

import torch
from torch import Tensor

VALUES = torch.tensor(
    [(code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)],
    dtype=torch.float64,
)
"""Of codes 0 to 126, rising; 127 is NaN, and 128 more is the negative."""


def rounded(x: Tensor) -> Tensor:
    """The nearest number, of two the one with the even code, at most +-448; NaN stays NaN. x, result: float64."""
    assert x.dtype == torch.float64
    size = x.abs().clamp(max=448.0).nan_to_num(0.0)
    above = torch.bucketize(size, VALUES).clamp(max=126)  # the first that is not below
    below = (above - 1).clamp(min=0)
    more, less = VALUES[above] - size, size - VALUES[below]
    code = torch.where((less < more) | ((less == more) & (below % 2 == 0)), below, above)
    return torch.where(x.isnan(), x, VALUES[code].copysign(x))


def rounded_kv(x: Tensor, scales: Tensor | None = None) -> Tensor:
    """What K or V in FP8 stand for; quotients are float32. x: [..., heads, dim] float64. scales: [heads]; None is 1."""
    each = x.new_ones(x.shape[-2]) if scales is None else scales.double()
    return rounded((x / each[:, None]).float().double()) * each[:, None]
