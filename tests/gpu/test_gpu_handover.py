"""On an NVIDIA GPU: chunks move by kernels, and two workers of one device give what one gives."""

from itertools import count

import pytest
import torch

from support.engines import build, greedy, sampled
from support.handing import Relay, Worker, bits
from treetop.kernels.comm.kv_chunks import ChunkSpan, pack, pack_reference, unpack, unpack_reference
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

IDS = count(2 * 10**6)
GPU = {"device": "cuda", "dtype": "float32", "max_running_requests": 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_chunk_moves_as_the_reference_moves_it(dtype):
    """Heads of an 8B model, 480 tokens of pages in any order; slot, pages and checksums are equal bits."""
    pool = torch.randn(4, 64 * 16, 2, 8, 128, device="cuda").to(dtype)
    table = torch.randperm(63, device="cuda", dtype=torch.int32) + 1
    stride = 4 * 480 * 2 * 128 * dtype.itemsize
    span, memory = ChunkSpan(21, 480, 16, 32, stride), torch.zeros(32 + 8 * stride, dtype=torch.uint8, device="cuda")
    one, other = memory.clone(), memory.clone()
    gpu, sums = gpu_traits(pool.device), torch.zeros(4, 8, dtype=torch.int64, device="cuda")
    pack(one, pool, table, span, sums[0], gpu=gpu)
    pack_reference(other, pool, table, span, sums[1])
    assert torch.equal(one, other)
    one_pool, other_pool = torch.zeros_like(pool), torch.zeros_like(pool)
    unpack(one, one_pool, table, span, sums[2], gpu=gpu)
    unpack_reference(other, other_pool, table, span, sums[3])
    assert bool((sums == sums[0]).all())
    assert bool(sums[0].any())
    assert torch.equal(bits(one_pool), bits(other_pool))


@pytest.mark.parametrize("params", [greedy(30), sampled(4, 30, presence_penalty=0.4)], ids=["greedy", "sampled"])
def test_two_workers_of_a_gpu_give_what_one_gives(strong_pair, params):
    """Captured rounds, two steps in flight, unequal pages, chunks shorter than a prompt."""
    prompts = strong_pair.prompts([5, 33, 60])
    alone = build(strong_pair, (2, 3, 6), context_length=128, **GPU)
    expected = [(out.token_ids, list(out.metrics.accept_lens)) for out in alone.generate(prompts, params)]
    prefill, decode = (Worker(strong_pair, (2, 3, 6), page_size=page, **GPU) for page in (16, 8))
    relay = Relay(prefill, decode, maximum=25)
    ids = relay.submit(prompts, [params] * 3, IDS)
    relay.run()
    assert not relay.local
    assert [relay.result(each)[:2] for each in ids] == expected
