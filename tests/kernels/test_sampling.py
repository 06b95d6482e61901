"""The logits processor, the uniforms and the draw equal slow oracles, one by one."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.operation_cases import process
from support.oracles import drawn, float32, philox4x32_10, warped
from treetop.kernels.sampling.process import caps, mask_words, process_reference
from treetop.kernels.sampling.sampling import (
    RowSamplingParams,
    SamplingMetadata,
    draw,
    draw_reference,
    philox_uniform,
    warp,
)

KNOWN_ANSWERS = [  # counter, key, words: the Random123 distribution's kat_vectors
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_the_oracle_of_the_uniform_gives_the_published_words(counter, key, words):
    """The slow Philox-4x32-10 is Philox-4x32-10."""
    assert philox4x32_10(counter, key) == [int(word, 16) for word in words.split()]


def test_the_uniform_of_seed_zero_and_position_zero_is_the_published_word():
    """A known answer for the production code, not by way of the oracle."""
    assert philox_uniform(torch.tensor(0), torch.tensor(0)).item() == 0x6627E8D5 / 2**32


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=4),
    number=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_coins_equal_the_oracle_bit_for_bit(seeds, positions, number):
    """The seed is the key, the position and the draw are the counter; a uniform is its first word over 2^32."""
    grid = [(seed, position) for seed in seeds for position in positions]
    uniforms = philox_uniform(torch.tensor([s for s, _ in grid]), torch.tensor([p for _, p in grid]), number)
    assert uniforms.dtype == torch.float64
    for uniform, (seed, position) in zip(uniforms.tolist(), grid, strict=True):
        counter = [position & 0xFFFFFFFF, position >> 32, number, 0]
        assert uniform == philox4x32_10(counter, [seed & 0xFFFFFFFF, seed >> 32])[0] / 2**32
        assert 0 <= uniform < 1


LOGITS = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(float("-inf"))),
    min_size=1,
    max_size=12,
).filter(lambda logits: max(logits) > -math.inf)
PARAMS = st.tuples(
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0625, 5, width=32)),
    st.integers(0, 15),
    st.one_of(st.just(1.0), st.floats(0.015625, 1, width=32)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1, width=32)),
)


def warp_rows(rows, params, filtered=True, dtype=torch.float64) -> torch.Tensor:
    columns = list(zip(*params, strict=True))
    kinds = [torch.float32, torch.int64, torch.float32, torch.float32]
    return warp(
        torch.tensor(rows, dtype=dtype),
        RowSamplingParams(*(torch.tensor(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True))),
        filtered,
    )


def near_an_edge(logits, temperature, top_k, top_p, min_p) -> bool:
    """Whether a filter's bound is so close to a cumulative mass that rounding decides."""
    if temperature == 0:
        return False
    kept = sorted((p for p in warped(logits, temperature, top_k) if p > 0), reverse=True)
    sums = [math.fsum(kept[: i + 1]) for i in range(len(kept))]
    close = any(abs(s - top_p) < 1e-9 for s in sums) and top_p < 1
    return close or (0 < min_p < 1 and any(abs(p - min_p * kept[0]) < 1e-9 * kept[0] for p in kept))


@given(rows=st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_warping_equals_the_oracle_row_by_row(rows):
    """Temperature, top-k, top-p, min-p in this order with per-row parameters; filtered tokens are exactly 0."""
    width = max(len(logits) for logits, _ in rows)
    padded = [[*logits, *[-math.inf] * (width - len(logits))] for logits, _ in rows]
    params = [each for _, each in rows]
    assume(not any(near_an_edge(logits, *each) for logits, each in zip(padded, params, strict=True)))
    got = warp_rows(padded, params)
    assert got.dtype == torch.float64
    for row, logits, each in zip(got, padded, params, strict=True):
        want = warped(logits, *each)
        assert (row / row.sum()).tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
        for ours, theirs in zip(row.tolist(), want, strict=True):
            assert (ours == 0) == (theirs == 0)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ((1.0, 2, 1.0, 0.0), [0, 1]),  # the tie of tokens 1, 2 and 3 at the edge keeps the smallest id
        ((1.0, 3, 1.0, 0.0), [0, 1, 2]),
        ((1.0, 0, 1e-6, 0.0), [0]),
        ((1.0, 0, 1.0, 1.0), [0]),
        ((0.0, 0, 1.0, 0.0), [0]),
        ((1.0, 0, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 1, 0.5, 0.5), [0]),
    ],
)
def test_filters_keep_the_best_and_the_smaller_id_among_equals(params, kept):
    """Known answers on five logits of which three are tied."""
    (row,) = warp_rows([[2.0, 1.0, 1.0, 1.0, -3.0]], [params])
    assert row.nonzero().flatten().tolist() == kept


