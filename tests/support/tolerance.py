"""How far floating-point sums may be off, whatever order a CPU or GPU adds in: by their lengths and magnitudes.

A sum of n products lies within gamma(n) * sum |a_i * b_i| of the exact one, in any order. gamma(n) is at worst
n * u / (1 - n * u), and 6 * sqrt(n) * u but for one time in 10^7 if roundings are independent. Sources: Higham,
Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1; Higham and Mary, A New Approach to
Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_OTHERS = 16
"""Roundings beside those of a sum: inputs that are scaled, an exponential of a few units, a division."""
_STEEPEST_SILU = 1.1


@dataclass(frozen=True)
class Exact:
    """value: in float64. error: how far from it the same in float32 may be, elementwise."""

    value: Tensor
    error: Tensor


def unit(dtype: torch.dtype = torch.float32) -> float:
    """The relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def gamma(n: int) -> float:
    """The relative error of a sum of n float32 products, the smaller of both bounds."""
    worst = n * unit() / (1 - n * unit())
    return min(worst, 6 * math.sqrt(n) * unit())


def product(x: Tensor, weight: Tensor) -> Exact:
    """`x @ weight.T`. x: [rows, k]; weight: [n, k]."""
    x, weight = x.double(), weight.double()
    return Exact(x @ weight.T, gamma(x.shape[1] + _OTHERS) * (x.abs() @ weight.abs().T))


def gated_product(x: Tensor, weight: Tensor) -> Exact:
    """`silu(gate) * up`, the halves of `x @ weight.T`."""
    both = product(x, weight)
    (gate, up), (gate_error, up_error) = both.value.chunk(2, dim=-1), both.error.chunk(2, dim=-1)
    value = F.silu(gate) * up
    of_sums = _STEEPEST_SILU * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    return Exact(value, of_sums + gamma(_OTHERS) * (value.abs() + of_sums))


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Exact:
    """x over its root mean square, times weight."""
    value = F.rms_norm(x.double(), weight.shape, weight.double(), eps)
    return Exact(value, gamma(x.shape[-1] + _OTHERS) * value.abs())


def log_softmax(logits: Tensor) -> Exact:
    """Log-probabilities over the last dimension; -inf where there is none."""
    value = logits.double().log_softmax(-1)
    largest = logits.double().abs().nan_to_num(posinf=0).amax(-1, keepdim=True)
    return Exact(value, gamma(logits.shape[-1] + _OTHERS) * (1 + largest).expand_as(value))


def assert_near(got: Tensor, exact: Exact) -> None:
    """Every element is within its error, and a rounding to got's dtype; infinities are where they should be."""
    assert got.shape == exact.value.shape
    info = torch.finfo(got.dtype)
    size = exact.value.abs() + exact.error
    allowed = exact.error + (info.eps * size / 2 if info.bits < 32 else 0) + info.smallest_normal * info.eps
    off = (got.double() - exact.value).abs()
    good = (off <= allowed) | (got.double() == exact.value)
    assert bool(good.all()), f"{int((~good).sum())} of {good.numel()} are off, by up to {float((off / allowed).max())}x"


def attention_errors(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[float, float]:
    """How far outputs and log-sum-exps of attention may be off; it takes and gives q's dtype, inside is float32.

    q: [rows, n, heads, dim]; k, v: [rows, keys, kv_heads, dim]; what is not finite counts as 0. A weight is off by what
    its score is, and so is the sum that divides it; where parts are merged, the shares of the parts are once more. In
    16 bits weights, parts and outputs are rounded too.
    """
    dtype, keys = q.dtype, k.shape[1]
    q, k, v = (each.double().nan_to_num(0, 0, 0) for each in (q, k, v))
    largest = float((q.abs().flatten(1, 2) @ k.abs().flatten(1, 2).mT).max()) * scale
    of_weights = gamma(q.shape[3] + _OTHERS) * (largest + math.log(keys)) + gamma(keys + _OTHERS)
    roundings = 4 * unit(dtype) if dtype != torch.float32 else 0.0
    return (4 * of_weights + roundings) * float(v.abs().max()), of_weights
