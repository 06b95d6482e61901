"""Sparse attention (DSA) on a GPU: kernels as PyTorch's backend, and engines of tiny models, captured.

python -m pytest tests/gpu/test_gpu_sparse.py -q
"""

from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy, tokens
from support.expert_pairs import build as with_mtp
from support.expert_pairs import save_glm5_with_mtp
from support.families import FAMILIES
from treetop.attention.triton_backend import TritonBackend
from treetop.bench.equality import equal_outputs
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.index_scores import paged_index_scores
from treetop.kernels.attention.index_topk import choose_by_scores, choose_by_scores_reference, choose_paged_keys
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import FP8, PagedKV, PageTable
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.phase import Phase
from treetop_debug.model_faults import SPARSE_FAULTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
RANK, PLANE, WIDTH = 512, 576, 704
"""A latent, with the key that turns, and with an indexer's key."""


def call(rows, n, t, lengths, bound, *, heads=128, index_heads=64, dtype=torch.bfloat16):
    """Planes in pages in random order, a tree's or a prefill's queries, and an indexer's of whole numbers."""
    torch.manual_seed(7)
    page, columns = 16, -(-bound // 16)
    with DEVICE:
        table = torch.zeros((rows, columns), dtype=torch.int32)
        table[:] = (torch.randperm(rows * columns) + 1).view(rows, columns)
        pages = torch.randn((1 + rows * columns) * page, 1, 1, WIDTH, dtype=dtype)
        pages[..., PLANE:] = torch.randint(-1, 2, (len(pages), 1, 1, WIDTH - PLANE))
        pages[:page] = 0
        kv_len = torch.tensor(lengths)
        tail = mask = spots = None
        positions = (kv_len - n)[:, None] + torch.arange(n)
        if t:
            tail = torch.randn(rows, t, 1, 1, WIDTH, dtype=dtype)
            tail[..., PLANE:] = torch.randint(-1, 2, (rows, t, 1, 1, WIDTH - PLANE))
            mask = torch.tril(torch.rand(rows, t, t) < 0.7) | torch.eye(t, dtype=torch.bool)
            mask, spots = mask[:, -n:], kv_len[:, None] + torch.arange(t)
            positions = spots[:, -n:]
        metadata = AttentionMetadata(
            Phase.VERIFY, PageTable(FULL, table), torch.arange(rows), kv_len, bound, page, positions, None, spots, mask
        )
        heads_of = torch.randint(-1, 2, (rows, n, index_heads, WIDTH - PLANE)).to(dtype)
        query = IndexQuery(heads_of, torch.randint(-2, 3, (rows, n, index_heads)).float(), 2048)
        q = torch.randn(rows, n, heads, PLANE, dtype=dtype)
    return q, PagedKV(pages, RANK, WIDTH - PLANE), metadata, tail, query


CALLS = [
    (1, 1, 1, (40_000,), 131_072),
    (4, 16, 16, (33_000, 5_000, 2_040, 0), 40_000),
    (2, 4, 12, (2_047, 9_000), 9_000),
    (1, 200, 0, (20_000,), 20_000),
    (1, 3000, 0, (3_000,), 3_000),
]


@pytest.mark.parametrize("index_heads", [32, 64])
@pytest.mark.parametrize("shape", CALLS, ids=str)
def test_the_keys_are_those_that_a_sort_chooses_and_no_others_count(shape, index_heads):
    """Scores of whole numbers, of which many are equal; the attention within a rounding of the dense one over them."""
    q, kv, metadata, tail, query = call(*shape, index_heads=index_heads)
    gpu = gpu_traits(DEVICE)
    keys = None if tail is None else tail[:, :, 0, 0, PLANE:]
    chosen = choose_paged_keys(query, kv.index_keys, metadata, keys, gpu)
    scores = paged_index_scores(query, kv.index_keys, metadata, keys, gpu)
    want = choose_by_scores_reference(scores, metadata, 2048)
    there = torch.arange(2048, device=DEVICE) < want.count[..., None]
    assert torch.equal(chosen.count, want.count)
    assert torch.equal(chosen.positions[there], want.positions[there])
    assert tail is None or torch.equal(chosen.columns, want.columns)
    backend = TritonBackend(DEVICE)
    assert (backend.hidden(metadata, chosen) == -1).all()
    narrowed = backend.narrowed(metadata, chosen)
    planes = None if tail is None else tail[..., :PLANE]
    got = latent_attention(q, kv.planes, narrowed, planes, RANK, 0.05, gpu)
    some = torch.linspace(0, q.shape[1] - 1, min(q.shape[1], 8), device=DEVICE).long()
    few = replace(chosen, positions=chosen.positions[:, some], count=chosen.count[:, some])
    # No prefill's extent for the reference: what was chosen says it all.
    mask = narrowed.mask if narrowed.mask is not None else torch.ones(q.shape[0], q.shape[1], 0, device=DEVICE).bool()
    spots = metadata.tail_positions if tail is not None else metadata.positions[:, :0]
    if planes is None:
        planes = q.new_zeros((q.shape[0], 0, 1, 1, PLANE))
    of_few = replace(
        narrowed, positions=narrowed.positions[:, some], chosen=few, mask=mask[:, some], tail_positions=spots
    )
    expected = latent_attention_reference(q[:, some].float(), kv.planes.float(), of_few, planes.float(), RANK, 0.05)
    error = (got[:, some].float() - expected).norm() / expected.norm()
    assert error < 0.01


def test_scores_are_those_of_a_cpu():
    """Exact sums, so equal bits; in float32 too."""
    for dtype in (torch.bfloat16, torch.float32):
        _, kv, metadata, tail, query = call(2, 4, 12, (300, 77), 320, dtype=dtype)
        got = paged_index_scores(query, kv.index_keys, metadata, tail[:, :, 0, 0, PLANE:], gpu_traits(DEVICE))
        slots = metadata.table.data[0, torch.arange(300, device=DEVICE) // 16].long() * 16
        keys = kv.index_keys[slots + torch.arange(300, device=DEVICE) % 16].cpu().double()
        heads, weights = query.heads[0].cpu().double(), query.weights[0].cpu().double()
        want = torch.einsum("nhm,nh->nm", torch.einsum("nhd,md->nhm", heads, keys).relu(), weights)
        assert torch.equal(got[0, :, :300].cpu().double(), want)


@pytest.mark.parametrize("kind", ["equal", "few", "random", "-inf", "rising"])
@pytest.mark.parametrize("bound", [4096, 16384, 140_001])
def test_a_choice_of_hard_scores_is_the_references(kind, bound):
    torch.manual_seed(1)
    with DEVICE:
        made = {
            "equal": torch.zeros(3, 2, bound + 9),
            "few": torch.randint(-3, 3, (3, 2, bound + 9)).float(),
            "random": torch.randn(3, 2, bound + 9),
            "-inf": torch.full((3, 2, bound + 9), float("-inf")),
            "rising": torch.arange(6 * (bound + 9)).view(3, 2, -1).float(),
        }
        kv_len, mask = torch.tensor([bound, 2048, 0]), torch.rand(3, 2, 9) < 0.5
        table = PageTable(FULL, torch.zeros((3, 1), dtype=torch.int32))
        positions = kv_len[:, None].expand(-1, 2).contiguous()
        spots = kv_len[:, None].expand(-1, 9)
        metadata = AttentionMetadata(
            Phase.VERIFY, table, torch.arange(3), kv_len, bound, 16, positions, None, spots, mask
        )
    got = choose_by_scores(made[kind], metadata, 2048, gpu_traits(DEVICE))
    want = choose_by_scores_reference(made[kind], metadata, 2048)
    there = torch.arange(2048, device=DEVICE) < want.count[..., None]
    assert torch.equal(got.count, want.count)
    assert torch.equal(got.positions[there], want.positions[there])
    assert torch.equal(got.columns, want.columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [16, 128])
def test_all_keys_chosen_are_dense_attention_to_the_bit(heads, dtype):
    """Of one launch: no more keys than top_k in the prefix and the tree."""
    q, kv, metadata, tail, query = call(3, 4, 4, (2_000, 17, 0), 3_000, heads=heads, dtype=dtype)
    gpu = gpu_traits(DEVICE)
    chosen = choose_paged_keys(query, kv.index_keys, metadata, tail[:, :, 0, 0, PLANE:], gpu)
    narrowed = TritonBackend(DEVICE).narrowed(metadata, chosen)
    for splits in (1, 4):
        launch = Launch(16, 16, splits, 8, 1)
        dense, sparse = (
            latent_attention(q, kv.planes, each, tail[..., :PLANE], RANK, 0.05, gpu, launch)
            for each in (metadata, narrowed)
        )
        assert torch.equal(dense, sparse)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((each, torch.bfloat16) for each in CALLS[1:4]), (CALLS[2], torch.float32)], ids=str
)
def test_planes_in_fp8_are_what_their_codes_stand_for(shape, dtype):
    """Sparse, or dense where all keys are seen: within a rounding of the reference, which decodes."""
    q, kv, metadata, tail, query = call(*shape, dtype=dtype, heads=16)
    gpu, scales = gpu_traits(DEVICE), torch.full((1, 1), 0.3, device=DEVICE)
    codes, tail_codes = (None if x is None else x.float().div(0.3).to(FP8) for x in (kv.data, tail))
    index = codes[:, 0, 0, PLANE:]
    keys = None if tail is None else tail_codes[:, :, 0, 0, PLANE:]
    chosen = choose_paged_keys(query, index, metadata, keys, gpu)
    scores = paged_index_scores(query, index.to(dtype), metadata, None if tail is None else keys.to(dtype), gpu)
    want = choose_by_scores_reference(scores, metadata, 2048)
    there = torch.arange(2048, device=DEVICE) < want.count[..., None]
    assert torch.equal(chosen.count, want.count)
    assert torch.equal(chosen.positions[there], want.positions[there])
    planes = codes[..., :PLANE]
    beside = None if tail is None else tail_codes[..., :PLANE]
    wide, wide_beside = (None if x is None else (x.float() * 0.3).to(dtype) for x in (planes, beside))
    for each in (metadata, replace(metadata, chosen=chosen, mask=chosen.columns)):
        got = latent_attention(q, planes, each, beside, RANK, 0.05, gpu, scales=scales)
        decoded = latent_attention(q, wide, each, wide_beside, RANK, 0.05, gpu)
        assert (got.float() - decoded.float()).norm() < 0.01 * decoded.float().norm()


