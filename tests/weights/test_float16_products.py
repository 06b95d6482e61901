"""Few rows take weights in 16 bits only where no bit changes: of the weight, and of an exact product's sum."""

import pytest
import torch

from treetop import LLM, SamplingParams
from treetop.exact.probe import adversarial, same_bits
from treetop.types.errors import ConfigError
from treetop.weights import cpu_products, float16_products
from treetop.weights.cpu_products import ROW_CLASSES, Call, ChosenProduct, choose_exact_products, exact_piece
from treetop.weights.float16_products import MOST_ROWS, Float16Weight, same_sum, unit_of
from treetop.weights.linear import LibraryGated, LibraryLinear

needs_fbgemm = pytest.mark.skipif(not float16_products.serves(), reason="this build or CPU has no FBGEMM")


def numbers(shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


@pytest.mark.parametrize(
    ("weight", "unit"),
    [
        (torch.tensor([[0.75, 2.0**-20]]), 2.0**-16),
        (torch.tensor([[65504.0, 1.0]]), 1.0),
        (torch.tensor([[-3.0 * 2**100, 2.0**90]]), 2.0**86),
        (torch.zeros(2, 3), 2.0**-16),
        (torch.tensor([[1.0, 2.0**-40]]), None),  # too far apart
        (torch.tensor([[1.0 + 2**-12]]), None),  # more than 11 bits
        (torch.tensor([[2.0**20, 2.0**-149]]), None),  # not even float32 holds it with that divisor
        (torch.tensor([[2.0**-130]]), None),  # its divisor is none of float32
        (torch.tensor([[float("inf"), 1.0]]), None),
        (torch.tensor([[float("nan"), 1.0]]), None),
        (torch.empty(0, 4), None),
    ],
)
def test_a_weight_is_taken_only_if_no_number_of_it_changes(weight, unit):
    assert unit_of(weight) == unit


def test_numbers_of_both_formats_of_16_bits_are_taken_and_others_are_not():
    assert unit_of(numbers((64, 96))) is not None
    assert unit_of(numbers((64, 96), dtype=torch.float16)) is not None
    assert unit_of(numbers((64, 96), dtype=torch.float32)) is None


@needs_fbgemm
@pytest.mark.parametrize("piece", [96, 64, 40])
@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 3, 96), (0, 96)])
def test_its_product_is_that_of_the_weight(shape, piece):
    """Contiguous, and equal to the product in float64 within what a sum of 96 float32 terms can be off."""
    weight = numbers((70, 96)) * 2.0**-9
    held = Float16Weight.of(weight, piece)
    x = numbers(shape, 1, torch.float32)
    got, expected = held(x), x.double() @ weight.double().t()
    assert got.is_contiguous()
    limit = 2**-23 * 96 * (x.abs().double() @ weight.abs().double().t() + 1e-30)
    assert bool(((got - expected).abs() <= limit).all())


def chains(weight, piece):
    """A library whose sums are chains over pieces of k, which are added in their order."""

    def product(x):
        total = None
        for columns, part in zip(weight.split(piece, dim=1), x.split(piece, dim=1), strict=True):
            own = torch.zeros(len(x), len(weight))
            for k in range(columns.shape[1]):
                own = (own.double() + part[:, k, None].double() * columns[:, k].double()).float()
            total = own if total is None else total + own
        return total

    return product


