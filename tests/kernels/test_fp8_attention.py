"""K/V in FP8: what is written, in a tail or in pages, and attention over it, against E4M3's specification in float64.

Tests of the kernels run on a GPU or in the interpreted session. The interpreter reads a NaN in FP8 as 480, so what a
NaN does to whoever reads it is tested on a GPU alone.
"""

import math
from dataclasses import replace

import pytest
import torch

from support.fp8 import VALUES, rounded
from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, needs_gpu, on_gpu_or_interpreted
from support.scenes import assert_close, assert_close_lse, dense_answer, moved, scene
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention import paged_attention, paged_attention_reference
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.indexer import IndexNorm, write_index_keys, write_index_keys_reference
from treetop.kernels.attention.latent import LatentNorm, write_latent, write_latent_reference
from treetop.kernels.comm.kv_chunks import ChunkSpan, pack, pack_reference, unpack, unpack_reference
from treetop.kernels.fused import rotate_and_write, rotate_and_write_reference
from treetop.kernels.kv import FP8, PageTable, decoded, encoded
from treetop.kernels.kv import moved as as_bytes
from treetop.kernels.rope import RopeSpec, rope_table, rotate_
from treetop.kernels.tree import commit as committing
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL

CPU = torch.device("cpu")
GPU = gpu_traits(DEVICE)
SCALES = torch.tensor([[1.0, 0.3], [7e-5, 40.0]])
VARIETY = [
    ({"n": 1, "t": 1}, 3),
    ({"n": 7, "window": 9}, 1),
    ({"n": 4, "heads": 8, "kv_heads": 1, "dim": 24, "page_size": 1, "max_kv_len": 30}, 2),
    ({"n": 5, "t": 0, "causal": True, "max_kv_len": 30}, 2),
    ({"n": 5, "t": 0, "causal": True, "max_kv_len": 30, "window": 11}, 1),
    ({"dtype": torch.float16, "n": 3, "page_size": 16, "max_kv_len": 70}, 2),
    ({"dtype": torch.bfloat16, "n": 3, "page_size": 16, "max_kv_len": 70}, 2),
]


def hard_numbers() -> torch.Tensor:
    """Every number of E4M3, what lies between two and just beside that, what is too small or too large, and no number;
    [n] float32."""
    found = VALUES.float()
    middles = (found[1:] + found[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, math.inf)]
    odd = torch.tensor([1e-12, 1e-45, 2.0**-10, 448.0, 449.0, 464.0, 480.0, 1e30, math.inf, math.nan])
    each = torch.cat([found, middles, *beside, odd, torch.randn(2000) * torch.randn(2000).exp()])
    return torch.cat([each, -each])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal numbers, and NaN where there is one."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_rounded_to_the_nearest_that_there_is(dtype):
    """By its own head's and plane's scale; beyond 448 times that it is the largest, and NaN stays NaN."""
    torch.manual_seed(0)
    numbers = hard_numbers().to(dtype).double()
    kv = numbers.expand(2, 2, -1)
    for scales in (torch.ones(2, 2), SCALES):
        each = scales.double()[..., None]
        quotient = kv.float() / scales[..., None] if dtype != torch.float64 else (kv / each).float()
        want = rounded(quotient.double())
        codes = encoded(kv.to(dtype), scales)
        assert codes.dtype == FP8
        same(codes.double(), want)
        back = decoded(codes, scales, dtype)
        assert back.dtype == dtype
        torch.testing.assert_close(back.double(), want * each, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)


