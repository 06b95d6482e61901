"""Several threads under `--exactness bits`: what gets ready alone, what a start leaves, and whole engines of two."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from treetop import LLM
from treetop.engine import engine
from treetop.engine.startup import exactness
from treetop.exact import first_calls
from treetop.exact.machine import found_once
from treetop.kernels.exact import elementwise_problem

TWO_THREADS = """
import torch
from treetop import LLM, SamplingParams

assert torch.get_num_threads() == 2
prompts = [list(range(5, 5 + count)) for count in (1, 9, 130)]


def served(draft, most):
    llm = LLM(
        "builtin:nestling", draft, exactness="bits", dtype="float32", device="cpu", context_length=160,
        max_running_requests=most, speculative_policy="fixed",
    )
    outputs = llm.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True, logprobs=1))
    llm.close()
    taken = sum(each.metrics.target_forwards for each in outputs)
    return [(each.token_ids, [token.logprob.hex() for token in each.logprobs]) for each in outputs], taken


alone, of_one = served(None, 1)
together, of_trees = served("builtin:nestling-eagle3", 3)
assert together == alone
assert of_trees < of_one, "nothing was accepted, so nothing was tested"
"""


class Sizes(TorchDispatchMode):
    """How many numbers the first call of each operation has."""

    def __init__(self):
        super().__init__()
        self.first = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.first.setdefault((func.overloadpacket._qualified_op_name.rpartition(":")[2], args[0].dtype), args[0])
        return func(*args, **(kwargs or {}))


def test_the_probe_calls_each_function_alone_before_several_threads_do():
    """MKL's answer threads wrongly that come in the middle of a function's first call, and the finding is kept."""
    first_calls._call_all.cache_clear()
    with Sizes() as sizes:
        elementwise_problem.__wrapped__(1)
    for name in ("exp", "log1p", "tanh", "rsqrt"):
        assert sizes.first[name, torch.float32].numel() <= 8


@pytest.mark.parametrize("kind", ["bits", "ties"])
def test_an_engine_is_built_after_these_calls(strong_pair, kind, monkeypatch):
    """Also where what probes find was kept by an earlier start, so that none of them calls anything."""
    made = {"draft": None, "exactness": kind, "dtype": "float32", "device": "cpu", "context_length": 64}
    LLM(strong_pair.target, **made).close()
    real, calls = engine.build_runner, []

    def build(plan):
        calls.append(first_calls._call_all.cache_info().misses)
        return real(plan)

    monkeypatch.setattr(engine, "build_runner", build)
    first_calls._call_all.cache_clear()
    LLM(strong_pair.target, **made).close()
    assert calls == [1]


def test_that_nothing_was_found_holds_for_later_starts_too(monkeypatch, tmp_path):
    """A start that looked again could find something, and keep that for ever. Who gave no answer is asked again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [found_once("kind", 1, lambda answer=answer: answer) for answer in ("", "exp")] == ["", ""]
    assert [found_once("kind", 2, lambda answer=answer: answer) for answer in (None, "exp", "")] == [None, "exp", "exp"]
    found = [None, "exp"]
    monkeypatch.setattr(exactness, "elementwise_problem", lambda threads: found.pop(0))
    monkeypatch.setattr(exactness.on_a_cpu, "problem", lambda dim, threads, value_dim: found.pop(0))
    assert exactness._no_operations() is exactness._no_operations() is None
    assert found == ["exp"]


def test_two_threads_have_the_bits_of_plain_decoding():
    """Trees and a batch, where products and functions of a prompt are divided among threads."""
    command, own = [sys.executable, "-c", TWO_THREADS], {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=False, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
