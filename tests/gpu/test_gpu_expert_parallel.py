"""On two NVIDIA GPUs: ranks that share experts over NCCL, captured rounds, and one GPU's answers."""

import os
import signal
import time

import pytest
import torch

from support.engines import greedy, sampled, tokens
from support.expert_pairs import CHAIN, TREE, answers, build, save_glm_with_mtp
from support.refusing import refused
from support.tiny_models import Pair
from treetop.distributed import process as processes
from treetop.types.errors import ConfigError, EngineError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
OPTIONS = {"device": "cuda", "dtype": "float32", "context_length": 256, "page_size": 16}
PROMPTS = [9, 30, 5, 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 211, "hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64}
    return save_glm_with_mtp(tmp_path_factory.mktemp("glm"), **sizes)


@pytest.fixture
def started(monkeypatch):
    found, start = [], processes.start_process
    monkeypatch.setattr(processes, "start_process", lambda *a: found.append(start(*a)) or found[-1])
    return found


def run(folder, shape, ranks, *asked, **options):
    return answers(folder, shape, ranks, Pair(folder, None).prompts(PROMPTS), asked, **{**OPTIONS, **options})


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_two_gpus_give_what_one_gives(folder, shape):
    """In float32, captured, two steps in flight: tokens, but for near ties; with a rank that is idle, too."""
    params = greedy(60), sampled(3, 60, temperature=0.8, top_p=0.9)
    alone = run(folder, shape, 1, *((each, None) for each in params))
    asked = [(each, places) for each in params for places in ([0, 1, 0, 1], [1, 1, 1, 1])]
    for (each, _), shared in zip(asked, run(folder, shape, 2, *asked), strict=True):
        expected = alone[params.index(each)]
        assert sum(a != b for a, b in zip(tokens(shared), tokens(expected), strict=True)) <= 1, "more than a near tie"


def test_where_a_request_is_changes_no_bit(folder):
    """In bfloat16, too: shares are added in the order of the ranks, not of the library's ring."""
    asked = [(greedy(60), [rank] * len(PROMPTS)) for rank in (0, 1)]
    first, second = run(folder, TREE, 2, *asked, dtype="bfloat16")
    assert tokens(first) == tokens(second)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_group_and_gives_back_its_memory(folder, started, how):
    """Also out of kernels that wait for it, within the deadline; a group starts again on the same GPUs."""
    llm = build(folder, TREE, 2, step_timeout=5.0, **OPTIONS)
    stream = llm.stream(Pair(folder, None).prompts(PROMPTS), greedy(200))
    next(stream)
    os.kill(started[1].pid, how)
    begun = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 has ended" if how == signal.SIGKILL else "raise --step-timeout"):
        list(stream)
    assert time.monotonic() - begun < 20
    llm.close()
    assert all(process.poll() is not None for process in started)
    assert len(run(folder, TREE, 2, (greedy(10), None))[0]) == len(PROMPTS)


def test_more_ranks_than_gpus_are_refused_by_name(folder):
    refused(ConfigError, lambda: build(folder, None, 8, **OPTIONS), "--ep-size 8", "GPUs")
