"""On two NVIDIA GPUs: ranks over NCCL and by peer memory, captured rounds, and one GPU's answers."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from support import gpu_ranks
from support.engines import accept_lens, greedy, sampled, tokens
from support.refusing import refused
from treetop import LLM
from treetop.distributed import process as processes
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.types.errors import ConfigError, EngineError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

PROMPTS = ["def area(radius):", "class Queue:\n    def __init__(self", "import os\n\ndef walk(path):\n    for name in"]


@contextmanager
def engine(**options):
    own = {"dtype": "float32", "max_running_requests": 4, "page_size": 16, "device": "cuda"}
    llm = LLM(**{**own, "speculative_policy": "fixed", **options})
    try:
        yield llm
    finally:
        llm.close()


def run(*params, **options):
    """What an engine answers to each of these, one after the other; an engine takes long to start."""
    with engine(**options) as llm:
        outputs = [llm.generate(PROMPTS * 2, each) for each in params]
        llm.scheduler.check_integrity()
        return outputs


@cache
def of_two():
    with engine(tp_size=2) as llm:
        assert isinstance(llm.engine.launcher, CudaGraphs)
        return llm.generate(PROMPTS * 2, greedy(60))


DRILLS = [
    gpu_ranks.sums_are_the_same,
    gpu_ranks.ten_thousand_exchanges,
    gpu_ranks.graphs_replay,
    gpu_ranks.one_late_rank_does_not_make_others_late,
    gpu_ranks.a_rank_dies,
    gpu_ranks.waits_are_ended,
]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.__name__)
def test_exchanges_by_peer_memory(drill):
    """Each drill says in its docstring what holds."""
    gpu_ranks.ranks_do(drill)


def test_exchanges_by_peer_memory_and_by_nccl_give_the_same_tokens():
    (by_nccl,) = run(greedy(60), tp_size=2, disable_custom_all_reduce=True)
    assert tokens(by_nccl) == tokens(of_two())


@pytest.mark.parametrize("shape", [(5, 4, 16), (3, 1, 4)])
def test_two_gpus_give_what_one_gives(shape):
    """In float32, captured, two steps in flight, greedy and sampled: tokens, but for near ties, and accept lengths."""
    steps, topk, nodes = shape
    tree = {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }
    params = greedy(60), sampled(3, 60, temperature=0.8, top_p=0.9)
    for alone, shared in zip(run(*params, **tree), run(*params, tp_size=2, **tree), strict=True):
        differ = sum(a != b for a, b in zip(tokens(shared), tokens(alone), strict=True))
        assert differ <= 1, "more than a near tie"
        if not differ:
            assert accept_lens(shared) == accept_lens(alone)


def test_eager_and_captured_rounds_of_two_gpus_agree():
    (eager,) = run(greedy(60), tp_size=2, graphs="off")
    assert tokens(of_two()) == tokens(eager)
    assert accept_lens(of_two()) == accept_lens(eager)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_gone_ends_the_group_and_gives_back_its_memory(monkeypatch, how):
    """Also out of kernels that wait for it: an error in time, and a group that starts again on the same GPUs."""
    started = {}
    start = processes.start_process
    monkeypatch.setattr(processes, "start_process", lambda *a: started.setdefault(a[1].folder, start(*a)))
    with engine(tp_size=2, step_timeout=5.0) as llm:
        (process,) = started.values()
        stream = llm.stream(PROMPTS, greedy(1000))
        next(stream)
        os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(EngineError, match="rank 1 has ended" if how == "killed" else "did not (end step|answer)"):
            list(stream)
        assert time.monotonic() - begun < 20
    assert len(run(greedy(10), tp_size=2)[0]) == 2 * len(PROMPTS)


def test_more_ranks_than_gpus_are_refused_by_name():
    wanted = 64
    refused(ConfigError, lambda: LLM(tp_size=wanted, device="cuda"), f"--tp-size {wanted}")


def tokens_in_here() -> list[tuple[int, ...]]:
    return tokens(of_two())


def test_where_peers_cannot_reach_each_other_the_answers_are_the_same(monkeypatch):
    """Exchanges then go through the host. NCCL reads its environment once in a process, so this takes another."""
    direct = tokens_in_here()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(tokens_in_here).result() == direct
