"""Row counts that are probed, and functions by element."""

import pytest
import torch
import torch.nn.functional as F

from treetop.exact.fixed_point import fixed_point_linear
from treetop.exact.probe import adversarial
from treetop.kernels import exact
from treetop.kernels.exact import (
    BY_ELEMENT,
    LIBRARY,
    MOST_ROWS,
    PADDED_ROWS,
    BatchInvariantCall,
    least_rows,
    padded_rows,
    sum_by_halves,
)
from treetop.types.cache_files import keep_first, kept
from treetop.types.errors import ConfigError
from treetop.weights import cpu_products
from treetop.weights.cpu_products import Call, choose_exact_products
from treetop.weights.linear import LibraryGated, LibraryLinear


def test_rungs_hold_every_count_and_pad_little():
    for rows in range(1, MOST_ROWS + 1):
        assert padded_rows(rows) in PADDED_ROWS
        assert rows <= padded_rows(rows) <= max(rows, rows * 9 / 8 + 1)


def test_calls_are_given_probed_counts_only():
    """Padded up to the least and to a padded count, and cut where there are more."""
    counts = []

    def call(x):
        counts.append(len(x))
        return x * 2

    for least, allowed in ((4, {n for n in PADDED_ROWS if n >= 4}), (1, set(PADDED_ROWS))):
        for rows in (0, 1, 3, 17, 33, 127, 128, 129, 300):
            counts.clear()
            x = torch.randn(rows, 5)
            assert torch.equal(BatchInvariantCall(call, least)(x), x * 2)
            assert set(counts) <= allowed
    assert BatchInvariantCall(call, 4)(torch.randn(2, 70, 5)).shape == (2, 70, 5)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12, 97])
def test_a_sum_by_halves_has_one_order_for_any_rows(length):
    """The first half is added to the last one, and what is between waits: for an odd length it is the middle."""
    terms = adversarial((6, length, 5), torch.Generator().manual_seed(length))

    def by_hand(numbers):
        while len(numbers) > 1:
            half = len(numbers) // 2
            middle = numbers[half : len(numbers) - half]
            numbers = [a + b for a, b in zip(numbers[:half], numbers[len(numbers) - half :], strict=True)] + middle
        return numbers[0]

    got = sum_by_halves(terms)
    assert torch.equal(got, by_hand(list(terms.unbind(1))))
    assert torch.equal(sum_by_halves(terms[2:3]), got[2:3])


def cut_by_rows(weight):
    """A mutant: from nine rows on a product is a sum of two halves."""

    def call(x):
        half = x.shape[1] // 2
        whole = F.linear(x, weight)
        return (
            whole if len(x) <= 8 else F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:])
        )

    return call


def test_a_product_cut_by_rows_is_noticed():
    """As one below 9 rows and another from there on it is exact from 9 on; if it changes late, never."""
    weight = torch.randn((24, 50), generator=torch.Generator().manual_seed(1))
    assert (least_rows(cut_by_rows(weight), 50) or 0) >= 9
    late = least_rows(lambda x: F.linear(x, weight) + (len(x) > 100) * 2.0**-12, 50)
    assert late is None


def test_one_row_alone_is_tried_with_many_rows():
    """oneDNN sums one row in another order, which shows in some rows only: of [576, 1536] on an Intel CPU of 2026."""

    def call(x):
        return x + (x[:, :1] > 0) * (len(x) == 1) * x * 2.0**-20

    assert least_rows(call, 8) == 2


def test_a_row_that_knows_its_place_is_noticed():
    """Equal counts do not hide what depends on where a row stands."""
    assert least_rows(lambda x: x + torch.arange(len(x))[:, None] % 2, 8) is None


SUMS = {"auto": set(Call), "packed": {Call.PACKED}, "linear": {Call.LINEAR}, "integers": {Call.INTEGERS}}


@pytest.mark.parametrize("sums", sorted(SUMS))
@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("shape", [(24, 50), (96, 64), (211, 64), (64, 200), (7, 16)])
def test_rows_of_chosen_products_are_the_same_in_any_company(shape, orders, sums):
    """Plain, with a bias and gated, by each call that is exact here; counts that were not probed too."""
    try:
        chosen = choose_exact_products([shape], orders, sums)[shape]
    except ConfigError as error:
        assert sums in ("packed", "linear")
        pytest.skip(f"not exact on this CPU: {error}")
    assert chosen.exact
    assert chosen.calls[0] in SUMS[sums]
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    x = adversarial((300, shape[1]), generator)
    products = [LibraryLinear(weight, None, chosen), LibraryLinear(weight, bias, chosen)]
    if shape[0] % 2 == 0:
        products += [LibraryGated(weight, None, chosen, kind) for kind in ("silu", "gelu_tanh")]
    for product in products:
        want = product(x)
        for rows in (1, 2, 3, 5, 9, 19, 35, 60, 131, 299):
            at = torch.randperm(300, generator=generator)[:rows]
            assert torch.equal(product(x[at]), want[at])