def write_both(kernel: bool, in_pages: bool, dtype: torch.dtype, scales: torch.Tensor):
    """What is written to a tail or pages: qkv, its angles, the slots, the queries that come back, and what is held."""
    torch.manual_seed(1)
    numbers = hard_numbers()
    numbers = numbers[numbers.isfinite()]
    dim, kv_heads, heads, n = 64, 2, 4, 3
    rows = -(-len(numbers) // (n * kv_heads * dim))
    qkv = torch.randn(1, rows, n, heads + 2 * kv_heads, dim)
    flat = torch.zeros(rows * n * kv_heads * dim)
    flat[: len(numbers)] = numbers
    qkv[0, :, :, heads + kv_heads :] = flat.view(rows, n, kv_heads, dim)
    qkv[0, -1, -1, -1] = math.nan
    qkv = qkv.to(dtype)
    table = rope_table(RopeSpec(dim, 10000.0), 50, torch.float32, torch.device("cpu"))
    table = type(table)(table.data.to(dtype))
    positions = torch.randint(0, 50, (rows, n))
    slots = (torch.randperm(rows * n) + 1).view(rows, n) if in_pages else None
    if slots is not None:
        slots[0, 1] = slots[-1, 0] = 0
    shape = (rows * n + 1, 2, kv_heads, dim) if in_pages else (rows, n + 2, 2, kv_heads, dim)
    stored = torch.zeros(shape, device=DEVICE, dtype=torch.uint8).view(FP8)
    target = stored if in_pages else stored[:, 1 : n + 1]
    given = [moved(x, DEVICE) for x in (qkv.clone(), table, positions, slots, scales)]
    if kernel:
        q = rotate_and_write(given[0], (given[1].data, given[2]), target, given[3], None, GPU, scales=given[4])
    else:
        q = rotate_and_write_reference(given[0], given[1].at(given[2]), target, given[3], scales=given[4])
    assert q.dtype == dtype
    return qkv, table.at(positions), slots, q.cpu(), stored.cpu()


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=on_gpu_or_interpreted)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_is_rounded_once_and_queries_are_not(kernel, in_pages, dtype):
    """Values, which do not turn, are the nearest codes to the last bit; a slot of padding stays zero. Keys and queries
    turn first. Queries have the dtype that the model computes in."""
    qkv, angles, slots, q, stored = write_both(kernel, in_pages, dtype, SCALES)
    heads, kv_heads = 4, 2
    want_v = rounded((qkv[0, :, :, heads + kv_heads :].float() / SCALES[1][:, None]).double())
    turned = qkv[0, :, :, : heads + kv_heads].double()
    other = turned.roll(turned.shape[-1] // 2, -1)
    size = turned.abs() + other.abs()
    turned = turned * angles.cos.double() + other * angles.sin.double()
    torch.testing.assert_close(q.double(), turned[:, :, :heads], rtol=0.02, atol=0.02)
    if slots is None:
        got = stored[:, 1:-1]
        assert not as_bytes(stored[:, [0, -1]]).any(), "beside its columns nothing is written"
    else:
        assert not as_bytes(stored[0]).any(), "the null slot stays zero"
        got = stored[slots]
        real = slots > 0
        got, want_v, turned, size = got[real], want_v[real], turned[real], size[real]
    same(got.select(-3, 1).double(), want_v)
    keys = turned[..., heads:, :] / SCALES[0].double()[:, None]
    step = 2.0 ** torch.log2(keys.abs().clamp(2.0**-6, 448.0)).floor() / 8  # between two numbers of that size
    off = (got.select(-3, 0).double() - keys.clamp(-448, 448)).abs()
    of_rotation = 4 * torch.finfo(dtype).eps * size[..., heads:, :] / SCALES[0].double()[:, None]
    assert bool((off <= step / 2 + of_rotation).all())


def nearest(codes: torch.Tensor, exact: torch.Tensor, scale: float) -> None:
    """Codes are the nearest of exact numbers over a scale, but for a rounding of float32 before."""
    numbers = (exact / scale).clamp(-448, 448)
    step = 2.0 ** torch.log2(numbers.abs().clamp(2.0**-6, 448.0)).floor() / 8
    assert bool(((codes.double() - numbers).abs() <= step / 2 + 1e-4 * step).all())


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=on_gpu_or_interpreted)])
def test_a_latents_plane_and_an_indexers_key_are_rounded_once(kernel, in_pages):
    """Beside each other in one plane, by one scale; queries are not rounded, and a slot of padding stays zero."""
    torch.manual_seed(4)
    rank, turned, index, rows, n, heads, scale = 20, 6, 14, 3, 4, 5, 0.01
    table, positions = rope_table(RopeSpec(turned, 10000.0), 50, torch.float64, CPU), torch.randint(0, 50, (rows, n))
    norm = LatentNorm(torch.randn(rank).exp(), 1e-6)
    index_norm = IndexNorm(torch.randn(index).exp(), torch.randn(index), 1e-6)
    absorbed, asked = torch.randn(rows, n, heads, rank), torch.randn(rows, n, heads, turned)
    down, key = torch.randn(1, rows, n, rank + turned), torch.randn(rows, n, index)
    angles = table.at(positions)
    latent = down[0, ..., :rank].double()
    latent = latent / (latent.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    plane = torch.cat([latent, rotate_(down[0, :, :, None, rank:].double(), angles)[:, :, 0]], -1)
    normed = key.double() - key.double().mean(-1, keepdim=True)
    normed = normed / (normed.pow(2).mean(-1, keepdim=True) + index_norm.eps).sqrt() * index_norm.weight
    normed += index_norm.bias
    normed = torch.cat([rotate_(normed[:, :, None, :turned].clone(), angles)[:, :, 0], normed[..., turned:]], -1)
    want_q = torch.cat([absorbed.double(), rotate_(asked.double(), angles)], -1)

    slots = (torch.randperm(rows * n) + 1).view(rows, n) if in_pages else None
    if slots is not None:
        slots[0, 1] = slots[-1, 0] = 0
    shape = (rows * n + 1,) if in_pages else (rows, n)
    stored = torch.zeros((*shape, 1, 1, rank + turned + index), dtype=torch.uint8, device=DEVICE).view(FP8)
    to_plane, to_key = stored.split([rank + turned, index], dim=-1)
    scales = torch.full((1, 1), scale, device=DEVICE)
    narrow = type(table)(table.data.float().to(DEVICE))
    here = [each.to(DEVICE) for each in (absorbed, asked, down, key, positions)]
    at = None if slots is None else slots.to(DEVICE)
    norm, index_norm = (
        LatentNorm(norm.weight.to(DEVICE), norm.eps),
        IndexNorm(index_norm.weight.to(DEVICE), index_norm.bias.to(DEVICE), index_norm.eps),
    )
    if kernel:
        given = narrow.data, here[4]
        q = write_latent(*here[:3], given, to_plane, at, norm, GPU, scales=scales)
        write_index_keys(here[3], index_norm, given, to_key, at, GPU, scales=scales)
    else:
        q = write_latent_reference(*here[:3], narrow.at(here[4]), to_plane, at, norm, scales)
        write_index_keys_reference(here[3], index_norm, narrow.at(here[4]), to_key, at, scales)
    torch.testing.assert_close(q.cpu().double(), want_q, rtol=1e-5, atol=1e-5)
    codes, real = stored.cpu(), torch.ones(rows, n, dtype=torch.bool)
    if slots is not None:
        assert not as_bytes(codes[0]).any(), "the null slot stays zero"
        codes, real = as_bytes(codes)[slots].view(FP8), slots > 0
    nearest(codes[:, :, 0, 0][real], torch.cat([plane, normed], -1)[real], scale)


@pytest.mark.parametrize("options", [options for options, _ in VARIETY], ids=str)
def test_the_torch_backend_attends_to_what_codes_stand_for(options):
    s = scene(**options, fp8=True)
    backend = TorchBackend(s.q.dtype, torch.device("cpu"))
    metadata = clean_metadata(s)
    plan = backend.plan(backend.begin(metadata), metadata)
    if metadata.causal:
        got = backend.causal(s.q, s.clean, plan, s.scale)
        got, want = got[s.real], dense_answer(s, with_tail=False)[0][s.real]
    else:
        got, want = backend.prefix_tail(s.q, s.clean, plan, s.tail, s.scale), dense_answer(s, with_tail=True)[0]
    assert_close(got, want, s)


@pytest.mark.parametrize("options", [options for options, _ in VARIETY], ids=str)
def test_the_reference_of_the_kernel_attends_to_what_codes_stand_for(options):
    s = scene(**options, fp8=True)
    tail = None if s.metadata.causal else s.tail.data
    sinks = torch.randn(s.q.shape[2])
    got, _ = paged_attention_reference(
        s.q, s.clean.data, clean_metadata(s), tail, s.scale, sinks, scales=s.clean.scales
    )
    assert_close(got, dense_answer(s, tail is not None, sinks)[0], s)


def clean_metadata(s):
    return replace(s.metadata, table=PageTable(FULL, s.clean_table))


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("options", "splits"),
    few_of(VARIETY if ON_GPU else VARIETY[:-1], 0, 2, 4),  # the interpreter has no product in bfloat16
    ids=str,
)
def test_the_kernel_attends_to_what_codes_stand_for(options, splits):
    """With poison in every slot and column that no query may see, sinks, and however keys are split."""
    s = scene(**options, fp8=True)
    here, sinks = moved(s, DEVICE), torch.randn(s.q.shape[2])
    tail = None if s.metadata.causal else here.tail.data
    launch = Launch(16, 16 if s.q.element_size() > 2 else 32, splits, 4, 1)
    call = here.q, here.kv.data, here.metadata, tail, s.scale
    out, _ = paged_attention(*call, sinks.to(DEVICE), GPU, launch, scales=here.kv.scales)
    assert_close(out.cpu(), dense_answer(s, tail is not None, sinks)[0], s)
    out, lse = paged_attention(*call, None, GPU, launch, scales=here.kv.scales)
    want, want_lse = dense_answer(s, tail is not None)
    assert_close(out.cpu(), want, s)
    assert_close_lse(lse.cpu(), want_lse, s)


