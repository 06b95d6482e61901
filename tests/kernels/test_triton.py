"""The Triton kernels agree with dense attention, and touch nothing that a query may not see.

Tests of the kernels run in the interpreted session (see `support/interpreted.py`).
"""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from support.grids import few_of
from support.interpreted import interpreted
from support.scenes import assert_close, assert_close_lse, dense_answer, scene
from support.tolerance import Exact, assert_near, gated_product, log_softmax, product, rms_normed
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import Need
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention import attention
from treetop.kernels.attention.attention import paged_attention, paged_attention_reference
from treetop.kernels.attention.attention_config import CallShape, Launch, launch_by_formula
from treetop.kernels.fused import (
    HeadNorms,
    add,
    add_rms_norm,
    add_rms_norm_reference,
    embed_and_norm,
    embed_and_norm_reference,
    rotate_and_write,
    rotate_and_write_reference,
    silu_mul,
    silu_mul_reference,
)
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, compress, lossless_gemm
from treetop.kernels.gemm.skinny_gemm import (
    RowsLaunch,
    gated_rows,
    gated_rows_reference,
    skinny_gemm,
    skinny_gemm_reference,
)
from treetop.kernels.kv import PagedKV, PageTable, write_pages
from treetop.kernels.rope import RopeSpec, rope_table, rotate_
from treetop.kernels.tree.topk import top_logprobs, top_logprobs_reference
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.types.errors import ConfigError
from treetop.types.ids import FULL
from treetop.weights.linear import LibraryGated, LibraryLinear, SkinnyGated, SkinnyLinear

CPU = torch.device("cpu")
VARIETY = [
    {},
    {"n": 1, "t": 1},
    {"n": 3, "t": 9, "heads": 2, "page_size": 1},
    {"n": 16, "t": 16, "heads": 4, "kv_heads": 1, "dim": 32, "page_size": 16},
    {"n": 17, "t": 17, "heads": 4, "kv_heads": 1, "page_size": 8, "max_kv_len": 150},
    {"heads": 14, "dim": 24, "page_size": 3, "max_kv_len": 20},
    {"dim": 64, "dtype": torch.float16, "max_kv_len": 90},
    {"window": 6},
    {"n": 12, "t": 12, "window": 17, "page_size": 8, "max_kv_len": 70},
    {"window": 6, "chunked": True},
    {"n": 12, "t": 12, "window": 17, "chunked": True, "page_size": 8, "max_kv_len": 70},
]


