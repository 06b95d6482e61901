"""The tier of K/V on the host on a GPU: a side stream, pinned slabs, captured rounds; what returns is what left."""

import random

import pytest
import torch

from support.engines import accept_lens, greedy, rest, tokens
from support.gpu_pairs import make
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.offloading import host_pages
from treetop.engine.startup import host_layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

POOL = {"max_running_requests": 4, "context_length": 512, "page_size": 16, "speculative_policy": "fixed"}


def turns(vocab, agents=8, count=3, first=200, more=64):
    rng = random.Random(2)
    texts = [[rng.randrange(vocab) for _ in range(first)] for _ in range(agents)]
    for _ in range(count):
        for text in texts:
            yield list(text)
            text += [rng.randrange(vocab) for _ in range(more)]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}], ids=str)
def test_what_returns_is_what_left(monkeypatch, options):
    """Tokens and accept lengths are those of an engine that evicts nothing; small slabs and steps, so many of each."""
    monkeypatch.setattr(host_layout, "COPIED_BYTES", 2**18)
    monkeypatch.setattr(host_pages, "SLAB_BYTES", 2**20)
    outputs = []
    for pool, size in ((1024, 0.25), (16384, None)):
        llm = make(**{**POOL, "max_total_tokens": pool, "kv_offloading_size": size, **options})
        assert isinstance(llm.engine.launcher, CudaGraphs)
        asked = [*turns(llm.engine.spec.vocab_size)]
        outputs.append([llm.generate([prompt], greedy(16))[0] for prompt in asked])
        if size is not None:
            rest(llm)
            stats = llm.scheduler.load.host_tier
            assert stats.failed_loads == 0
            assert stats.loaded_tokens > 2000
            llm.scheduler.check_integrity()
            slabs = [slab.result() for group in llm.engine.host_pages._groups.values() for slab in group.slabs]
            assert all(slab.is_pinned() for slab in slabs)
            assert len(slabs) > 4
        llm.close()
    got, want = outputs
    assert tokens(got) == tokens(want)
    assert accept_lens(got) == accept_lens(want)


def test_a_restart_finds_its_pages_on_disk(tmp_path):
    """Tokens and accept lengths are those of computing; what is read passes the checks of what was on the host."""
    disk = {"kv_offloading_size": 0.25, "kv_offloading_folder": str(tmp_path), "kv_offloading_disk_size": 1}
    outputs = []
    for options in (disk, disk, {}):
        llm = make(**{**POOL, "max_total_tokens": 16384, **options})
        asked = [*turns(llm.engine.spec.vocab_size, count=1)]
        outputs.append([llm.generate([prompt], greedy(16))[0] for prompt in asked])
        if options:
            rest(llm)
            stats = llm.scheduler.load.host_tier
            assert stats.failed_loads == stats.disk_damaged_pages == 0
            assert (stats.disk_saved_tokens if len(outputs) == 1 else stats.disk_loaded_tokens) >= 8 * 192
            llm.scheduler.check_integrity()
        llm.close()
    assert tokens(outputs[0]) == tokens(outputs[1]) == tokens(outputs[2])
    assert accept_lens(outputs[1]) == accept_lens(outputs[2])


def test_a_damaged_page_is_computed_again(monkeypatch):
    llm = make(**{**POOL, "max_total_tokens": 1024, "kv_offloading_size": 0.25})
    asked = [*turns(llm.engine.spec.vocab_size, count=1)]
    want = tokens([llm.generate([prompt], greedy(16))[0] for prompt in asked])
    rest(llm)
    torch.cuda.synchronize()
    for group in llm.engine.host_pages._groups.values():
        for slab in group.slabs:
            slab.result()[:, 5] ^= 1 << 6
    assert tokens([llm.generate([prompt], greedy(16))[0] for prompt in asked]) == want
    assert llm.scheduler.load.host_tier.failed_loads == 1