def test_the_smallest_top_p_and_temperature_a_request_may_have_keep_the_best_token():
    """A positive number that a narrower type rounds to 0 still keeps one token: a distribution is never empty."""
    for params in ((1.0, 0, 1e-60, 0.0), (1e-60, 0, 1.0, 0.0), (1.0, 0, 1e-60, 1.0)):
        (row,) = warp_rows([[0.5, 3.0, 1.0]], [params])
        assert row.nonzero().flatten().tolist() == [1], f"{params} keeps {row.tolist()}"


@given(
    rows=st.lists(st.tuples(LOGITS.map(lambda x: [*x, *[-math.inf] * (12 - len(x))]), PARAMS), min_size=1, max_size=4)
)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_neighbour_with_filters_does_not_change_a_row_without(dtype, rows):
    """Rows without top-k and top-p are equal to the bit whether the batch is filtered or not."""
    padded = [logits for logits, _ in rows]
    params = [(temperature, 0, 1.0, min_p) for _, (temperature, _, _, min_p) in rows]
    assert torch.equal(warp_rows(padded, params, True, dtype), warp_rows(padded, params, False, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_among_sampling_neighbours_takes_the_largest_logit(dtype):
    """Temperature 0 chooses by the logits themselves, also where their probabilities round to the same number."""
    logits = [[1e-20, 2e-20, 1.5e-20], [3.0, 3.0, 1.0]]
    rows = warp_rows(logits, [(0.0, 0, 1.0, 0.0)] * 2, False, dtype)
    assert [row.nonzero().flatten().tolist() for row in rows] == [[1], [0]]


PROBS = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=1, max_size=10).filter(any)
COINS = st.one_of(st.just(0.0), st.just(1 - 2.0**-32), st.integers(0, 2**32 - 1).map(lambda word: word / 2**32))


@given(PROBS, COINS)
@settings(max_examples=400, deadline=None)
def test_a_draw_is_an_inverse_cdf_and_never_takes_a_token_of_probability_zero(probs, uniform):
    """Every uniform from 0 to the largest draws a token with a probability, and the one the oracle draws."""
    token = int(draw(torch.tensor([probs], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64)))
    assert 0 <= token < len(probs)
    assert probs[token] > 0
    total, edges = math.fsum(probs), [math.fsum(probs[: i + 1]) for i in range(len(probs))]
    if all(abs(uniform * total - edge) > 1e-9 * total for edge in edges):
        assert token == drawn(probs, uniform)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 1 - 2.0**-32])
def test_zeros_at_both_ends_are_never_drawn(uniform):
    """Uniform 0 skips leading zeros; the largest uniform stops before trailing zeros."""
    probs = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).item() in (2, 4)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_log_probability_is_the_same_alone_where_threads_divide_a_large_vocabulary():
    """One number is near all of the mass, so that the order of the others' sum is all of its log-probability."""
    generator = torch.Generator().manual_seed(4)
    logits = -32 - 4 * torch.rand(3, 1, 70_000, generator=generator)
    logits[:, 0, 20_000] = 0
    params = RowSamplingParams(torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3))
    sampler, positions = SamplingMetadata(params, torch.arange(3)), torch.zeros((3, 1), dtype=torch.int64)
    together = draw_reference(logits, sampler, torch.arange(3), positions, False)
    assert bool((together.logprob < 0).all())
    for row in range(3):
        at = slice(row, row + 1)
        alone = draw_reference(logits[at], sampler, torch.tensor([row]), positions[at], False)
        assert torch.equal(alone.logprob, together.logprob[at])


