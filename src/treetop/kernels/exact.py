"""What makes a result of a row on a CPU the same bits in any company: probed row counts, and functions by element.

A library sums a product in an order that it may choose by the number of rows: of MKL, one row, two or three, and more
differ. So rows go to a call in counts that were probed (`PADDED_ROWS`), padded up to one, and many go in slices. What a
probe compares are bits, of rows anywhere in a batch, for one number of threads. Where no call passes, sums are of
integers (`exact.fixed_point`).

A library's elementwise kernel may compute the last elements of its range otherwise than the others (a vector's lanes
or one number, `exp` of another source), and the range depends on batch and threads. `BY_ELEMENT` are made of
operations of IEEE 754, which have one result, and of `exp`, `log1p` and `tanh`, which `elementwise_problem` checks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.exact.first_calls import call_once_alone
from treetop.exact.fixed_point import fixed_point_linear
from treetop.exact.probe import adversarial, differing, same_bits

MOST_ROWS = 128
"""Of one call; what has more is cut."""
LEAST_ROWS = 32
"""No call is padded to more: one that would have to be is not exact."""


def padded_rows(rows: int) -> int:
    """The probed count that holds `rows`, 1 to `MOST_ROWS`: at most an eighth more, beyond 16."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


PADDED_ROWS = sorted({padded_rows(rows) for rows in range(1, MOST_ROWS + 1)})


class BatchInvariantCall:
    """A call x [..., in] -> [..., out], contiguous, whose result for a row has the same bits whatever the others are.

    least: the number of rows from which on that holds, see `least_rows`.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], least: int) -> None:
        self._call, self._padded_rows = call, _rungs_from(least)

    def __call__(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[-1]
        if count <= MOST_ROWS and self._padded_rows[count] == count:
            return self._call(x)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.cat([self._padded(part) for part in rows.split(MOST_ROWS)])
        return out.view(*x.shape[:-1], out.shape[-1])

    def _padded(self, rows: Tensor) -> Tensor:
        count, width = rows.shape
        excess = self._padded_rows[count] - count
        return self._call(torch.cat([rows, _zeros(excess, width)]))[:count] if excess else self._call(rows)


@cache
def _zeros(rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width)


def least_rows(call: Callable[[Tensor], Tensor], width: int) -> int | None:
    """The least of `PADDED_ROWS` from which on a row's bits depend on it alone; None if it is above `LEAST_ROWS`.

    call: x [rows, width] -> [rows, out]. Tried with numbers of widely different size, so that another order of a sum
    shows, with ties, zeros and what cancels, at every padded count, the rows in other places of the batch.
    """
    generator = torch.Generator().manual_seed(len(PADDED_ROWS) * width)
    x = adversarial((MOST_ROWS, width), generator)
    following = dict(zip(PADDED_ROWS, [*PADDED_ROWS[1:], MOST_ROWS + 1], strict=True))
    least = max((following[rows] for rows in differing(call, (x,), PADDED_ROWS, generator)), default=1)
    return least if least <= LEAST_ROWS else None


@cache
def _rungs_from(least: int) -> Sequence[int]:
    """By the number of rows, 0 to `MOST_ROWS`, the count to which they are padded."""
    return [padded_rows(max(rows, least, 1)) for rows in range(MOST_ROWS + 1)]


@cache
def least_rows_of_linear(out: int, width: int, threads: int) -> int | None:
    """`least_rows` of `F.linear` with a float32 weight [out, width]. threads: of PyTorch."""
    weight = torch.randn((out, width), generator=torch.Generator().manual_seed(out))
    return least_rows(lambda x: F.linear(x, weight), width)


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of float32 x [rows, in], whose rows have the same bits in any company."""
    least = least_rows_of_linear(*weight.shape, torch.get_num_threads())
    if least is None:
        return fixed_point_linear(x, weight, bias)
    out = BatchInvariantCall(lambda rows: F.linear(rows, weight), least)(x)
    return out if bias is None else out + bias


def sum_by_halves(terms: Tensor) -> Tensor:
    """The sum over the last dimension but one, which goes: additions by element, in an order of its length alone."""
    while terms.shape[-2] > 1:
        n, half = terms.shape[-2], terms.shape[-2] // 2
        both = terms[..., :half, :] + terms[..., n - half :, :]
        terms = torch.cat([both, terms[..., half : n - half, :]], dim=-2) if n % 2 else both
    return terms[..., 0, :]


# ----------------------------------------------------------------------------------------------- by element


@dataclass(frozen=True, slots=True)
class Functions:
    """Activations, elementwise."""

    sigmoid: Callable[[Tensor], Tensor]
    softplus: Callable[[Tensor], Tensor]
    silu: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _sigmoid_by_element(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _softplus_by_element(x: Tensor) -> Tensor:
    """log(1 + e^x), of large numbers x itself."""
    return torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())


def _silu_by_element(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1)


def _gelu_tanh_by_element(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Source: arXiv:1606.08415, section 2."""
    cubic = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(0.7978845608028654)
    return cubic.tanh_().add_(1).mul_(0.5).mul_(x)


LIBRARY = Functions(torch.sigmoid, F.softplus, F.silu, _gelu_tanh)
BY_ELEMENT = Functions(_sigmoid_by_element, _softplus_by_element, _silu_by_element, _gelu_tanh_by_element)

_UNIFORM: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log1p": lambda x: torch.log1p(x.abs()),
    "tanh": torch.tanh,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
}
_BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "the norm of a row": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "the sum of a row": lambda x: x.sum(dim=-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda x: torch.log_softmax(x, dim=-1),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "cumsum": lambda x: x.abs().cumsum(dim=-1, dtype=torch.float64),
}


@cache
def elementwise_problem(threads: int) -> str | None:
    """Which operation beside products and attention has bits that depend on more than its element or its row.

    None if there is none. threads: of PyTorch. Elements are tried at every offset of a vector, and in tensors large
    enough to be divided among threads.
    """
    call_once_alone()
    generator = torch.Generator().manual_seed(threads)
    flat = adversarial((1, 70_001), generator)[0].clamp_(-80, 80)
    places = [(0, 1), (3, 20), (1, 64), (17, 101), (5, 33), (7, 70_000), (0, 66_001), (33, 40_003)]
    for name, function in {**_UNIFORM, **_of_functions()}.items():
        want = function(flat)
        for start, stop in places:
            if not same_bits(function(flat[start:stop].clone()), want[start:stop]):
                return name
    for width in (61, 512, 4099):
        x = adversarial((64, width), generator).clamp_(-80, 80)
        for name, function in _BY_ROW.items():
            if any(differing(function, (x,), (1, 2, 3, 5, 17, 63), generator)):
                return name
    return None


def _of_functions() -> dict[str, Callable[[Tensor], Tensor]]:
    return {f"{name} by element": getattr(BY_ELEMENT, name) for name in Functions.__dataclass_fields__}