def test_without_triton_modules_import_and_the_backend_says_what_is_missing():
    """The guard leaves kernels as plain functions; references still run."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from treetop.attention.auto import make_backend\n"
        "from treetop.attention.capabilities import Need\n"
        "make_backend('triton', Need(torch.float32, torch.device('cuda')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ConfigError: --attention-backend triton: Triton is not installed" in done.stderr


def test_a_cpu_or_a_test_dtype_is_refused_by_name():
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ConfigError, match="need a CUDA device, this engine runs on cpu"):
        make_backend("triton", Need(torch.float32, CPU))
    with pytest.raises(ConfigError, match="not in float64"):
        make_backend("triton", Need(torch.float64, torch.device("cuda")))


def test_splits_fill_the_gpu_but_never_overfill_it():
    """Splits exist only while two programs a multiprocessor are not reached, and no split is without keys."""
    gpu = GpuTraits(num_sms=132, can_overlap=True)
    for rows, n, kv_heads in itertools.product((1, 3, 8, 16, 32, 200), (1, 4, 16, 64, 512), (1, 2, 8)):
        launch = launch_by_formula(CallShape(rows, n, kv_heads, 4, 128, 2, 2048), gpu)
        programs = rows * kv_heads * -(-n * 4 // launch.block_m)
        blocks = 2048 // launch.block_n
        assert launch.splits == 1 or launch.splits * programs <= 2 * 132
        assert launch.splits <= blocks
        assert programs * launch.splits >= min(64, programs * blocks)


@interpreted
@pytest.mark.parametrize("options", few_of(VARIETY, 0, 1, 2, 6, 8, 9), ids=str)
def test_prefix_and_tail_equal_dense_attention(options):
    """One pass over pages and tail gives what one product over all visible keys gives; so do the torch backend and
    the reference beside the kernel, on pages that are not poisoned.
    """
    s = scene(**options)
    want = dense_answer(s, with_tail=True)[0]
    backend = TritonBackend(CPU)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    assert out.shape == s.q.shape
    assert_close(out, want, s)
    metadata = replace(s.metadata, table=PageTable(FULL, s.clean_table))
    torch_backend = TorchBackend(s.q.dtype, CPU)
    plan = torch_backend.plan(torch_backend.begin(metadata), metadata)
    assert_close(torch_backend.prefix_tail(s.q, s.clean, plan, s.tail, s.scale), want, s)
    got = paged_attention_reference(s.q, s.clean.data, metadata, s.tail.data, s.scale)[0]
    assert_close(got, want, s)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("options", few_of(VARIETY[::2], 1, 4, 5), ids=str)
def test_the_prefix_alone_gives_its_log_sum_exp(options):
    """Natural logarithm, float32; an empty prefix gives out 0 and lse -inf."""
    s = scene(**options)
    out, lse = paged_attention(s.q, s.kv.data, s.metadata, None, s.scale, None, gpu_traits(CPU))
    want, want_lse = dense_answer(s, with_tail=False)
    assert_close(out, want, s)
    assert lse.dtype == torch.float32
    assert_close_lse(lse, want_lse, s)
    assert (lse[-1] == float("-inf")).all()
    assert (out[-1] == 0).all()


@interpreted
@pytest.mark.parametrize(
    "options",
    few_of(
        [
            {"n": 1},
            {"n": 9, "page_size": 1},
            {"n": 40, "max_kv_len": 90, "dim": 32},
            {"n": 40, "max_kv_len": 90, "window": 11},
            {"n": 40, "max_kv_len": 90, "window": 11, "chunked": True},
            {"n": 23, "heads": 4, "kv_heads": 4, "window": 1},
            {"n": 30, "max_kv_len": 100, "dtype": torch.float16},
        ],
        0,
        2,
        4,
        6,
    ),
    ids=str,
)
def test_causal_equals_dense_attention(options):
    """Chunks longer than a block of queries, padded; padding queries give 0 and read nothing."""
    s = scene(**options, causal=True)
    backend = TritonBackend(CPU)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.causal(s.q, s.kv, plan, s.scale)
    assert_close(out, dense_answer(s, with_tail=False)[0], s)
    assert (out[~s.real] == 0).all()


@interpreted
@pytest.mark.parametrize(
    ("splits", "items", "window"), few_of([(1, 1, 19), (3, 1, None), (6, 1, 19), (3, 4, 19), (6, 2, None)], 0, 1, 3)
)
def test_the_number_of_splits_does_not_show(splits, items, window, monkeypatch):
    """More splits than blocks of keys, empty splits and the tail's split all merge to the same answer.

    Also where a program of the merge joins several items, which in an engine only large batches ask for.
    """
    monkeypatch.setattr(attention, "_items_to_merge", lambda count, _: math.gcd(items, count))
    s = scene(n=3, t=4, heads=2, kv_heads=1, max_kv_len=70, window=window)
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    gpu = gpu_traits(CPU)
    out, lse = paged_attention(s.q, s.kv.data, s.metadata, s.tail.data, s.scale, None, gpu, launch)
    want, want_lse = dense_answer(s, with_tail=True)
    assert_close(out, want, s)
    assert_close_lse(lse, want_lse, s)
    causal = scene(n=10, heads=2, kv_heads=1, max_kv_len=70, window=window, causal=True)
    out, _ = paged_attention(causal.q, causal.kv.data, causal.metadata, None, causal.scale, None, gpu, launch)
    assert_close(out, dense_answer(causal, with_tail=False)[0], causal)


@interpreted
@pytest.mark.parametrize("hidden", [48, 64])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_add_and_norm_equal_the_plain_operations(hidden, parts):
    """The sum of the parts is rounded as the plain addition rounds it, and the norm is of that sum."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, hidden), torch.rand(hidden)
    given = torch.randn(parts, 3, 2, hidden) if parts else None
    got = add_rms_norm(x, given, weight, 1e-5, gpu_traits(CPU))
    total, _ = add_rms_norm_reference(x, given, weight, 1e-5)
    torch.testing.assert_close(got[0], total)
    if given is not None:
        torch.testing.assert_close(add(x, given, gpu_traits(CPU)), total)
    assert_near(got[1], rms_normed(got[0], weight, 1e-5))