@given(st.integers(0, 2**63 - 1), st.integers(0, 500), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_sampled_choice_is_the_drawn_token_of_the_warped_logits(seed, start, salt):
    """At every node: the node's logits, its row's parameters, and the uniform of the new token's position."""
    generator = torch.Generator().manual_seed(salt)
    logits = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64) * 2
    positions = torch.tensor([[start, start + 1, start + 1], [7, 8, 9]])
    params = RowSamplingParams(
        torch.tensor([0.7, 0.0]), torch.tensor([5, 0]), torch.tensor([0.875, 1.0]), torch.tensor([0.0625, 0.0])
    )
    chosen = draw_reference(logits, SamplingMetadata(params, torch.tensor([seed, 3])), torch.arange(2), positions, True)
    token = chosen.token
    assert bool(chosen.finite.all())
    for node in range(3):
        at = int(positions[0, node]) + 1
        uniform = philox4x32_10([at & 0xFFFFFFFF, at >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0] / 2**32
        assert int(token[0, node]) == drawn(warped(logits[0, node].tolist(), float32(0.7), 5, 0.875, 0.0625), uniform)
        assert int(token[1, node]) == int(logits[1, node].argmax())


def test_logits_that_are_not_finite_do_not_disturb_their_neighbours():
    """NaN logits mark their node; all other tokens are what they would be without them."""
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = RowSamplingParams(torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3))
    seed, positions = torch.tensor([1, 2, 3]), torch.tensor([[4, 5]] * 3)
    clean = draw_reference(logits, SamplingMetadata(params, seed), torch.arange(3), positions, False)
    logits[1, 1, 4] = float("nan")
    chosen = draw_reference(logits, SamplingMetadata(params, seed), torch.arange(3), positions, False)
    token, finite = chosen.token, chosen.finite
    assert finite.tolist() == [[True, True], [True, False], [True, True]]
    assert torch.equal(token[finite], clean.token[finite])
    assert bool(((token >= 0) & (token < 9)).all())


@pytest.mark.parametrize("vocab", [1, 31, 32, 77, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_caps_what_it_rules_out_and_changes_no_other_bit(vocab, dtype):
    """Each bit stands for its token, the sign bit of a word and both zeros included; none is ruled out or all are."""
    torch.manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (9, mask_words(vocab)), dtype=torch.int32)
    words[0], words[1], words[2] = -1, 0, -(2**31)
    logits = torch.randn(9, vocab, dtype=dtype)
    logits[3], logits[4] = 0.0, -0.0
    may = torch.tensor([[line[t // 32] >> t % 32 & 1 for t in range(vocab)] for line in words.tolist()]) != 0
    capped = torch.minimum(logits, caps(words, vocab).to(dtype))
    assert torch.equal(capped, torch.where(may, logits, float("-inf")))
    assert torch.equal(capped.signbit()[may], logits.signbit()[may])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_masks_rule_out_is_minus_infinity_and_the_rest_is_what_it_is_without_them(dtype):
    """Rows whose nodes are all held, some or none, that change logits beside and that do not; NaN and infinity, too.

    The logits that came stay as they are.
    """
    torch.manual_seed(0)
    logits, processors, rows, positions, tree, allowed = process(False).args
    logits, held = logits.to(dtype).transpose(0, 1).contiguous().transpose(0, 1), allowed.clone()
    held[3, 1:] = -1  # this row, and 1, change nothing else
    for row in range(4):
        logits[row, 0, ::3], logits[row, 0, 1::3] = float("nan"), float("inf")
    vocab, before = logits.shape[2], logits.clone()
    token = torch.arange(vocab)
    may = (held[:, :, token // 32] >> token % 32 & 1) != 0
    nothing = replace(processors, active=torch.zeros_like(processors.active))
    for changes, these in product((processors, nothing), (held, torch.full_like(held, -1))):
        free = process_reference(logits, changes, rows, positions, tree, None)
        found = process_reference(logits, changes, rows, positions, tree, these)
        expected = torch.where(may, free, float("-inf")) if these is held else free
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found.is_contiguous()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0, 1e9), expected.nan_to_num(7.0, 1e9))
        assert torch.equal(logits.nan_to_num(7.0, 1e9), before.nan_to_num(7.0, 1e9))
    assert set(processors.active[rows].tolist()) == {True, False}