OPTIONS = {"page_size": 4, "chunked_prefill_size": 16, "context_length": 128, "max_running_requests": 4}
LENGTHS = (1, 7, 12, 60)
"""An indexer chooses nine keys."""


@pytest.mark.parametrize("name", ["deepseek v32", "glm 5", "glm 5.2"])
def test_captured_rounds_give_the_tokens_of_a_cpu(name, tmp_path):
    """float32: plain and a tree, up to near ties, also after a prefix hit; bfloat16: captured as eager."""
    saved = FAMILIES[name].save(tmp_path, seed=5)
    prompts, shape = saved.pair.prompts(LENGTHS, seed=3), (4, 3, 12)
    cpu = build(saved.pair, None, **OPTIONS, dtype="float32", device="cpu", graphs="off")
    expected = cpu.generate(prompts, greedy(16))
    for each in (None, shape):
        llm = build(saved.pair, each, **OPTIONS, dtype="float32", device="cuda", graphs="auto", check_level=2)
        assert isinstance(llm.engine.launcher, CudaGraphs)
        for _ in range(2):  # the second time by the prefix cache
            assert equal_outputs(cpu, expected, llm.generate(prompts, greedy(16))).ok
        llm.close()
    found = []
    for graphs in ("auto", "off"):
        llm = build(saved.pair, shape, **OPTIONS, dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        found.append(tokens(llm.generate(prompts, greedy(16))))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["deepseek v3", "glm 5.2"])
