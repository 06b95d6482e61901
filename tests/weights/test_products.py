"""Products on a CPU: every call gives the same product, and the fastest by timing is taken."""

import pytest
import torch
import torch.nn.functional as F

from treetop import LLM, SamplingParams
from treetop.kernels.fused import rms_norm
from treetop.kernels.kv import make_ruler, slots_at, slots_of
from treetop.kernels.tree.tree import keyed_topk, stable_topk
from treetop.weights import cpu_products as products
from treetop.weights.cpu_products import Call, ChosenProduct, CpuProduct, choose_products, default_call, fastest
from treetop.weights.linear import LibraryLinear

XEON = (
    {Call.PACKED: 275.0, Call.LINEAR: 144.0, Call.TURNED: 119.0},
    {Call.PACKED: 200.0, Call.LINEAR: 400.0, Call.TURNED: 230.0},
    {Call.PACKED: 267.0, Call.LINEAR: 650.0, Call.TURNED: 255.0},
    {Call.PACKED: 500.0, Call.LINEAR: 700.0, Call.TURNED: 700.0},
)
"""Microseconds on two cores of a Xeon, where one packed row takes more than twice as long as `W @ x.T`."""


@pytest.mark.parametrize("call", list(products._ORDER))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 20, 96), (1, 1, 96)])
def test_every_call_gives_the_product(call, biased, shape):
    """Contiguous, and equal to the product in float64 within what a sum of 96 float32 terms can be off."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 96), torch.randn(64) if biased else None, torch.randn(shape)
    got = CpuProduct(weight, bias, [call] * 4)(x)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.is_contiguous()
    limit = 2**-23 * 96 * (F.linear(x.abs().double(), weight.abs().double()) + 10)
    assert bool(((got - expected).abs() <= limit).all())


def test_each_row_class_takes_its_own_call(monkeypatch):
    """One row, up to 8, up to 32, and more."""
    used = []
    monkeypatch.setattr(products, "_product", lambda call, weight, bias: lambda x: used.append(call) or x)
    calls = [Call.TURNED, Call.PACKED, Call.LINEAR, Call.COLUMNS]
    chosen = ChosenProduct((8, 4), "float32", 1, tuple(calls), ({},) * 4)
    linear = LibraryLinear(torch.randn(8, 4), None, chosen)
    for shape in [(1, 1, 4), (1, 2, 4), (8, 4), (9, 4), (2, 16, 4), (33, 4), (4, 100, 4)]:
        linear(torch.randn(shape))
    assert used == [calls[0], calls[1], calls[1], calls[2], calls[2], calls[3], calls[3]]


def test_the_fastest_calls_are_taken_and_no_more_copies_kept_than_allowed():
    """Two orders: one row by `W @ x.T`, the others packed. One order: what is best over all classes."""
    assert fastest(XEON, 2, Call.PACKED) == (Call.TURNED, Call.PACKED, Call.PACKED, Call.PACKED)
    assert len({products._ORDER[call] for call in fastest(XEON, 1, Call.PACKED)}) == 1
    near = [{Call.PACKED: 100.0, Call.LINEAR: 96.0}] * 4
    assert fastest(near, 2, Call.PACKED) == (Call.PACKED,) * 4


def test_what_was_not_timed_takes_the_default():
    """Where time ran out, for one class or for all."""
    assert fastest([{}] * 4, 2, Call.PACKED) == (Call.PACKED,) * 4
    got = fastest((XEON[0], {}, {}, {}), 2, Call.PACKED)
    assert got == (Call.TURNED, Call.PACKED, Call.PACKED, Call.PACKED)
    assert fastest((XEON[0], {}, {}, {}), 1, Call.PACKED) == (Call.PACKED,) * 4


@pytest.fixture
def no_times(monkeypatch):
    monkeypatch.setattr(products, "_TIMES", {})


def test_a_shape_is_timed_once_and_no_generator_moves(no_times, monkeypatch):
    """All layers of a shape share one timing, and so do later engines of the process."""
    state = torch.get_rng_state()
    first = choose_products([(32, 64)] * 3 + [(64, 32)], torch.float32, 2, 100.0)
    assert {shape: each.count for shape, each in first.items()} == {(32, 64): 3, (64, 32): 1}
    assert all(times and set(times) >= {Call.LINEAR, Call.TURNED} for times in first[32, 64].times_us)
    assert torch.equal(state, torch.get_rng_state())

    def timed(keys, ends_s):
        assert not keys
        return {}

    monkeypatch.setattr(products, "_time_calls", timed)
    assert choose_products([(32, 64)] * 3 + [(64, 32)], torch.float32, 2) == first


def test_timing_ends_when_its_time_is_over(no_times):
    """With no time at all every class takes the default."""
    chosen = choose_products([(512, 512)], torch.float32, 2, 0.0)[512, 512]
    assert chosen.calls == (default_call(torch.float32),) * 4
    assert chosen.times_us == ({},) * 4


def test_float64_is_not_chosen_for():
    """There one row and many rows are to agree: always `F.linear`."""
    assert choose_products([(8, 8)], torch.float64, 2) == {}
    assert default_call(torch.float64) is Call.LINEAR


def test_an_engine_takes_what_timing_chose(no_times, monkeypatch):
    """With the times of a CPU where packed products of one row are slow, plain decoding takes another call."""
    monkeypatch.setattr(
        products, "_time_calls", lambda keys, ends_s: {key: XEON[[1, 6, 16, 64].index(key.rows)] for key in keys}
    )
    options = {"context_length": 128, "max_running_requests": 1}
    params, prompt = SamplingParams(max_tokens=24), ["def area(r):"]
    chosen = LLM("builtin:nestling", draft=None, **options)
    assert {each.calls[0] for each in chosen.engine.products} == {Call.TURNED}
    assert sum(each.count for each in chosen.engine.products) == 4 * 4 + 1
    monkeypatch.setattr(products, "_time_calls", lambda keys, ends_s: {key: {} for key in keys})
    monkeypatch.setattr(products, "_TIMES", {})
    default = LLM("builtin:nestling", draft=None, **options)
    assert {call for each in default.engine.products for call in each.calls} == {Call.PACKED}
    assert chosen.generate(prompt, params)[0].token_ids == default.generate(prompt, params)[0].token_ids


def test_a_choice_is_told_with_the_times_of_all_calls():
    """What `treetop bench --transformers` prints for each shape."""
    calls = fastest(XEON, 2, Call.PACKED)
    text = ChosenProduct((2432, 512), "float32", 4, calls, (*XEON[:3], {})).sentence()
    assert text.startswith("4 x [2432, 512]  1 row: W @ x.T (W @ x.T 119 us, F.linear 144 us, packed oneDNN 275 us); ")
    assert text.endswith("33 rows and more: packed oneDNN (as others, or not timed)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_in_five_operations_equals_pytorchs(dtype):
    """Within some units in the last place, at every magnitude; what is not finite stays so."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 512, dtype=dtype) * 10.0 ** torch.arange(-6, 8, dtype=dtype).view(2, 7, 1)
    weight = torch.rand(512, dtype=dtype) + 0.5
    expected = F.rms_norm(x.double(), (512,), weight.double(), 1e-5)
    assert bool(((rms_norm(x, weight, 1e-5) - expected).abs() <= 16 * torch.finfo(dtype).eps * expected.abs()).all())
    x[0, 0, 3] = float("nan")
    assert bool(rms_norm(x, weight, 1e-5)[0, 0].isnan().all())


