"""Exact attention's two sums as sums of integers, which no library and no order changes (`exact.fixed_point`).

    score of a key    (q * scale) . k: the exact sum of both on their grids, rounded
    result            the exact sum of weight * v over all keys, by the exact sum of the weights, rounded once

A key that is not seen has weight 0 and changes no sum of integers, and there are no blocks: where keys lie, and which
lie beside them, does not matter. An indexer's scores (DSA) are such sums under `--exactness bits` always.
"""

from dataclasses import dataclass

from torch import Tensor

from treetop.attention.exact_layout import LaidKeys, LaidQueries
from treetop.exact.fixed_point import LINE, fixed_point_mean, fixed_point_scores, fixed_point_sum, on_grid
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.exact import sum_by_halves


@dataclass(frozen=True, slots=True)
class _Held:
    """Keys and values [batch, keys, ...] on their grids, each with its unit [batch, keys, 1]."""

    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]


def index_scores_of_integers(query: IndexQuery, keys: Tensor) -> Tensor:
    """`index_scores` in float32, where a query's score of a key is of both alone: a sum of integers by head, then the
    heads by element. keys: [rows, m, index_dim]. Returns [rows, n, m]."""
    rows, n, heads, dim = query.heads.shape
    flat = query.heads.float().reshape(rows, n * heads, dim)
    by_head = fixed_point_scores(flat, *on_grid(keys.float(), LINE)).relu_()
    return sum_by_halves(by_head.view(rows, n, heads, -1).mul_(query.weights[..., None]))


class IntegerSums:
    """`Sums` of `attention.exact_backend`, for any library and any tree."""

    def held(self, keys: LaidKeys) -> _Held:
        return _Held(on_grid(keys.k, LINE), on_grid(keys.v[..., : keys.wide], LINE))

    def scores(self, some: LaidQueries, held: _Held) -> None:
        some.scores.copy_(fixed_point_scores(some.q, *held.key))

    def weighed(self, some: LaidQueries, held: _Held) -> tuple[Tensor, Tensor]:
        total, mass = fixed_point_mean(some.scores, *held.value), fixed_point_sum(some.scores)
        return some.of_heads(total), some.of_heads(mass)
