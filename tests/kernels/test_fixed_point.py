"""Sums of integers in float64: no order, no cut and no neighbour changes a bit, and they err less than float32's."""

import pytest
import torch
import torch.nn.functional as F

from treetop.attention.integer_sums import index_scores_of_integers
from treetop.exact import fixed_point
from treetop.exact.fixed_point import (
    LINE,
    LONGEST,
    FixedPointMatrices,
    FixedPointWeight,
    fixed_point_linear,
    fixed_point_mean,
    fixed_point_scores,
    fixed_point_sum,
    in_parts,
    of_parts,
    on_grid,
)
from treetop.exact.probe import adversarial
from treetop.kernels.attention.indexer import IndexQuery, index_scores
from treetop.kernels.exact import least_rows

SHAPES = [(24, 50), (7, 16), (64, LONGEST), (33, LONGEST + 1), (16, 5000)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape):
    """By the probe that library calls are held to, from one row on."""
    weight = torch.randn(shape, generator=generator())
    assert least_rows(FixedPointWeight(weight), shape[1]) == 1
    assert least_rows(lambda x: fixed_point_linear(x, weight, None), shape[1]) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_terms_may_be_added_in_any_order(shape):
    """With the columns in another order: what a library with other sums would do. Up to `LONGEST`."""
    out, width = shape[0], min(shape[1], LONGEST)
    weight, x = adversarial((out, width), generator(1)), adversarial((9, width), generator(2))
    order = torch.randperm(width, generator=generator(3))
    assert torch.equal(FixedPointWeight(weight)(x), FixedPointWeight(weight[:, order])(x[:, order]))
    assert not torch.equal(F.linear(x, weight), F.linear(x[:, order], weight[:, order])), "the comparison sees nothing"


def test_every_partial_sum_fits_into_float64():
    """The largest numbers that a grid holds, all of one sign, at the longest sum: integers, and none is rounded."""
    x, weight = torch.full((3, LONGEST), 1.0 - 2**-24), torch.full((5, LONGEST), -(1.0 - 2**-24))
    parts, _ = in_parts(x)
    lines, _ = on_grid(weight, LINE)
    assert int(parts.abs().max()) == 2**fixed_point.PART
    assert int(lines.abs().max()) == 2**LINE - 4  # of 24 bits
    exact = parts.to(torch.int64) @ lines.to(torch.int64).t()
    assert 2**53 - 2**34 < int(exact.abs().max()) <= 2**53
    assert torch.equal((parts @ lines.t()).to(torch.int64), exact)


@pytest.mark.parametrize("width", [64, 576, 1536, 5000])
def test_it_errs_less_than_the_librarys_float32(width):
    weight, x = torch.randn((40, width), generator=generator(4)), torch.randn((60, width), generator=generator(5))
    want = x.double() @ weight.double().t()

    def error(got):
        return float((got.double() - want).square().mean().sqrt())

    assert error(FixedPointWeight(weight)(x)) < error(F.linear(x, weight)) / 2
    x[:, 3] *= 100.0  # an outlier takes bits from the others
    want = x.double() @ weight.double().t()
    assert error(FixedPointWeight(weight)(x)) < error(F.linear(x, weight))


def test_a_grid_of_too_few_bits_is_noticed(monkeypatch):
    """The mutant rounds rows to 16 bits: it is as exact, and errs more than float32."""
    weight, x = torch.randn((40, 576), generator=generator(4)), torch.randn((60, 576), generator=generator(5))
    want = x.double() @ weight.double().t()
    monkeypatch.setattr(fixed_point, "PART", 8)
    error = (FixedPointWeight(weight)(x).double() - want).square().mean().sqrt()
    assert error > 10 * (F.linear(x, weight).double() - want).square().mean().sqrt()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(value):
    weight, x = torch.randn((5, 40), generator=generator()), torch.randn((4, 40), generator=generator(1))
    want = FixedPointWeight(weight)(x)
    x[2, 7] = value
    got = FixedPointWeight(weight)(x)
    assert not bool(got[2].isfinite().any())
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


