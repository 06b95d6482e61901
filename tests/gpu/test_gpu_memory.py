"""Memory, capture and the benchmark on an NVIDIA GPU: what the arithmetic allows is what the device then holds.

`python -m pytest tests/gpu/test_gpu_memory.py -s` prints the figures it looks at; under four minutes.
"""

import gc
import json
import time
from pathlib import Path

import pytest
import torch

from support.engines import greedy, sampled, tokens
from treetop import LLM
from treetop.cli import main
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.memory import gib, pool_bytes
from treetop.types.errors import CapacityError, EngineError
from treetop.types.sampling import SamplingMode, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"
LLAMA = {
    "model": str(PRESETS / "llama-3.1-8b"),
    "draft": str(PRESETS / "eagle3-llama-3.1-8b"),
    "load_format": "dummy",
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def needs(size):
    if torch.cuda.mem_get_info()[0] < size * 2**30:
        pytest.skip(f"needs {size} GiB of free GPU memory")


def test_an_8b_model_takes_its_share_and_serves_a_full_batch_without_running_out():
    """Whole contexts of 64 rows do not fit: the pools take the fraction, coarse buckets are captured, it samples."""
    needs(60)
    begun = time.perf_counter()
    llm = LLM(**LLAMA, speculative_policy="fixed", max_running_requests=64, context_length=32768)
    start_s = time.perf_counter() - begun
    use, layout, graphs = llm.engine.memory, llm.engine.layout, llm.engine.launcher
    free, total = torch.cuda.mem_get_info()
    lines = "\n".join(use.lines())
    print(f"\n{lines}\nfree now {gib(free)}; {len(graphs)} graphs in {graphs.seconds:.1f} s; start {start_s:.1f} s")
    assert isinstance(graphs, CudaGraphs)
    assert sum(key.choice is SamplingMode.GREEDY for key in graphs._graphs) == len(layout.coarse_buckets)
    assert graphs.seconds < 30
    assert layout.tokens_per_request <= layout.pool_tokens < layout.tokens_for_all
    made = sum(pool.data.nbytes for pool in llm.engine.runner.pools.values())
    assert made == pool_bytes(layout, 2)
    assert use.budget.static + made <= 0.88 * total
    prompts = [[(7 * i + j) % 128000 for j in range(700)] for i in range(64)]
    mixed = [greedy(8) if i % 2 else sampled(i, 8, top_p=0.9) for i in range(64)]
    outputs = llm.generate(prompts, mixed)
    assert all(len(output.token_ids) == 8 for output in outputs)
    left = torch.cuda.mem_get_info()[0]
    print(f"free after a batch of 64, half of it sampled: {gib(left)}; graphs now {len(graphs)}")
    assert left > 512 << 20  # what the fraction leaves to others is not eaten up


def test_what_is_measured_is_about_what_the_shapes_say():
    """Weights and tables: the estimate before loading is no more than what was taken, and most of it."""
    needs(40)
    from treetop.engine.startup.plan import plan_engine
    from treetop.types.config import EngineConfig

    estimate = plan_engine(EngineConfig.of(**LLAMA, context_length=4096)).use.budget.static
    taken = LLM(**LLAMA, context_length=4096).engine.memory.budget.static
    print(f"\nestimate {gib(estimate)}, taken {gib(taken)}")
    assert 0.9 * taken <= estimate <= 1.01 * taken


def test_a_context_that_cannot_fit_is_refused_before_weights_are_made():
    """A fraction too small for one request: no allocation happens, and the fraction that is named works."""
    needs(40)
    before = torch.cuda.memory_allocated()
    with pytest.raises(CapacityError) as error:
        LLM(**LLAMA, mem_fraction_static=0.1)
    assert torch.cuda.memory_allocated() == before
    message = str(error.value)
    print("\n" + message)
    minimum = float(message.split("--mem-fraction-static to ")[1].split(" ", maxsplit=1)[0])
    llm = LLM(**LLAMA, mem_fraction_static=min(minimum + 0.02, 0.98), max_running_requests=1)
    assert llm.engine.layout.pool_tokens >= llm.engine.layout.tokens_per_request


def test_out_of_memory_while_running_is_an_error_of_the_engine():
    """Memory that another tenant takes away after the start: numbers and options, not a traceback of the allocator."""
    llm = LLM(max_running_requests=32, chunked_prefill_size=8192, graphs="off")
    taken = _everything()
    try:
        with pytest.raises(EngineError, match="out of memory while running") as error:
            llm.generate([[5] * 250] * 32, SamplingParams(max_tokens=4, ignore_eos=True))
        print("\n" + str(error.value))
    finally:
        del taken


def _everything():
    """All memory, free parts of the allocator's segments included: it hands out 512 bytes at least, so none is left."""
    torch.cuda.empty_cache()
    taken, size = [], torch.cuda.mem_get_info()[0]
    while size >= 512:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def test_graphs_captured_at_start_serve_greedy_and_sampled_rounds():
    """float32: tokens of captured and eager engines agree; a batch that was not foreseen adds sampled rounds alone."""
    prompts = ["def area(radius):", "class Queue:\n    def __init__(self", "import os\n"] * 2
    params = [greedy(30), sampled(3, 30), sampled(4, 30, top_p=0.9)] * 2
    captured, eager = (
        LLM(dtype="float32", speculative_policy="fixed", max_running_requests=6, graphs=graphs)
        for graphs in ("auto", "off")
    )
    known = len(captured.engine.launcher)
    for each in params[:3]:
        assert tokens(captured.generate(prompts, each)) == tokens(eager.generate(prompts, each))
    graphs = captured.engine.launcher
    assert all(key.choice is SamplingMode.SAMPLE for key in list(graphs._graphs)[known:])
    assert any(key.choice is SamplingMode.SAMPLE for key in graphs._graphs)
    assert known <= len(graphs) <= known + len(captured.engine.layout.buckets)


def test_the_round_table_of_the_presets_comes_in_one_call(capsys):
    """`treetop bench` with dummy weights: phases by events, floors and ratios above 1, for the floor counts 16 bits."""
    needs(40)
    argv = ["bench", LLAMA["model"], "--speculative-draft-model-path", LLAMA["draft"], "--load-format", "dummy"]
    argv += [
        "--no-compress-weights",
        "--simulate-accept-length",
        "3",
        "--shapes",
        "0,1,1",
        "5,4,16",
        "--batches",
        "1",
        "8",
        "--json",
    ]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["dtype"] == "bfloat16"
    for case in report["cases"]:
        assert case["device_over_floor"] > 1
        assert case["wall_ms"] >= 0.9 * case["device_ms"]
        assert case["accept_length"] == (1 if case["shape"] == [0, 1, 1] else 3)
