"""Kernels compiled ahead: launches only name them, in the thread that asked, and a start compiles nothing by itself."""

import gc
import importlib
import pkgutil
import threading

import pytest
import torch

import treetop.kernels
from engines import greedy, tokens
from treetop import LLM
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention import PagedKeys, Sight, TailKeys, paged_attention
from treetop.kernels.launch import Launch
from treetop.kernels.triton_guard import _probe, compiling_ahead, interpreted, tiles_of

triton = pytest.importorskip("triton")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
compiled_here = pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available() or interpreted(), reason="no CUDA device")


@compiled_here
def test_launches_inside_only_compile_and_other_threads_launch(monkeypatch):
    only_compiled = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_, warmup, **__: only_compiled.append(warmup))

    def launch():
        _probe[(1,)](None)

    launch()
    with compiling_ahead():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    launch()
    assert only_compiled == [False, True, False, False]


@compiled_here
def test_a_kernel_is_asked_for_once_for_each_kind_of_arguments(monkeypatch):
    asked = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda _, *args, **__: asked.append(args))
    x = torch.zeros(64)
    kinds = [x, x[1:], x.double(), None, 1, 16, *(tiles_of(torch.zeros(8, 16), 4, width) for width in (8, 16))]
    with compiling_ahead():
        for argument in [*kinds, x[16:], *kinds]:
            _probe[(1,)](argument)
        assert len(asked) == len(kinds)
        _probe[(1,)](x, num_warps=8)
        assert len(asked) == len(kinds) + 1
    with compiling_ahead():  # nothing is remembered
        _probe[(1,)](x)
    assert len(asked) == len(kinds) + 2


@compiled_here
def test_after_an_error_inside_launches_launch_again(monkeypatch):
    only_compiled = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_, warmup, **__: only_compiled.append(warmup))
    with pytest.raises(ValueError, match="stop"), compiling_ahead():
        raise ValueError("stop")
    _probe[(1,)](None)
    assert only_compiled == [False]


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """Whether each compilation from now on is by the thread that runs the test; no kernel of ours is compiled yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    here, found = threading.current_thread(), []

    def listen(*, cache_hit, **_):
        if not cache_hit:
            found.append(threading.current_thread() is here)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    forget_kernels()
    yield found
    forget_kernels()


def forget_kernels():
    for module in pkgutil.iter_modules(treetop.kernels.__path__, "treetop.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type(_probe)):
                value.device_caches.clear()


class AbsentGpu:
    """Triton's driver for a GPU that is not here: it can be compiled for, and a launch would fail."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@compiled_here
def test_the_kernels_of_a_call_are_compiled_and_then_there(compilations, monkeypatch):
    """Attention in one split, two and four: two kernels of its own and a merge of two and of four."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns that the default will change
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGpu())
    keys = PagedKeys(
        torch.zeros(64, 2, 2, 64), torch.zeros((3, 4), dtype=torch.int32), *torch.zeros(2, 2).long(), 64, 16
    )
    positions = torch.zeros((2, 4), dtype=torch.int64)
    tail = TailKeys(torch.zeros(2, 4, 2, 2, 64), positions, torch.ones(2, 4, 4, dtype=torch.bool))

    def attend():
        for splits in (1, 2, 4):
            launch = Launch(16, 32, splits, 4, 2, overlap=True)
            paged_attention(torch.zeros(2, 4, 8, 64), keys, Sight(positions), tail, 1.0, launch)

    for _ in range(2):
        with compiling_ahead():
            attend()
            attend()
        assert compilations == [False] * 4


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_engine_compiles_everything_ahead(compilations, dtype):
    """Neither the worst steps nor the captures of a start compile anything themselves; then the engine works."""
    llm = LLM(dtype=dtype, max_running_requests=4)
    assert isinstance(llm.engine.launcher, CudaGraphs)
    ahead = compilations.index(False)  # loading weights runs a kernel or two before
    assert compilations[ahead:].count(False) > 10
    assert not any(compilations[ahead:])
    outputs = llm.generate(["def area(radius):"] * 3, greedy(20))
    assert len(set(map(tuple, tokens(outputs)))) == 1
    llm.scheduler.check_integrity()


@on_a_gpu
def test_what_a_rehearsal_records_does_not_run():
    from treetop.engine.rehearsal import rehearse

    x = torch.zeros(4, device="cuda")
    rehearse([lambda: x.add_(1)])
    gc.collect()
    before = torch.cuda.memory_allocated()
    rehearse([lambda: x.add_(1), lambda: x.copy_(torch.ones(1 << 20, device="cuda")[:4])])
    assert x.tolist() == [0, 0, 0, 0]
    assert torch.cuda.memory_allocated() == before
