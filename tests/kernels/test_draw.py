"""The draw in one launch equals temperature, sort, filters and inverse CDF in PyTorch.

Tests of the kernel run on a GPU or in the interpreted session (see `support/interpreted.py`).
"""

import itertools

import pytest
import torch

from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, on_gpu_or_interpreted
from support.operations import kernel_ops
from treetop.kernels.sampling import draw as drawing
from treetop.kernels.sampling.draw import draw_tokens
from treetop.kernels.sampling.sampling import (
    RowSamplingParams,
    SamplingMetadata,
    draw,
    draw_reference,
    philox_uniform,
    warp,
)
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import gpu_traits

FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (0.9, 7, 0.8, 0.0),
    (1.0, 1, 0.5, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (2.0, 0, 1.0, 0.3),
    (1.5, 100, 0.95, 0.05),
    (1e-35, 3, 0.9, 0.0),
    (1.0, 10**6, 0.999, 0.0),
]
"""(temperature, top_k, top_p, min_p) of the rows."""
EDGES = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 4, 1.0, 0.0),
    (1.0, 7, 0.8, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1e10, 30, 1.0, 0.0),
    (1.0, 0, 1.0, 0.3),
    (1e-35, 3, 0.9, 0.0),
    (1.0, 12, 0.5, 0.3),
    (1.0, 0, 1e-9, 1.0),
    (1e10, 10, 0.55, 1.0),
    (1e39, 0, 0.5, 0.0),
]
NODES = 2 if ON_GPU else 1
BLOCK = drawing._BLOCK


def sampler_of(filters, generator):
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    seed = torch.randint(0, 2**62, (len(filters),), generator=generator)
    params = RowSamplingParams(temperature.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE), min_p.to(DEVICE))
    return SamplingMetadata(params, seed.to(DEVICE))