def test_top_k_of_a_wide_row_is_stable_with_and_without_ties():
    """The way without ties gives what integer keys give; ties and NaN go by the keys."""
    torch.manual_seed(0)
    apart = torch.randperm(3 * 1000).view(3, 1000).float()
    tied = apart.clone()
    tied[1, ::2] = 5000.0
    odd = apart.clone()
    odd[2, 7] = float("nan")
    for scores in (apart, tied, odd):
        for got, expected in zip(stable_topk(scores, 4), keyed_topk(scores, 4), strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(stable_topk(apart, 1000)[1], apart.argsort(dim=1, descending=True, stable=True))
    assert stable_topk(tied, 4)[1][1].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_ruler_gives_the_slots_of_positions(page_size):
    """Columns and offsets made once address what divisions address."""
    table = torch.randperm(5 * 40).view(5, 40).to(torch.int32)
    rows, kv_len = torch.tensor([3, 0, 4]), torch.tensor([0, 17, 31])
    ruler = make_ruler(64, page_size, table.device)
    positions, column, offset = (each[:, :40] for each in (ruler.positions, ruler.column, ruler.offset))
    visible = positions < kv_len[:, None]
    expected = slots_of(table, rows, positions, visible, page_size)
    assert torch.equal(slots_at(table, rows, column, offset, visible, page_size), expected)
