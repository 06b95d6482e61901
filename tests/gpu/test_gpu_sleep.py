"""An engine on an NVIDIA GPU that sleeps: the card's memory is free, and captured rounds wake as they were."""

import gc
import time
from pathlib import Path

import pytest
import torch

from support.engines import build, greedy, tokens
from support.loras import save_lora
from support.quantized import fp8_blocks, quantized
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop import LLM
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.memory import gib

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_captured_rounds_wake_as_they_were(tmp_path, level, packed):
    """Beside plain and packed weights and an adapter; as often as one likes."""
    target = save_random_llama(tmp_path / "dense", seed=8, vocab_size=12, intermediate_size=128)
    head = save_random_head(tmp_path / "head", target, draft_vocab=11, seed=2)
    lora = save_lora(tmp_path / "lora", target, 8, 16.0, 1)
    if packed:
        target, _ = quantized(target, tmp_path / "target", fp8_blocks(32, 64))
    pair = Pair(target, head)
    llm = build(pair, (4, 3, 12), dtype="bfloat16", device="cuda", overlap=False, lora_modules={"it": str(lora)})

    def answers():
        return [tokens(llm.generate(pair.prompts([5, 41], seed=2), greedy(24), lora=name)) for name in (None, "it")]

    want = answers()
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        llm.sleep(level)
        assert torch.cuda.memory_allocated() < before
        llm.wake_up()
        assert isinstance(llm.engine.launcher, CudaGraphs)
        assert answers() == want
    llm.close()


def test_an_8b_model_gives_back_its_weights():
    """`python -m pytest tests/gpu/test_gpu_sleep.py -s` says the seconds that sleep and wake took."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    models = [str(PRESETS / name) for name in ("llama-3.1-8b", "eagle3-llama-3.1-8b")]
    more = {"max_running_requests": 32, "context_length": 4096, "max_total_tokens": 32 * 4096}
    more["speculative_policy"] = "fixed"
    llm = LLM(*models, load_format="dummy", dtype="bfloat16", **more)
    prompts = [[*range(100 + i, 140 + i)] for i in range(4)]
    want, held = tokens(llm.generate(prompts, greedy(16))), torch.cuda.memory_allocated()
    begun = time.perf_counter()
    llm.sleep()
    asleep, left = time.perf_counter(), torch.cuda.memory_allocated()
    llm.wake_up()
    print(f"\nsleep {asleep - begun:.2f} s, {gib(held - left)} given back, {gib(left)} left; wake"
          f" {time.perf_counter() - asleep:.2f} s")  # fmt: skip
    assert left < held // 8
    assert tokens(llm.generate(prompts, greedy(16))) == want
    llm.close()