def both(logits, sampler, rows, positions):
    got = draw_tokens(logits, sampler, rows, positions, True, gpu_traits(DEVICE))
    return got, draw_reference(logits, sampler, rows, positions, True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row, the last one not full."""
    monkeypatch.setattr(drawing, "_BLOCK", 1024 if ON_GPU else 64)


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("ties", "dtype"),
    few_of(
        [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16), (False, torch.float16)],
        *(range(4) if ON_GPU else (1, 3)),
    ),
)
def test_tokens_are_those_of_sorting_and_summing(ties, dtype):
    """Every filter and their mixtures, rows picked out of order, ties at the edges, impossible tokens."""
    generator = torch.Generator().manual_seed(0)
    vocab, count = (50_000, len(FILTERS)) if ON_GPU else (90, len(FILTERS))
    rows = torch.randperm(count, generator=generator)
    logits = torch.randn(count, NODES, vocab, generator=generator) * 3
    if ties:
        logits = (logits / 2).round() * 2  # many equals
    logits[:, :, 11::17] = float("-inf")
    positions = torch.randint(0, 10**6, (count, NODES), generator=generator).to(DEVICE)
    sampler = sampler_of(FILTERS, generator)
    got, want = both(logits.to(dtype).to(DEVICE), sampler, rows.to(DEVICE), positions)
    assert torch.equal(got.token, want.token)
    assert bool(got.finite.all())
    assert torch.allclose(got.logprob, want.logprob, atol=1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_edges_of_filters_fall_where_sorting_puts_them(monkeypatch, dtype):
    """Many uniforms a row over few distinct logits: equals in every block, both zeros, large seeds and positions."""
    monkeypatch.setattr(drawing, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    count, vocab, uniforms = len(EDGES), 43, 14 if ON_GPU else 2
    logits = (torch.randn(count, 1, vocab, generator=generator) * 1.2).round()
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = float("-inf")
    minus = (logits == 0) & (torch.rand(logits.shape, generator=generator) < 0.5)
    logits = torch.where(minus, -0.0, logits)
    logits[0, 0, ::2], logits[0, 0, 1::2] = -0.0, 0.0
    logits = logits.expand(count, uniforms, vocab).contiguous().to(dtype).to(DEVICE)
    sampler = sampler_of(EDGES, generator)
    sampler = SamplingMetadata(sampler.params, torch.arange(count, device=DEVICE) + 2**63 - 50)
    positions = torch.arange(count * uniforms, device=DEVICE).view(count, uniforms) + 2**32 - 5
    got, want = both(logits, sampler, torch.arange(count, device=DEVICE), positions)
    assert (got.token != want.token).sum(dim=1).tolist() == [0] * count
    assert torch.allclose(got.logprob, want.logprob, atol=1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("top_k", few_of([15, 16, 17, 30], *(range(4) if ON_GPU else (0, 2))))
def test_a_top_k_beyond_the_lanes_of_a_block_starts_at_the_bottom(monkeypatch, top_k):
    """The highest of each lane bound the search only while they are at least k."""
    monkeypatch.setattr(drawing, "_BLOCK", 16)
    uniforms, generator = 40 if ON_GPU else 6, torch.Generator().manual_seed(4)
    logits = (torch.arange(43.0) * 0.25).expand(1, uniforms, 43).contiguous().to(DEVICE)
    sampler, positions = (
        sampler_of([(1e10, top_k, 1.0, 0.0)], generator),
        torch.arange(uniforms, device=DEVICE)[None],
    )
    got, want = both(logits, sampler, torch.zeros(1, dtype=torch.int64, device=DEVICE), positions)
    assert torch.equal(got.token, want.token)
    assert int(got.token.min()) < 43 - top_k + top_k // 2  # uniforms reach far down


@pytest.mark.skipif(not ON_GPU, reason="needs a vocabulary of many blocks as they are on a GPU")
@pytest.mark.parametrize("filters", [(0.8, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (0.8, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.02)])
def test_the_launch_of_a_large_vocabulary_is_right(monkeypatch, filters):
    """The block and the warps of an engine; bfloat16 logits, of which many are equal."""
    monkeypatch.setattr(drawing, "_BLOCK", BLOCK)
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(4, 16, 128_256, generator=generator) * 3).to(torch.bfloat16).to(DEVICE)
    sampler, rows = sampler_of([filters] * 4, generator), torch.arange(4, device=DEVICE)
    got, want = both(logits, sampler, rows, torch.arange(64, device=DEVICE).view(4, 16))
    assert int((got.token != want.token).sum()) <= 1  # a uniform on an edge within the rounding of sums


@on_gpu_or_interpreted
def test_a_draw_with_filters_is_the_one_without():
    """Fused: so rounds with and without them can share a graph."""
    generator = torch.Generator().manual_seed(6)
    ops, sampler = kernel_ops(DEVICE), sampler_of(FILTERS, generator)
    assert not ops.filters_apart
    logits = torch.randn(len(FILTERS), NODES, 90, generator=generator).to(DEVICE)
    rows = torch.arange(len(FILTERS), device=DEVICE)
    positions = torch.arange(NODES * len(FILTERS), device=DEVICE).view(-1, NODES)
    drawn = [ops.draw(logits, sampler, rows, positions, filtered).token for filtered in (False, True)]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], draw_reference(logits, sampler, rows, positions, True).token)


@on_gpu_or_interpreted
@pytest.mark.parametrize("filters", [(1.0, 0, 1.0, 0.0), (0.8, 6, 0.9, 0.1)] if ON_GPU else [(1.0, 0, 1.0, 0.0)])
def test_the_law_is_that_of_the_filtered_weights(filters):
    """Frequencies over many uniforms against probabilities: chi-square, and nothing outside the filters."""
    generator = torch.Generator().manual_seed(1)
    draws, vocab = (20_000, 200) if ON_GPU else (150, 24)
    logits = (torch.randn(1, 1, vocab, generator=generator) * 2).expand(1, draws, vocab).contiguous().to(DEVICE)
    sampler = sampler_of([filters], generator)
    rows, positions = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.arange(draws, device=DEVICE)[None]
    token = draw_tokens(logits, sampler, rows, positions, True, gpu_traits(DEVICE)).token
    weights = warp(logits[0, :1].double(), sampler.params)[0].cpu()
    expected = draws * weights / weights.sum()
    seen = torch.bincount(token.cpu().flatten(), minlength=vocab).double()
    assert float(seen[expected == 0].sum()) == 0
    often = expected >= 5
    square = float(((seen - expected)[often] ** 2 / expected[often]).sum())
    freedom = int(often.sum())
    assert square < freedom + 5 * (2 * freedom) ** 0.5


@on_gpu_or_interpreted
def test_a_uniform_is_the_reference_uniform():
    """Two equal logits: the token tells on which side of one half the uniform falls, at positions beyond 32 bits."""
    generator = torch.Generator().manual_seed(2)
    positions = torch.tensor([[0, 1, 2**31, 2**32 + 5, 2**40 + 3, 77, 78, 79]], device=DEVICE)
    sampler = sampler_of([(1.0, 0, 1.0, 0.0)], generator)
    logits = torch.zeros(1, 8, 2, device=DEVICE)
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    token = draw_tokens(logits, sampler, rows, positions, True, gpu_traits(DEVICE)).token
    uniforms = philox_uniform(sampler.seed[:, None].expand(1, 8), positions + 1)
    assert torch.equal(token, (uniforms >= 0.5).long())


@on_gpu_or_interpreted
def test_logits_that_are_not_finite_are_reported():
    """NaN anywhere, or an infinite best: the node is marked, its neighbours are drawn as ever."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 4, 100, generator=generator).to(DEVICE)
    logits[0, 1, 63], logits[1, 2, 99], logits[1, 3] = float("nan"), float("inf"), float("-inf")
    sampler, positions = sampler_of([(1.0, 0, 0.9, 0.0)] * 2, generator), torch.arange(8, device=DEVICE).view(2, 4)
    drawn = draw_tokens(logits, sampler, torch.arange(2, device=DEVICE), positions, True, gpu_traits(DEVICE))
    token, finite = drawn.token, drawn.finite
    assert finite.tolist() == [[True, False, True, True], [True, True, False, False]]
    assert bool(((token >= 0) & (token < 100)).all())
    params = RowSamplingParams(
        *(x[:1] for x in (sampler.params.temperature, sampler.params.top_k, sampler.params.top_p, sampler.params.min_p))
    )
    for row, node in itertools.product((0,), (0, 2, 3)):
        uniform = philox_uniform(sampler.seed[row : row + 1], positions[row, node : node + 1] + 1)
        assert int(token[row, node]) == int(draw(warp(logits[row, node : node + 1], params), uniform))


def test_under_bits_a_draw_has_one_dtype_whatever_the_batch_processes(monkeypatch):
    """`process` widens the logits of all rows of a batch, so those of a batch without it are widened, too."""
    seen = []
    monkeypatch.setattr(drawing, "draw_tokens", lambda logits, *_: seen.append(logits))
    logits = torch.randn(2, 3, 40).to(torch.bfloat16)
    Ops.draw.on(gpu_traits(torch.device("cpu")), batch_invariant=True)(logits, None, None, None, False)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], logits.float())
