"""Block heads, captured on a GPU: tokens of plain decoding, accept lengths of a CPU.

python -m pytest tests/gpu/test_gpu_block_heads.py -q
"""

import pytest
import torch

from support.block_heads import LAYOUTS, saved
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.tiny_models import Pair, save_random_llama
from treetop.bench.equality import equal_outputs
from treetop.engine.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", LAYOUTS)
def test_captured_trees_of_a_block_head(name, tmp_path):
    """float32: up to near ties a CPU's tokens, plainly and with trees; bfloat16: captured as eager, rounds too."""
    target = save_random_llama(tmp_path / "target", seed=5, head_dim=16)
    pair = Pair(target, saved(tmp_path, name))
    prompts, shape = pair.prompts([1, 9, 40], seed=3), (4, 4, 14)
    options = {"page_size": 4, "chunked_prefill_size": 16, "context_length": 128, "max_running_requests": 4}
    cpu = build(pair, None, **options, dtype="float32", device="cpu", graphs="off")
    expected = cpu.generate(prompts, greedy(24))
    llm = build(pair, shape, **options, dtype="float32", device="cuda", graphs="auto")
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert equal_outputs(cpu, expected, llm.generate(prompts, greedy(24))).ok
    llm.close()
    found, params = [], [greedy(24), sampled(3, 24), greedy(20)]
    for graphs in ("auto", "off"):
        llm = build(pair, shape, **options, dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        outputs = llm.generate(prompts, params)
        found.append((tokens(outputs), accept_lens(outputs)))
        llm.close()
    assert found[0] == found[1]