@on_gpu_or_interpreted
def test_a_commit_and_a_transfer_move_codes_as_they_are():
    """NaN and both zeros included, which comparing numbers would not tell."""
    torch.manual_seed(0)
    tail = torch.randint(0, 256, (2, 3, 5, 2, 2, 8), dtype=torch.uint8, device=DEVICE).view(FP8)
    table = (torch.randperm(12) + 1).view(4, 3).int().to(DEVICE)
    rows, committed, accept_len = (torch.tensor(x, device=DEVICE) for x in ([1, 3, 0], [2, 7, 0], [3, 0, 1]))
    node = torch.randint(0, 5, (3, 4), device=DEVICE)
    paths, pools = committing.Paths(rows, committed, accept_len, 4, node, 3), []
    for run in (committing.commit_reference, lambda *args: committing.commit(*args, GPU)):
        pool = torch.zeros((2, 13 * 4, 2, 2, 8), dtype=torch.uint8, device=DEVICE).view(FP8)
        run(pool, tail, table, 4, paths)
        pools.append(pool)
    assert torch.equal(*(as_bytes(pool) for pool in pools))
    at = int(table[1, 1]) * 4  # column 2 of row 1, whose prefix is 2
    assert torch.equal(as_bytes(pools[1])[:, at], as_bytes(tail)[:, 0, int(node[0, 2])])
    span, slots, sums = ChunkSpan(0, 6, 4, 0, 16 * 12 * 2), [], []
    for run in (pack_reference, lambda *args: pack(*args, GPU)):
        slots.append(torch.zeros(1024, dtype=torch.uint8, device=DEVICE))
        sums.append(torch.zeros(2, dtype=torch.int64, device=DEVICE))
        run(slots[-1], pools[0], table[1], span, sums[-1])
    assert torch.equal(*slots)
    assert torch.equal(*sums)
    for run in (unpack_reference, lambda *args: unpack(*args, GPU)):
        pool = torch.zeros_like(as_bytes(pools[0])).view(FP8)
        run(slots[0], pool, table[1], span, torch.zeros(2, dtype=torch.int64, device=DEVICE))
        for position in range(6):
            slot = int(table[1, position // 4]) * 4 + position % 4
            assert torch.equal(as_bytes(pool)[:, slot], as_bytes(pools[0])[:, slot])


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_in_a_code_shows(causal):
    """Also a 16-bit product's, where codes are converted four at a time."""
    s = moved(scene(n=4, t=0 if causal else 6, causal=causal, dtype=torch.bfloat16, fp8=True), DEVICE)
    s.clean.data[:] = float("nan")
    backend = TritonBackend(DEVICE)
    metadata = clean_metadata(s)
    if causal:
        out = backend.causal(s.q, s.clean, metadata, s.scale)
    else:
        out = backend.prefix_tail(s.q, s.clean, metadata, s.tail, s.scale)
    assert bool(out[0].isnan().all())
