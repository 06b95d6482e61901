"""The tolerances of the other tests: no order of adding up leaves them, and a wrong term does."""

import pytest
import torch
import torch.nn.functional as F

from support.tolerance import assert_near, attention_errors, gated_product, product


def one_by_one(x, weight):
    """A float32 product, each sum from its first term to its last."""
    total = torch.zeros(len(x), len(weight))
    for a, b in zip(x.T, weight.T, strict=True):
        total = total + a[:, None] * b
    return total


def in_lanes(x, weight, lanes):
    """The same in so many sums side by side, as vectors add up."""
    parts = [one_by_one(x[:, i::lanes], weight[:, i::lanes]) for i in range(lanes)]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_order_of_a_sum_is_near_and_a_missing_term_is_not(lanes, reverse):
    """Also of gates of 14 x 14, where a float32 product alone is off by 8e-6."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1024), torch.randn(32, 1024) / 8
    a, b = (x.flip(1), weight.flip(1)) if reverse else (x, weight)
    got = in_lanes(a, b, lanes)
    gate, up = got.chunk(2, dim=1)
    assert_near(got, product(x, weight))
    assert_near(F.silu(gate) * up, gated_product(x, weight))
    short = x.clone()
    short[:, 700] = 0
    for wrong in (in_lanes(short, weight, lanes), got.half().float()):
        with pytest.raises(AssertionError, match="are off, by up to"):
            assert_near(wrong, product(x, weight))


def test_attention_is_as_near_as_its_scores_are_large():
    """Larger scores and longer sums let it be further off; garbage that no query sees does not count."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    out, lse = attention_errors(q, k, v, 0.25)
    assert 1e-6 < out < 1e-3
    assert attention_errors(10 * q, k, v, 0.25)[0] > 5 * out
    assert attention_errors(q, k, 10 * v, 0.25) == (pytest.approx(10 * out), lse)
    k[0, 0], v[0, 0] = float("nan"), float("inf")
    assert attention_errors(q, k, v, 0.25)[0] <= out
    assert attention_errors(q.half(), k, v, 0.25)[0] > 1e-3
