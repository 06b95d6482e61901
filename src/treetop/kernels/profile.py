"""How an engine computes where that decides what a row's bits depend on: one value, chosen once, at the plan.

Everything that may be computed in two ways reads a field here; nothing else asks for `--exactness`. What each way has
to be is written down in docs/exactness.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.exact.fixed_point import fixed_point_linear
from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, batch_invariant_linear, sum_by_halves
from treetop.kernels.fused import joined, joined_in_order
from treetop.kernels.moe.routing import linear_uncut
from treetop.types.config import Exactness


@dataclass(frozen=True, slots=True)
class Integers:
    """Where sums are of integers. products: with all weights, and not only with those of which no call is exact.
    attention: in attention."""

    products: bool = False
    attention: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """The ways that are taken.

    exactness: that this is, of `--exactness`.
    batch_invariant: an operation that has a form by rows takes it, and no launch cuts a sum over k: a row has the same
        bits in any company. Without it the fastest form and launch serve.
    functions: activations of plain tensor operations.
    linear: products of plain tensor operations, as `F.linear`.
    total: the sum over the last dimension, which stays.
    one_line: the product of x [..., in] with one line of weights [1, in]: [..., 1].
    joined: the sum of a product's parts.
    sums_in_order: several parts or ranks' shares are one sum, in their order, whatever their rows.
    products: with a target's weights, by the fastest call for each number of rows, by one call for all, or on a GPU by
        what a probe found to be exact.
    exact_attention: the attention backend has to give a query the same bits in any batch.
    integers: what serves on a CPU instead of the library's exact products: sums of integers (`exact.fixed_point`).
    """

    exactness: Exactness
    batch_invariant: bool
    functions: Functions
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    total: Callable[[Tensor], Tensor]
    one_line: Callable[[Tensor, Tensor], Tensor]
    joined: Callable[[Tensor], Tensor]
    sums_in_order: bool
    products: Literal["fastest", "one call", "probed"]
    exact_attention: bool
    integers: Integers = Integers()


def _line_by_halves(x: Tensor, weight: Tensor) -> Tensor:
    return sum_by_halves((x.float() * weight[0].float())[..., None]).to(x.dtype)


def _total(x: Tensor) -> Tensor:
    return x.sum(dim=-1, keepdim=True)


def _total_by_halves(x: Tensor) -> Tensor:
    return sum_by_halves(x[..., None])


TIES = Profile("ties", False, LIBRARY, F.linear, _total, F.linear, joined, False, "fastest", False)
_BITS_OF_CPU = Profile(
    "bits",
    True,
    BY_ELEMENT,
    batch_invariant_linear,
    _total_by_halves,
    _line_by_halves,
    joined_in_order,
    True,
    "one call",
    True,
)
_BITS_OF_GPU = replace(  # a GPU computes each element alike
    _BITS_OF_CPU, functions=LIBRARY, linear=linear_uncut, products="probed"
)


def profile_of(exactness: Exactness, device: torch.device, integers: Integers = Integers()) -> Profile:
    """The profile of `--exactness` on a device. Whether it can be honoured: `engine.startup.exactness`."""
    if exactness != "bits":  # of auto before it is settled (`engine.startup.exactness_table`)
        return TIES
    if device.type != "cpu":
        return _BITS_OF_GPU
    linear = fixed_point_linear if integers.products else batch_invariant_linear
    return replace(_BITS_OF_CPU, linear=linear, integers=integers)
