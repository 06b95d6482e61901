"""The kernels of compressed attention agree with dense attention, and touch nothing that a query may not see.

Tests of the kernels run in the interpreted session.
"""

from dataclasses import replace

import pytest
import torch

from support.grids import few_of
from support.interpreted import interpreted
from support.scenes import assert_close, dense_answer, scene
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention_config import CallShape, Launch, launch_by_formula
from treetop.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from treetop.kernels.kv import PageTable
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.types.ids import FULL

CPU = torch.device("cpu")
VARIETY = [
    {"dim": 22, "latent": 16},
    {"n": 1, "t": 1, "heads": 16, "dim": 48, "latent": 32},
    {"n": 3, "t": 9, "heads": 1, "page_size": 1, "dim": 26, "latent": 20},
    {"n": 17, "t": 17, "page_size": 8, "max_kv_len": 150, "dim": 72, "latent": 64},
    {"dim": 80, "latent": 64, "dtype": torch.float16, "max_kv_len": 90, "page_size": 3},
    {"dim": 24, "latent": 16, "window": 6},
    {"n": 12, "t": 12, "window": 17, "page_size": 8, "max_kv_len": 70, "dim": 24, "latent": 16},
    {"n": 12, "t": 12, "window": 17, "chunked": True, "page_size": 8, "max_kv_len": 70, "dim": 24, "latent": 16},
    {"n": 5, "t": 9, "dim": 22, "latent": 16, "fp8": True},
    {"n": 3, "dim": 80, "latent": 64, "dtype": torch.float16, "page_size": 8, "fp8": True},
]


def one_plane(**options):
    return scene(kv_heads=1, **options)


@pytest.mark.parametrize(("options", "causal"), [({**each}, causal) for each in VARIETY for causal in (0, 1)])
def test_pytorch_reads_one_plane_as_key_and_value(options, causal):
    """The backend and the reference, over prefix and tail and in prefill, in the dense answer's float64."""
    s = one_plane(**{**options, "dtype": torch.float64}, causal=bool(causal))
    metadata = replace(s.metadata, table=PageTable(FULL, s.clean_table))
    backend, want = TorchBackend(s.q.dtype, CPU), dense_answer(s, with_tail=not causal)[0]
    plan, tail = backend.plan(backend.begin(metadata), metadata), None if causal else s.tail.data
    if causal:
        out = backend.causal(s.q, s.clean, plan, s.scale)
    else:
        out = backend.prefix_tail(s.q, s.clean, plan, s.tail, s.scale)
    got = latent_attention_reference(s.q, s.clean.data, metadata, tail, options["latent"], s.scale, s.clean.scales)
    for each in (out, got):
        assert each.shape[-1] == options["latent"]
        torch.testing.assert_close(each[s.real], want[s.real], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "n", "rows"), [(16, 1, 1), (16, 16, 8), (128, 4, 1), (128, 2048, 1), (20, 6, 32)])
def test_a_launch_fits_in_shared_memory(heads, n, rows):
    """Of an H100: queries, and as many blocks of planes as the pipeline has stages; float32 too."""
    gpu = GpuTraits(132, True, 227 << 10)
    for size in (2, 4):
        launch = launch_by_formula(CallShape(rows, n, 1, heads, 576, size, 65536, causal=n > 64), gpu)
        kept = launch.block_m + launch.num_stages * launch.block_n
        assert kept * 576 * size < gpu.shared_bytes
        assert launch.block_m * 512 * 4 <= launch.num_warps * 32 * 192 * 4, "the sums do not fit into registers"


@interpreted
@pytest.mark.parametrize("options", few_of(VARIETY, *range(0, 10, 2)), ids=str)
def test_prefix_and_tail_equal_dense_attention(options):
    """On pages that are poisoned where no query may look."""
    s = one_plane(**options)
    backend = TritonBackend(CPU)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    assert out.shape == (*s.q.shape[:3], options["latent"])
    assert_close(out, dense_answer(s, with_tail=True)[0], s)


@interpreted
@pytest.mark.parametrize(
    "options",
    few_of(
        [
            {"n": 1, "dim": 22, "latent": 16},
            {"n": 9, "page_size": 1, "dim": 40, "latent": 32},
            {"n": 40, "max_kv_len": 90, "dim": 32, "latent": 26, "heads": 3},
            {"n": 40, "max_kv_len": 90, "window": 11, "dim": 20, "latent": 16},
            {"n": 30, "max_kv_len": 100, "dtype": torch.float16, "dim": 40, "latent": 32},
            {"n": 9, "dim": 40, "latent": 32, "fp8": True},
        ],
        0,
        2,
        4,
        5,
    ),
    ids=str,
)
def test_causal_equals_dense_attention(options):
    """Chunks longer than a block of queries, padded; padding queries give 0 and read nothing."""
    s = one_plane(**options, causal=True)
    backend = TritonBackend(CPU)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    out = backend.causal(s.q, s.kv, plan, s.scale)
    assert_close(out, dense_answer(s, with_tail=False)[0], s)
    assert (out[~s.real] == 0).all()


@interpreted
@pytest.mark.parametrize(("splits", "window"), few_of([(1, 19), (3, None), (6, 19)], 0, 1))
def test_the_number_of_splits_does_not_show(splits, window):
    """More splits than blocks of keys, empty splits and the tail's split all merge to the same answer."""
    launch, gpu = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1), gpu_traits(CPU)
    for causal in (False, True):
        s = one_plane(n=4, heads=3, dim=24, latent=16, max_kv_len=70, window=window, causal=causal)
        tail = None if causal else s.tail.data
        out = latent_attention(s.q, s.kv.data, s.metadata, tail, 16, s.scale, gpu, launch)
        assert_close(out, dense_answer(s, with_tail=not causal)[0], s)