@interpreted
@pytest.mark.parametrize(("width", "hidden"), [(24, 40), (64, 48)])
def test_a_drafts_input_is_the_embedding_beside_the_norm(width, hidden):
    """Tokens and states as slices of larger tensors; one state shared by all nodes of a row."""
    torch.manual_seed(0)
    table, weight = torch.randn(30, width), torch.rand(hidden)
    tokens = torch.randint(0, 30, (3, 5))[:, 1:4]
    for state in (torch.randn(3, 1, hidden).expand(-1, 3, -1), torch.randn(3, 5, hidden)[:, :3]):
        got = embed_and_norm(table, tokens, state, weight, 1e-5, gpu_traits(CPU))
        torch.testing.assert_close(got, embed_and_norm_reference(table, tokens, state, weight, 1e-5))


@interpreted
@pytest.mark.parametrize("inner", [40, 1500])
def test_silu_and_product_equal_the_plain_operations(inner):
    """Rows wider than a block, and widths that are no power of two."""
    torch.manual_seed(0)
    gate_up = torch.randn(2, 3, 2 * inner) * 4
    torch.testing.assert_close(silu_mul(gate_up, gpu_traits(CPU)), silu_mul_reference(gate_up))


@interpreted
@pytest.mark.parametrize(
    ("rows", "splits", "rows_left"),
    [(1, 4, True), (1, 1, False), (16, 2, True), (19, 1, True), (19, 4, False), (140, 2, False), (200, 4, True)],
)
def test_few_rows_give_the_parts_of_a_product(rows, splits, rows_left):
    """Rows that do not fill their block, outputs that do not fill theirs; one part is rounded, more are not."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 128).half(), torch.randn(72, 128).half()
    launch = RowsLaunch(block_n=32, block_k=16, splits=splits, num_stages=1, num_warps=1, rows_left=rows_left)
    got = skinny_gemm(x, weight, launch, gpu_traits(CPU))
    assert got.dtype == (torch.float16 if splits == 1 else torch.float32)
    for parts in (got, skinny_gemm_reference(x, weight, splits)):
        for part, a, b in zip(parts, x.chunk(splits, dim=1), weight.chunk(splits, dim=1), strict=True):
            assert_near(part, product(a, b))


@interpreted
@pytest.mark.parametrize("rows", [1, 17, 140])
def test_gated_rows_equal_silu_of_one_half_times_the_other(rows):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 64).half(), torch.randn(2 * 40, 64).half() / 4
    launch = RowsLaunch(block_n=16, block_k=32, splits=1, num_stages=1, num_warps=1)
    assert_near(gated_rows(x, weight, launch, gpu_traits(CPU)), gated_product(x, weight))
    assert_near(gated_rows_reference(x, weight), gated_product(x, weight))


@interpreted
@pytest.mark.parametrize("rows", [1, 16, 31])
@pytest.mark.parametrize(("n", "splits", "block_n"), [(128, 1, 128), (192, 2, 64), (256, 4, 256)])
def test_compressed_weights_give_the_parts_of_a_product(n, splits, block_n, rows):
    """Rows that do not fill their block."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 2048), torch.randn(n, 2048).bfloat16()
    weight[70] = 0
    launch = LosslessLaunch(block_n, splits, num_stages=1, num_warps=1, picks=block_n // 4)
    got = lossless_gemm(x, compress(weight, False), launch, gpu_traits(CPU))
    assert got.shape == (splits, rows, n)
    assert_near(got.sum(0), product(x, weight))


@interpreted
@pytest.mark.parametrize(("n", "splits", "block_n"), [(64, 1, 64), (256, 1, 256), (256, 4, 64)])
def test_compressed_weights_come_out_bit_for_bit_outliers_too(n, splits, block_n):
    """Rows with a single one take columns out of the weight, bit for bit; a tile has as many outliers as it may.

    Some tiles have none, so those of the next ones come right after.
    """
    torch.manual_seed(0)
    k = 1024
    weight = torch.randn(n, k).bfloat16()
    weight[: k // 16 - 8, 4:6] *= 1e-9  # others are outliers by themselves
    columns = [4, 5, *range(310, 322), 640, 736, 1023]  # of every quarter
    x = torch.nn.functional.one_hot(torch.tensor(columns), k).float()
    small = compress(weight, False)
    assert 112 <= small.crowd[64] <= k // 8
    got = lossless_gemm(x, small, LosslessLaunch(block_n, splits, 1, 1, block_n // 4), gpu_traits(CPU))
    assert torch.equal(got.float().sum(0), weight[:, columns].float().T)


@interpreted
@pytest.mark.parametrize("rows", [1, 17])
def test_compressed_gates_equal_silu_of_one_half_times_the_other(rows):
    """Row 0 sees outliers alone: they are all of its gates and ups."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1024), torch.randn(2 * 192, 1024).bfloat16() / 8
    weight[:, 3:4] *= 1e-6
    x[0] = torch.nn.functional.one_hot(torch.tensor(3), 1024).float()
    got = lossless_gemm(x, compress(weight, True), LosslessLaunch(128, 1, 1, 1, 32), gpu_traits(CPU))
    want = gated_product(x, weight)
    assert bool((want.error[0] < 1e-3 * want.value[0].abs()).all())
    assert_near(got, want)


@interpreted
@pytest.mark.parametrize("rows", [1, 17])
def test_gates_may_be_gelu(rows):
    """Of whole weights and of compressed ones, far from 0 too, and not the same as SiLU."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1024), torch.randn(2 * 64, 1024).bfloat16() / 8
    gate, up = product(x, weight).value.float().chunk(2, dim=-1)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    launch = RowsLaunch(block_n=16, block_k=32, splits=1, num_stages=1, num_warps=1)
    whole = gated_rows(x, weight.float(), launch, gpu_traits(CPU), "gelu_tanh")
    small = compress(weight, True)
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    close(whole, want)
    close(gated_rows_reference(x, weight.float(), "gelu_tanh"), want)
    close(lossless_gemm(x, small, LosslessLaunch(128, 1, 1, 1, 32), gpu_traits(CPU), "gelu_tanh"), want)
    assert not torch.allclose(gated_rows_reference(x, weight.float()), want, atol=1e-2)


@interpreted
def test_products_of_any_shape_are_ours_or_the_librarys():
    """Layers give parts and sums; a width that our kernel refuses, and more rows than it takes, are the library's.

    Whether that adds up in float32, which a CPU's own products of 16 bits need not, is its affair.
    """
    torch.manual_seed(0)
    gpu = gpu_traits(CPU)
    for n, k, rows, is_ours in ((256, 512, 4, True), (256, 200, 4, False), (64, 128, 400, False)):
        weight, x = torch.randn(n, k).half() / 16, torch.randn(2, rows // 2, k).half()
        ours, library, gated = SkinnyLinear(weight, gpu), LibraryLinear(weight), SkinnyGated(weight, gpu)
        if is_ours:
            flat = x.flatten(0, 1)
            assert_near(ours(x).flatten(0, 1), product(flat, weight))
            assert_near(ours.parts(x).float().sum(0).flatten(0, 1), product(flat, weight))
        else:
            assert torch.equal(ours(x), library(x))
            assert torch.equal(ours.parts(x), library.parts(x))
        torch.testing.assert_close(gated(x), LibraryGated(weight)(x))


@interpreted
@pytest.mark.pairwise
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("normed", [0, 1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 24), (9, 3, 16), (5, 0, 16), (0, 3, 16)])
def test_rotation_and_write_equal_the_two_operations(in_pages, normed, parts, heads, kv_heads, dim):
    """q comes back normed and rotated; k and v reach their slice of a tail or their slots; slot 0 stays 0.

    normed: how many of q, k and v have norms. Without heads of k and v nothing is written; those of a
    draft's context come without queries.
    """
    torch.manual_seed(0)
    rows, n = 3, 4
    qkv = torch.randn(parts, rows, n, heads + 2 * kv_heads, dim)
    table = rope_table(RopeSpec(dim, 10000.0), 50, torch.float32, CPU)
    positions = torch.randint(0, 50, (rows, 1)).expand(rows, n)
    by_hand = qkv.sum(0)
    norms = HeadNorms(torch.rand(normed, dim) + 0.5, 0.1) if normed else None
    for part, weight in zip(by_hand.split([heads, kv_heads, kv_heads], 2), norms.weight if norms else (), strict=False):
        part.copy_(part * (part.square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight)
    rotate_(by_hand[:, :, : heads + kv_heads], table.at(positions))
    kv = by_hand[:, :, heads:].reshape(rows, n, 2, kv_heads, dim)
    slots = (torch.randperm(30)[: rows * n] + 1).view(rows, n) if in_pages else None
    held = max(kv_heads, 2)
    shape = (31, 2, held, dim) if in_pages else (rows, n + 3, 2, held, dim)
    got, want, hand = torch.zeros(3, *shape)
    places = [(x if in_pages else x[:, 2 : 2 + n])[..., :kv_heads, :] for x in (got, want, hand)]
    if slots is None:
        places[2].copy_(kv)
    elif kv_heads == 0:
        pass
    else:
        slots[0, 1] = slots[2, 0] = 0
        write_pages(PagedKV(hand), slots, kv)
    lying, at = (table.data, positions), table.at(positions)
    q = rotate_and_write(qkv, lying, places[0], slots, norms, gpu_traits(CPU))
    by_reference = rotate_and_write_reference(qkv, at, places[1], slots, norms)
    for result, target in ((q, got), (by_reference, want)):
        torch.testing.assert_close(result, by_hand[:, :, :heads])
        torch.testing.assert_close(target, hand)


@interpreted
@pytest.mark.parametrize(("vocab", "k"), [(40, 1), (1024, 4), (2500, 8), (3000, 5)])
def test_top_logprobs_equal_log_softmax_and_a_stable_top_k(vocab, k):
    """Pieces that end inside a row, equal logits, a row of one, impossible tokens: ties go to the smaller index."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-6, 6, (3, 2, vocab), generator=generator) / 2.0
    logits[1, 0] = 1.5
    logits[2, 1] = float("-inf")
    logits[2, 1, 7::20] = 0.25
    offset = torch.randint(0, 5, (vocab,), generator=generator)
    every = log_softmax(logits)
    exact = Exact(every.value.topk(k).values, every.error[..., :k])
    for bias in (None, offset):
        got, want = top_logprobs(logits, k, bias, gpu=gpu_traits(CPU)), top_logprobs_reference(logits, k, bias)
        assert torch.equal(got[1], want[1])
        for best in (got[0], want[0]):
            assert_near(best, exact)
            assert bool((best <= 0).all())


@interpreted
def test_a_logit_that_is_not_a_number_shows_in_the_proposals():
    """The probability of every proposal is NaN, which a probe finds, and the tokens are still tokens."""
    logits = torch.randn(2, 1100)
    logits[1, 1050] = float("nan")
    best, token = top_logprobs(logits, 4, None, gpu=gpu_traits(CPU))
    assert best[0].isfinite().all()
    assert best[1].isnan().all()
    assert ((token >= 0) & (token < 1100)).all()