def test_zeros_and_the_least_numbers_have_products():
    weight = torch.tensor([[0.0] * 4, [2.0**-149] * 4, [1.0, 0, 0, 0], [2.0**127] * 4])
    x = torch.tensor([[0.0] * 4, [2.0**-149, 0, 0, 0], [2.0**-100] * 4])
    assert torch.equal(FixedPointWeight(weight)(x), (x.double() @ weight.double().t()).float())
    assert FixedPointWeight(weight)(x[:0]).shape == (0, 4)
    assert FixedPointWeight(weight)(x.view(1, 3, 4)).shape == (1, 3, 4)


def test_parts_are_a_number():
    x = adversarial((2, 7, 33), generator())
    whole, unit = on_grid(x, 2 * fixed_point.PART)
    parts, same = in_parts(x)
    assert torch.equal(of_parts(parts), whole)
    assert torch.equal(unit, same)


def test_matrices_of_heads_are_weights_of_each():
    matrices, x = torch.randn((3, 40, 9), generator=generator()), torch.randn((3, 6, 40), generator=generator(1))
    got = FixedPointMatrices(matrices)(x)
    for head in range(3):
        assert torch.equal(got[head], FixedPointWeight(matrices[head].t().contiguous())(x[head]))


@pytest.mark.parametrize("keys", [5, LONGEST, LONGEST + 1, 3 * LONGEST + 5])
def test_attention_is_one_sum_wherever_its_keys_lie(keys):
    """In another order, and between others that no query sees, of any number: so in other pieces, too."""
    weights = torch.softmax(4 * torch.randn((2, 3, keys), generator=generator()), -1)
    v = adversarial((2, keys, 16), generator(1))
    want, mass = fixed_point_mean(weights, *on_grid(v, LINE)), fixed_point_sum(weights)
    exact = weights.double() @ v.double()
    torch.testing.assert_close(want, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
    torch.testing.assert_close(mass, weights.double().sum(-1, keepdim=True), rtol=0, atol=1e-5)
    total = keys + 1000
    at = torch.randperm(total, generator=generator(2))[:keys]
    spread, others = torch.zeros((2, 3, total)), adversarial((2, total, 16), generator(3)) * 1e6
    spread[:, :, at], others[:, at] = weights, v
    assert torch.equal(fixed_point_mean(spread, *on_grid(others, LINE)), want)
    assert torch.equal(fixed_point_sum(spread), mass)


def test_an_indexers_scores_are_those_of_each_query_and_key_alone():
    """Near `index_scores`, and with the same bits for fewer queries, rows and keys in another order."""
    heads, keys = adversarial((3, 5, 4, 16), generator()), adversarial((3, 40, 16), generator(1))
    query = IndexQuery(heads, torch.randn((3, 5, 4), generator=generator(2)), 7)
    want, near = index_scores_of_integers(query, keys), index_scores(query, keys)
    torch.testing.assert_close(want, near, rtol=1e-4, atol=1e-4 * float(near.abs().max()))
    order = torch.randperm(40, generator=generator(3))
    few = IndexQuery(heads[1:2, 2:4], query.weights[1:2, 2:4], 7)
    assert torch.equal(index_scores_of_integers(few, keys[1:2, order]), want[1:2, 2:4][..., order])


def test_scores_are_those_of_each_key_alone():
    q, k = adversarial((2, 5, 64), generator()), adversarial((2, 31, 64), generator(1))
    want = fixed_point_scores(q, *on_grid(k, LINE))
    for key in (0, 7, 30):
        own = k[:, key : key + 1]
        assert torch.equal(fixed_point_scores(q[:, 1:3], *on_grid(own, LINE)), want[:, 1:3, key : key + 1])
    torch.testing.assert_close(want, (q.double() @ k.double().mT).float(), rtol=1e-4, atol=1e-2)
