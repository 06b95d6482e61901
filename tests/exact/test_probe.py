"""The frame of all probes of bits."""

import pytest
import torch

from treetop.exact.probe import BitProbe, RowCase, adversarial, differing, of_rows, same_bits
from treetop.types import user_cache


def probe_of(*cases, counts=(1, 2, 5)):
    return BitProbe(lambda _: cases, counts, 40, 3, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_sign_of_zero_is_a_bit_and_any_nan_is_one(dtype):
    """A NaN's bits say nothing; in one tensor alone it is another result."""
    one = torch.tensor([0.0, 1.0, float("nan")], dtype=dtype)
    assert same_bits(one, one.clone())
    assert not same_bits(one, torch.tensor([-0.0, 1.0, float("nan")], dtype=dtype))
    assert not same_bits(one, torch.tensor([0.0, float("nan"), float("nan")], dtype=dtype))
    assert same_bits(torch.stack([one, one], 1)[:, 0], one), "strides are no bits"
    assert not same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_each_result_is_compared_where_its_row_stands():
    """One of two results that depends on the number of rows, or on a row's place, is found."""
    x, generator = adversarial((40, 6), torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2)
    second = differing(lambda x: (x, x + (len(x) == 2)), (x,), (1, 2, 5), generator)
    assert list(second) == [2]
    assert list(differing(lambda x: x + torch.arange(len(x))[:, None] % 3, (x,), (5, 40), generator)) == [5, 40]


def test_what_must_be_zero_is_a_case_of_its_own():
    case = RowCase("pages", 4, lambda x, number: (x, (number == 7)[:, None] * 1.0), last_are_zero=1)
    assert dict(probe_of(case).run()) == {"pages": [], "pages, prefilled as in a round": [40]}


def test_a_verdict_is_kept_where_nothing_was_found_and_only_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(user_cache.user_cache("exact-odd")).startswith(str(tmp_path))
    ran = []

    def halved(x):
        ran.append(len(x))
        return x / 2

    odd = probe_of(RowCase("odd", 3, of_rows(lambda x: x + (len(x) == 5))))
    assert [odd.kept_problem("exact-odd", "a") for _ in range(2)] == ["odd of 5 rows"] * 2
    even = probe_of(RowCase("even", 3, of_rows(halved)))
    assert even.kept_problem("exact-odd", "b") is None
    assert ran
    ran.clear()
    assert even.kept_problem("exact-odd", "b") is None
    assert not ran
    assert even.kept_problem("exact-odd", "c") is None
    assert ran, "what was found of one machine is believed of another"


def test_numbers_of_a_probe_have_zeros_equal_ones_and_such_that_cancel():
    """In one row of sixteen each: what hides or shows an order of a sum."""
    x = adversarial((40, 7), torch.Generator().manual_seed(1))
    for first in (0, 16):
        assert not x[first + 5].any()
        assert (x[first + 6] == x[first + 6, 0]).all()
        assert x[first + 6, 0] != 0
        assert torch.equal(x[first + 7, 3:6], -x[first + 7, :3])
        assert x[first + 7, :3].all()
    size = x[:5].abs()
    assert size.max() > 1000 * size.min()