@pytest.fixture
def no_exact_call(monkeypatch, tmp_path):
    """A CPU whose library's products all depend on their rows, met for the first time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_products, "_least_rows", lambda shape, call, threads: None)
    monkeypatch.setattr(exact, "least_rows_of_linear", lambda out, width, threads: None)


def test_where_no_call_is_exact_sums_are_of_integers_or_it_is_refused_by_name(no_exact_call):
    assert choose_exact_products([(24, 50)], 2)[24, 50].calls[0] is Call.INTEGERS
    for sums in ("packed", "linear"):
        with pytest.raises(
            ConfigError, match=rf"--exact-sums {sums}: .* \[24, 50\] .* use --exact-sums auto or integers"
        ):
            choose_exact_products([(24, 50)], 2, sums)
    weight, x = torch.randn(24, 50), torch.randn(9, 50)
    assert torch.equal(exact.batch_invariant_linear(x, weight, None), fixed_point_linear(x, weight, None))


def test_what_was_chosen_first_holds_for_later_starts(monkeypatch, tmp_path):
    """Whatever a later one would have timed: calls differ in their bits. Other libraries begin anew."""
    calls = [Call.LINEAR, Call.PACKED]
    monkeypatch.setattr(cpu_products, "_fastest_exact", lambda *_: (calls.pop(0), 4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = choose_exact_products([(24, 50)], 2)[24, 50]
    assert (first.calls[0], first.least) == (Call.LINEAR, 4)
    again = choose_exact_products([(24, 50)] * 3, 1)[24, 50]
    assert (again.calls[0], again.least, again.count) == (Call.LINEAR, 4, 3)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert choose_exact_products([(24, 50)], 2)[24, 50].calls[0] is Call.PACKED


@pytest.mark.parametrize(("gain", "call"), [(0.5, Call.PACKED), (1.2, Call.PACKED), (1.3, Call.LINEAR)])
def test_a_call_is_taken_before_the_packed_one_only_where_it_gains_much(monkeypatch, gain, call):
    """A machine that is busy while calls are timed decides for all later starts."""
    monkeypatch.setattr(cpu_products, "_least_rows", lambda *_: 1)
    monkeypatch.setattr(cpu_products, "default_call", lambda dtype: Call.PACKED)
    times = [{Call.PACKED: 100.0 * gain, Call.LINEAR: 100.0}] * 4
    assert cpu_products._fastest_exact((24, 50), times, 1) == (call, 1)
    assert cpu_products._fastest_exact((24, 50), [*times[:3], {}], 1) == (Call.PACKED, 1), "not all were timed"
    one_slower = {Call.PACKED: 1.0, Call.LINEAR: 1.1}
    assert cpu_products._fastest_exact((24, 50), [*times[:3], one_slower], 1) == (Call.PACKED, 1)


def test_of_two_processes_that_find_out_at_a_time_the_first_one_holds(tmp_path):
    file = tmp_path / "kind" / "hash.json"
    assert keep_first(file, '["one", 1]') == ["one", 1]
    assert keep_first(file, '["other", 2]') == ["one", 1] == kept(file)
    file.write_text("no JSON")
    assert keep_first(file, "[3]") == [3] == kept(file)
    assert sorted(each.name for each in file.parent.iterdir()) == ["hash.json"]
    (tmp_path / "a file").write_text("")
    assert keep_first(tmp_path / "a file" / "hash.json", "[4]") == [4], "nothing can be kept there"


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "silu", "gelu_tanh"])
def test_functions_by_element_are_the_functions_and_depend_on_nothing_else(name):
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, 3e38, -3e38])])
    by_element, library = getattr(BY_ELEMENT, name), getattr(LIBRARY, name)
    want = library(x.double())
    got = by_element(x)
    assert bool(((got - want).abs() <= 1e-6 * want.abs() + 1e-7).all())
    assert torch.equal(got, torch.stack([by_element(each[None])[0] for each in x]))


def test_an_operation_that_depends_on_its_place_is_named(monkeypatch):
    """Probed once a process; a library's sigmoid is such a one, where vectors end."""
    monkeypatch.setitem(exact._UNIFORM, "exp", lambda x: x + (torch.arange(len(x)) >= len(x) - 3))
    exact.elementwise_problem.cache_clear()
    try:
        assert exact.elementwise_problem(1) == "exp"
    finally:
        exact.elementwise_problem.cache_clear()