@needs_fbgemm
def test_the_probe_finds_how_a_sum_is_cut_and_takes_no_other():
    """A sum from the end is none, nor is one of numbers that float16 has not."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (64, 600), generator=generator).float()
    assert same_sum(chains(weight, 256), weight) == 256
    assert same_sum(chains(weight, 600), weight) == 600
    assert same_sum(lambda x: chains(weight.flip(1), 600)(x.flip(1)), weight) == 0
    assert same_sum(chains(weight, 600), weight + 2.0**-20) == 0


def test_a_probe_of_fewer_outputs_has_those_behind_the_last_vector(monkeypatch):
    monkeypatch.setattr(cpu_products, "_MAX_PROBED", 96 * 320)
    for out in (5, 320, 321, 383, 4096, 4099):
        probed = cpu_products._probed((out, 96))
        assert probed.shape[1] == 96
        assert min(out, 257) <= len(probed) <= 320
        assert len(probed) % 64 == out % 64
    assert len(cpu_products._probed((7, 10**6))) == 1


@needs_fbgemm
@pytest.mark.parametrize("shape", [(24, 50), (96, 512), (48, 576), (64, 1216)])
def test_few_rows_have_the_bits_that_they_have_among_many(shape):
    """Plain, with a bias and gated; and a weight that float16 does not hold has the calls that it had."""
    try:
        chosen = choose_exact_products([shape], 2, "packed", few=True)[shape]
    except ConfigError as error:
        pytest.skip(f"not exact on this CPU: {error}")
    if not chosen.piece:
        pytest.skip("float16 has not the sums of packed products here")
    bias, x = numbers(shape[0], 2), adversarial((140, shape[1]), torch.Generator().manual_seed(4))
    for weight in (numbers(shape), numbers(shape, dtype=torch.float32)):
        products = [LibraryLinear(weight, each, chosen) for each in (None, bias)]
        products += [LibraryGated(weight, None, chosen)]
        for product in products:
            want = product(x)
            for rows in (1, 2, 5, MOST_ROWS, MOST_ROWS + 1, 19):
                at = torch.randperm(len(x), generator=torch.Generator().manual_seed(rows))[:rows]
                assert same_bits(product(x[at]), want[at])


@needs_fbgemm
def test_only_few_rows_of_a_weight_that_float16_holds_take_it(monkeypatch):
    taken = []
    monkeypatch.setattr(Float16Weight, "__call__", lambda self, x: taken.append(len(x)) or x @ torch.zeros(96, 64))
    chosen = ChosenProduct((64, 96), "float32", 1, (Call.PACKED,) * len(ROW_CLASSES), ({},) * 4, exact=True, piece=96)
    for weight in (numbers((64, 96), dtype=torch.float32), numbers((64, 96))):
        product = LibraryLinear(weight, None, chosen)
        for rows in (1, MOST_ROWS, MOST_ROWS + 1, 64):
            product(torch.ones(rows, 96))
    assert taken == [1, MOST_ROWS]
    assert "rows of float16" in chosen.sentence()


@needs_fbgemm
def test_only_exact_products_of_few_rows_are_asked_for_it():
    try:
        few, many = (choose_exact_products([(64, 96)], 2, "packed", few=few)[64, 96] for few in (True, False))
    except ConfigError as error:
        pytest.skip(f"not exact on this CPU: {error}")
    assert not many.piece
    assert few.piece == exact_piece((64, 96), few.calls[0], few.least)
    assert not exact_piece((64, 96), Call.INTEGERS, 1)


@needs_fbgemm
def test_plain_decoding_by_float16_has_the_bits_of_trees_and_of_a_batch():
    """The embedded pair's weights are bfloat16's: one row alone takes float16, a tree and twelve rows do not."""
    options = {"exactness": "bits", "max_running_requests": 12, "context_length": 128}
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
    prompts = [f"def area{'_' * i}(r):" for i in range(12)]

    def told(outputs):
        return [(each.token_ids, each.logprobs) for each in outputs]

    plain = LLM("builtin:nestling", None, **options)
    alone = [told(plain.generate([each], params))[0] for each in prompts[:2]]
    assert told(plain.generate(prompts, params))[:2] == alone
    drafted = LLM("builtin:nestling", "builtin:nestling-eagle3", **options)
    assert told(drafted.generate(prompts[:2], params)) == alone
    if not any(each.piece for each in plain.engine.products):
        pytest.skip("float16 has not the sums of what is exact here")
    assert not any(each.piece for each in drafted.engine.products), "rounds of a tree have more rows"
