"""Compressed attention by position on a GPU, of all keys and of chosen ones: the same bits in every batch, tree, chunk,
launch and graph.

python -m pytest tests/gpu/test_gpu_latent_segments.py -q -m "not slow"
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from support.latent_rows import LatentSetting, make_latent_row
from support.segment_rows import SCALE, as_plain_and_prefilled, same_bits, tree
from treetop.kernels.attention.index_scores import paged_index_scores
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.segment_attention import SegmentLaunch
from treetop.kernels.gemm.heads_rows import heads_rows, heads_rows_reference
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]
ALL = LatentSetting(rank=512, dim=576, index=128, device=GPU, page_size=64)
CHOSEN = replace(ALL, top_k=300, page_size=16)
SETTINGS = {
    "all": ALL,
    "chosen": CHOSEN,
    "all in FP8": replace(ALL, fp8=True, page_size=1),
    "chosen in FP8": replace(CHOSEN, fp8=True),
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def parents(shape, seed=0):
    return tree(*shape, torch.Generator().manual_seed(seed))


def cancelling(kv, tail, q):
    """Latents of widely different size that cancel, some of which vanish beside others; scores that spread."""
    kv[::3] *= 300
    kv[1::5] *= 1e-5
    tail[::2] *= -300
    q *= 0.2


def test_it_is_attention():
    """Against dense attention in float32."""
    rows = [make_latent_row(n, parents((5, 4, 16), n), ALL, heads=16, dtype=torch.bfloat16) for n in (0, 700, 3000)]
    metadata, kv, tail = ALL.metadata_of(rows)
    q = torch.stack([row.q for row in rows]).to(GPU)[..., : ALL.dim]
    pages = kv.data[..., : ALL.dim].where(kv.data[..., : ALL.dim].isfinite(), 0)
    want = latent_attention_reference(q.float(), pages, metadata, tail.data[..., : ALL.dim], ALL.rank, SCALE)
    got = ALL.decode(rows).to(GPU)
    assert float((got - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("shape", "heads", "dtype"),
    [
        ((5, 4, 16), 16, torch.bfloat16),
        ((8, 5, 60), 128, torch.bfloat16),
        ((1, 6, 7), 20, torch.float16),
        *(
            slow(*each)
            for each in product(((8, 5, 60), (5, 4, 16), (1, 6, 7), (1, 63, 64)), (2, 16, 64), HALF)
            if each not in (((5, 4, 16), 16, torch.bfloat16),)
        ),
    ],
    ids=str,
)
def test_a_node_has_the_bits_of_plain_decoding_and_of_a_prefill(name, shape, heads, dtype):
    """Trees within a block, across its end and a segment's; rows of fewer keys than are chosen, and of more."""
    setting = SETTINGS[name]
    lengths = (1020, 17, 295)
    rows = [make_latent_row(n, parents(shape, n), setting, heads=heads, dtype=dtype) for n in lengths]
    last = shape[2] - 1
    for row, got in zip(rows, setting.decode(rows), strict=True):
        as_plain_and_prefilled(setting, row, got, sorted({0, last // 2, last}))


@pytest.mark.parametrize(
    ("rank", "dim", "index"), [(32, 48, 16), (20, 26, 10), slow(256, 320, 64), slow(64, 72, 24)], ids=str
)
@pytest.mark.parametrize("top_k", [None, 100])
def test_planes_of_every_width(rank, dim, index, top_k):
    setting = replace(ALL, rank=rank, dim=dim, index=index, top_k=top_k, page_size=16)
    row = make_latent_row(1023, parents((3, 4, 9)), setting, dtype=torch.bfloat16, change=cancelling)
    as_plain_and_prefilled(setting, row, setting.decode([row])[0], [8, 3], chunks=(4,))


@pytest.mark.parametrize("name", ["all", "chosen", slow("chosen in FP8")])
def test_a_prefill_has_one_result_in_chunks_of_any_size(name):
    """Beside another row, from the first token on."""
    setting, count = SETTINGS[name], 600
    keys = make_latent_row(count, [-1], setting, heads=16, dtype=torch.bfloat16).kv
    q = make_latent_row(0, [-1] * count, setting, heads=16, dtype=torch.bfloat16, seed=2).q
    whole = setting.prefilled([keys], [q])[0]
    for chunk in (7, 64, 130, 512):
        parts = [
            setting.prefilled([keys[: start + chunk], keys[:9]], [q[start : start + chunk], q[:9]])
            for start in range(0, count, chunk)
        ]
        assert same_bits(torch.cat([part[0] for part in parts]), whole), chunk
        assert all(same_bits(part[1], whole[:9]) for part in parts), chunk


@pytest.mark.parametrize("name", ["all", "chosen"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 4, 16)], ids=str)
def test_no_launch_and_no_batch_shows(name, shape):
    """Blocks of queries, programs, parts that are not kept, warps, stages, runs; every place of batches of 1 to 64."""
    setting = SETTINGS[name]
    lengths = [(i * 977) % 1400 for i in range(64)]
    rows = [make_latent_row(n, parents(shape, n), setting, heads=16, dtype=torch.bfloat16) for n in lengths]
    whole = setting.decode(rows)
    for batch in (1, 2, 3, 8, 17, 33):
        assert same_bits(setting.decode(rows[-batch:]), whole[-batch:]), batch
    for launch, shares in (
        (SegmentLaunch(16, 40, 7, 4, 2), 1),
        (SegmentLaunch(16, 1, 100, 8, 1), 5),
        (SegmentLaunch(32, 9, 5, 8, 2), 1000),
    ):
        again = replace(setting, launch=launch, shares=shares)
        assert same_bits(again.decode(rows[-4:]), whole[-4:]), (launch, shares)


def test_as_long_as_all_keys_are_chosen_sums_are_those_of_all():
    row = make_latent_row(700, parents((5, 4, 16)), ALL, heads=16, dtype=torch.bfloat16)
    assert same_bits(replace(ALL, top_k=2048).decode([row])[0], ALL.decode([row])[0])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_key_has_one_score_wherever_it_is(dtype):
    """In pages and in a tail, of one query and of many, in any batch; real numbers, which are seldom equal."""
    generator = torch.Generator(GPU).manual_seed(4)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, device=GPU)

    for heads in (32, 64):
        count, t, width = 500, 20, 128
        row = make_latent_row(count, [-1, *range(t - 1)], ALL, dtype=dtype)
        keys, of_tail = numbers(count, width).to(dtype), numbers(t, width).to(dtype)
        query = IndexQuery(numbers(1, t, heads, width).to(dtype), numbers(1, t, heads), 64)
        with_keys = replace(row, kv=torch.cat([row.kv[..., : ALL.dim], keys.cpu()[:, None, None]], dim=3))
        metadata, kv, _ = ALL.metadata_of([with_keys])
        pages = kv.data[:, 0, 0, ALL.dim :]
        tree_scores = paged_index_scores(query, pages, metadata, of_tail[None], gpu_traits(GPU), exact=True)
        for node in (0, 7, t - 1):
            before = torch.cat([with_keys.kv, with_keys.kv[:1].repeat(node, 1, 1, 1)])
            before[count:, 0, 0, ALL.dim :] = of_tail[:node].cpu()
            one = replace(with_keys, kv=before, parent=[-1], tail=with_keys.tail[:1], q=with_keys.q[:1])
            alone, kv_alone, _ = ALL.metadata_of([one])
            asked = IndexQuery(query.heads[:, node : node + 1], query.weights[:, node : node + 1], 64)
            got = paged_index_scores(
                asked, kv_alone.data[:, 0, 0, ALL.dim :], alone, of_tail[None, node : node + 1], gpu_traits(GPU), True
            )
            assert same_bits(got[0, 0, : count + node].cpu(), tree_scores[0, node, : count + node].cpu()), node
            assert same_bits(got[0, 0, -1].cpu(), tree_scores[0, node, count + node].cpu()), node


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "still", "rank"), [(16, 128, 512), (128, 128, 512), (5, 10, 20)])
def test_products_of_heads_have_a_rows_bits_at_any_number_of_rows(dtype, heads, still, rank):
    generator = torch.Generator(GPU).manual_seed(rank)
    up = (torch.randn((heads, 2 * still, rank), generator=generator, device=GPU) * rank**-0.5).to(dtype)
    for weight in (up[:, :still], up[:, still:].transpose(1, 2)):
        x = torch.randn((700, heads, weight.shape[1] + 8), generator=generator, device=GPU).to(dtype)
        x = (x * 10 ** torch.randint(-3, 3, x.shape, generator=generator, device=GPU))[..., :-8].to(dtype)
        want = heads_rows(x, weight, gpu_traits(GPU))
        right = heads_rows_reference(x.double(), weight.double())
        assert float((want - right).norm() / right.norm()) < 6e-3
        for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 300):
            at = torch.randperm(700, generator=generator, device=GPU)[:rows]
            assert same_bits(heads_rows(x[at], weight, gpu_traits(GPU)).cpu(), want[at].cpu()), rows
