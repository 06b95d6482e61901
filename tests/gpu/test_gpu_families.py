"""Families whose layers have a mechanism of their own, captured on a GPU: tokens of a CPU, and trees as plain.

python -m pytest tests/gpu/test_gpu_families.py -q
"""

import pytest
import torch
import transformers

from support.engines import build, greedy, tokens
from support.families import FAMILIES, WINDOW
from support.recurrences import NAMES as RECURRENT
from treetop.bench.equality import equal_outputs
from treetop.engine.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NAMES = ["olmo3", "granite", "smollm3 windows", "phi4 mini", "ernie", "qwen3 vl", "mixtral", "minimax m2", "hy3"]
NAMES += [
    "gemma4",
    "gemma4 experts",
    "laguna",
    "step",
    "mimo v2",
    "ministral3",
    "ernie moe",
    "glm4v moe",
    "llama 4",
    "hunyuan moe",
    *RECURRENT,
]
"""Norms of all q and k and none before, multipliers, layers without rotation, joined and partly rotated q and k,
interleaved rotation, text of what sees, experts under other names and with biased sigmoid routers.

K/V that later layers read, embeddings by layer, capped logits, experts beside a dense feed-forward, gated outputs,
limited activations, narrow values, queries scaled by position, a corrected softmax; chunks, norms of heads without
weights, experts whose inputs are weighted; states of rows beside pages.
"""
LENGTHS = (1, WINDOW, 5 * WINDOW)


@pytest.mark.parametrize("name", NAMES)
def test_captured_rounds_give_the_tokens_of_a_cpu(name, tmp_path):
    """float32: plain decoding on the GPU and on the CPU, and a tree, up to near ties; bfloat16: captured as eager."""
    if not hasattr(transformers, f"{FAMILIES[name].name}Config"):
        pytest.skip(f"transformers {transformers.__version__} makes no {FAMILIES[name].name}")
    saved = FAMILIES[name].save(tmp_path, seed=5)
    prompts, shape = saved.pair.prompts(LENGTHS, seed=3), (4, 3, 12)
    options = {"page_size": 4, "chunked_prefill_size": 16, "context_length": 128, "max_running_requests": 4}
    cpu = build(saved.pair, None, **options, dtype="float32", device="cpu", graphs="off")
    expected = cpu.generate(prompts, greedy(16))
    for each in (None, shape):
        llm = build(saved.pair, each, **options, dtype="float32", device="cuda", graphs="auto", check_level=2)
        assert isinstance(llm.engine.launcher, CudaGraphs)
        for _ in range(2):  # rows go from hand to hand
            assert equal_outputs(cpu, expected, llm.generate(prompts, greedy(16))).ok
        llm.close()
    found = []
    for graphs in ("auto", "off"):
        llm = build(saved.pair, shape, **options, dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        found.append(tokens(llm.generate(prompts, greedy(16))))
        llm.close()
    assert found[0] == found[1]