def test_captured_rounds_over_planes_in_fp8_give_plain_decodings_tokens(name, tmp_path):
    """float32: a tree as plain, up to near ties; bfloat16: captured as eager."""
    saved = FAMILIES[name].save(tmp_path, seed=5)
    prompts, shape = saved.pair.prompts(LENGTHS, seed=3), (4, 3, 12)
    options = {**OPTIONS, "device": "cuda", "kv_cache_dtype": "fp8_e4m3"}
    plain = build(saved.pair, None, **options, dtype="float32")
    expected = plain.generate(prompts, greedy(16))
    llm = build(saved.pair, shape, **options, dtype="float32", check_level=2)
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert equal_outputs(plain, expected, llm.generate(prompts, greedy(16))).ok
    llm.close()
    plain.close()
    found = []
    for graphs in ("auto", "off"):
        llm = build(saved.pair, shape, **options, dtype="bfloat16", graphs=graphs, overlap=False)
        found.append(tokens(llm.generate(prompts, greedy(16))))
        llm.close()
    assert found[0] == found[1]


def test_an_mtp_layer_with_an_indexer_of_its_own_drafts_captured(tmp_path):
    """Chains and trees of a tiny GLM-5.2 give what plain decoding on the CPU gives, and accept what a CPU's do."""
    folder = save_glm5_with_mtp(tmp_path)
    prompts = [[(7 * i + 3 * j) % 13 for j in range(length)] for i, length in enumerate(LENGTHS)]
    options = {**OPTIONS, "dtype": "float32"}
    cpu = with_mtp(folder, None, 1, **options, device="cpu", graphs="off")
    expected = cpu.generate(prompts, greedy(16))
    for shape in ((1, 3, 4), (2, 3, 6)):
        llm = with_mtp(folder, shape, 1, **options, device="cuda", graphs="auto", check_level=2)
        found = llm.generate(prompts, greedy(16))
        assert equal_outputs(cpu, expected, found).ok
        of_cpu = with_mtp(folder, shape, 1, **options, device="cpu", graphs="off")
        same = of_cpu.generate(prompts, greedy(16))
        if tokens(same) == tokens(found):
            rounds = [sum(output.metrics.target_forwards for output in each) for each in (same, found)]
            assert abs(rounds[0] - rounds[1]) <= 2
        llm.close()
        of_cpu.close()


CHOSEN = [name for name, each in SPARSE_FAULTS.items() if "chosen_key" in each.guard]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_of_the_choice_is_caught_in_captured_rounds(name, tmp_path):
    """By the probe at level 2, on Triton; the sound engine runs to its end there."""
    pair, found = FAMILIES["glm 5.2"].save(tmp_path, seed=5).pair, SPARSE_FAULTS[name]
    prompts, params = pair.prompts([50, 12, 20], seed=3), [greedy(limit) for limit in (3, 9, 12)]
    place = {**OPTIONS, "context_length": 96, "dtype": "float32", "device": "cuda", "graphs": "auto", "check_level": 2}

    def generated():
        llm = build(pair, (3, 4, 14), **place)
        try:
            return tokens(llm.generate(prompts, params))
        finally:
            llm.close()

    with found.active(), pytest.raises(Exception, match=found.guard):
        generated()
    assert len(generated()) == 3
