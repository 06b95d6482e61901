"""Kernels compiled ahead: launches only name them, in the thread that asked, and a start compiles nothing by itself."""

import gc
import itertools
import math
import os
import random
import sys
import threading
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from support.engines import greedy, tokens
from support.examples import EVERYTHING
from support.gluon import store_one
from support.operation_cases import coded_weight
from support.operations import kernel_ops
from support.round_ops import sown_growth
from support.waiting import WAIT_S, until
from treetop import LLM
from treetop.attention.registry import BACKENDS
from treetop.checkpoints.loader import LoadContext
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.features.sampling import RowNumbers
from treetop.engine.prefill import PrefillBatch, prefill
from treetop.engine.prompt_blocks import block_lines, block_numbers
from treetop.engine.rounds import RoundKey, run_phases
from treetop.engine.staging import StagingBuffers
from treetop.engine.startup import build
from treetop.engine.startup.aot_compile import EveryExtent, compile_all, compile_steps
from treetop.engine.startup.build import zeros_on
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.products import Products
from treetop.engine.startup.profile_run import worst_prefill
from treetop.kernels import triton_guard
from treetop.kernels.attention.attention import paged_attention
from treetop.kernels.attention.attention_config import CallShape, Launch, choose_launch
from treetop.kernels.attention.index_topk import choose_paged_keys
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.stream_k import make_arrivals
from treetop.kernels.compile_worker import CompileWorker
from treetop.kernels.gemm.quantized_gemm import choose_quantized, quantized_gated, quantized_gemm
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.gemm.skinny_gemm import choose_no_split_k, gated_rows, skinny_gemm
from treetop.kernels.gemm.tiles import decode_tiles, in_turn, tile
from treetop.kernels.gluon_guard import swizzled_tiles
from treetop.kernels.kv import PageTable
from treetop.kernels.moe.experts import Activation, Experts, experts
from treetop.kernels.moe.routes import Routes, Tiles
from treetop.kernels.table import OpContext, Ops, operations
from treetop.kernels.tree.calibration import make_calibration
from treetop.kernels.tree.commit import Paths
from treetop.kernels.tree.grow import Children
from treetop.kernels.tree.learn import Observed
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.kernels.triton_guard import (
    GpuTraits,
    _probe,
    aot_compile,
    gpu_traits,
    interpreted,
    is_compiling_ahead,
    jit,
    tiles_of,
    tl,
)
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL, EngineConfig
from treetop.types.ids import FULL, Row
from treetop.types.kv import KVFormat
from treetop.types.layout import PLAIN, KVGroup, Layout, SpecShape
from treetop.types.messages import RowSetup
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode, SamplingParams
from treetop.types.tree import Accepted, DraftTree, FlatNodes, PathPositions
from treetop.weights import linear, lossless
from treetop_debug.faults import FAULTS
from treetop_debug.kernels import all_kernels
from treetop_debug.policy_faults import POLICY_FAULTS

triton = pytest.importorskip("triton", reason="Triton is not installed")
GPUTarget = pytest.importorskip("triton.backends.compiler", reason="Triton is not installed").GPUTarget
CUDABackend = pytest.importorskip("triton.backends.nvidia.compiler", reason="Triton is not installed").CUDABackend
compiled_here = pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available() or interpreted(), reason="no CUDA device")


@pytest.fixture
def launches(monkeypatch):
    """What reaches Triton: (arguments, whether it only compiles)."""
    seen = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda _, *args, warmup, **__: seen.append((args, warmup)))
    return seen


@compiled_here
def test_launches_inside_only_compile_and_other_threads_launch(launches):
    def launch():
        _probe[(1,)](None)

    def inside():
        assert is_compiling_ahead()
        assert not gc.isenabled()
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()

    launch()
    aot_compile(inside)
    assert not is_compiling_ahead()
    assert gc.isenabled()
    launch()
    assert [only_compiled for _, only_compiled in launches] == [False, True, False, False]


@compiled_here
def test_a_kernel_is_asked_for_once_for_each_kind_of_arguments(launches):
    x = torch.zeros(64)
    kinds = [x, x[1:], x.double(), None, 1, 16, *(tiles_of(torch.zeros(8, 16), 4, width) for width in (8, 16))]

    def inside():
        for argument in [*kinds, x[16:], *kinds]:
            _probe[(1,)](argument)
        assert len(launches) == len(kinds)
        _probe[(1,)](x, num_warps=8)
        assert len(launches) == len(kinds) + 1

    aot_compile(inside)
    aot_compile(lambda: _probe[(1,)](x))  # nothing is remembered
    assert len(launches) == len(kinds) + 2


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """(what, whether by the thread that runs the test) of each compilation from now on; no kernel is compiled yet.

    A kernel by its name; C code as "C".
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_guard, "_PAYS", math.inf)  # what processes compile is not seen here
    here, found = threading.current_thread(), []

    def listen(*, src, cache_hit, **_):
        if not cache_hit:
            found.append((src.name, threading.current_thread() is here))

    def build(*args, **options):
        found.append(("C", threading.current_thread() is here))
        return real(*args, **options)

    real = triton.runtime.build._build
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    monkeypatch.setattr(triton.runtime.build, "_build", build)
    forget_kernels()
    yield found
    forget_kernels()


def forget_kernels():
    for kernel in (*all_kernels().values(), _probe):
        kernel.device_caches.clear()


class AbsentGpu:
    """Triton's driver for a GPU that is not here: it can be compiled for, and a launch would fail.

    launchers: (kernel, whether by the thread that made this) of each launcher made.
    """

    def __init__(self):
        self.launchers, self._thread = [], threading.current_thread()

    def launcher_cls(self, src, metadata):
        self.launchers.append((src.name, threading.current_thread() is self._thread))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def absent_gpu_to_the_end(compilations, monkeypatch):
    """Kernels are compiled to machine code."""
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGpu())
    return compilations


@pytest.fixture
def absent_gpu(absent_gpu_to_the_end, monkeypatch):
    """A day's kernels are compiled as far as Triton's own passes for a GPU: LLVM and ptxas are most of the time.

    `make test-all` has them to the end, and so has `make check-kernels`.
    """

    def lowered(module, metadata, *_):
        metadata |= dict.fromkeys(("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
        metadata |= {"global_scratch_align": 1, "profile_scratch_align": 1, "name": "kernel", "tensordesc_meta": []}
        return ""

    if not EVERYTHING:
        for stage, made in (("make_llir", lowered), ("make_ptx", lowered), ("make_cubin", lambda *_: b"")):
            monkeypatch.setattr(CUDABackend, stage, staticmethod(made))
    return absent_gpu_to_the_end


@compiled_here
def test_the_kernels_of_a_call_are_compiled_and_then_there(absent_gpu_to_the_end):
    """Attention in one split, two and four: two kernels of its own and a merge of two and of four."""
    pages, tail, rows = torch.zeros(64, 2, 2, 64), torch.zeros(2, 4, 2, 2, 64), torch.zeros(2).long()
    table, positions = PageTable(FULL, torch.zeros((3, 4), dtype=torch.int32)), torch.zeros((2, 4), dtype=torch.int64)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    metadata = AttentionMetadata(Phase.VERIFY, table, rows, rows, 64, 16, positions, None, positions, mask)
    gpu = gpu_traits(torch.device("cpu"))

    def attend():
        for splits in (1, 2, 4):
            launch = Launch(16, 32, splits, 4, 2, overlap=True)
            paged_attention(torch.zeros(2, 4, 8, 64), pages, metadata, tail, 1.0, None, gpu, launch)

    for _ in range(2):
        aot_compile(lambda: (attend(), attend()))
        assert sorted(absent_gpu_to_the_end) == [
            (kernel, False) for kernel in ("_attention_kernel", "_merge_kernel") for _ in range(2)
        ]
        assert sorted(triton.runtime.driver.active.launchers) == sorted(absent_gpu_to_the_end)


@compiled_here
@pytest.mark.parametrize("kind", ["", "latent", "flat"])
def test_attention_with_helpers_compiles_for_a_gpu(absent_gpu, kind):
    """Programs that meet through memory, which the interpreter runs one after another."""
    latent = kind == "latent"
    rows, gpu = torch.zeros(32).long(), GpuTraits(132, True, 227 << 10)
    table, positions = PageTable(FULL, torch.zeros((33, 128), dtype=torch.int32)), torch.zeros(32, 4).long()
    mask, half = torch.ones(32, 4, 4, dtype=torch.bool), torch.bfloat16
    metadata = AttentionMetadata(Phase.VERIFY, table, rows, rows, 2048, 16, positions, None, positions, mask)
    shape = (1, 1, 576) if latent else (2, 8, 128)
    pages, tail = torch.zeros(64, *shape, dtype=half), torch.zeros(32, 4, *shape, dtype=half)
    q, arrivals = (
        torch.zeros(32, 4, 16 if latent else 32, shape[2], dtype=half),
        make_arrivals(torch.device("cpu"), gpu),
    )
    if kind == "flat":
        flat = FlatNodes(rows, rows, torch.zeros(80).long(), positions)
        metadata, q, tail = replace(metadata, flat=flat), q.flatten(0, 1)[:80, None], tail.flatten(0, 1)[:80, None]

    def attend():
        if latent:
            latent_attention(q, pages, metadata, tail, 512, 1.0, gpu, arrivals=arrivals)
        else:
            paged_attention(q, pages, metadata, tail, 1.0, None, gpu, arrivals=arrivals)

    aot_compile(attend)
    assert ("_latent_attention_kernel" if latent else "_attention_kernel", False) in absent_gpu


def of_experts(weight, *shape):
    """A quantized weight's lines as those of experts."""
    parts = {name: getattr(weight, name) for name in ("codes", "scale", "factor", "zero")}
    return replace(weight, **{name: p if p is None else p.view(*shape, -1) for name, p in parts.items()})


@compiled_here
@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme("e4m3", 128),
        pytest.param(QuantScheme("int4", 32, zeros=True), marks=pytest.mark.slow),
        pytest.param(QuantScheme("e2m1", 16, "over"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_that_decode_compile_for_a_gpu(absent_gpu, scheme):
    """Of few rows, of many, and gated, as weights of a model launch them; with experts, and into memory."""
    weight, gpu = coded_weight(512, 1024, scheme, "cpu"), GpuTraits(132, True, 227 << 10, has_bfloat16=True)
    plain, gated = tile(weight), tile(in_turn(weight.halves()))
    down = tile(of_experts(coded_weight(4096, 64, scheme, "cpu"), 4, 1024))
    made = Experts(tile(in_turn(of_experts(weight, 4, 2, 64))), down, None, None, Activation.SILU)
    numbers = torch.zeros((5, 8), dtype=torch.int32)
    routes = Routes(numbers[0, :4].view(2, 2), torch.zeros(2, 2), Tiles(16, *numbers))

    def launch():
        for rows in (1, 256):
            x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
            quantized_gemm(x, plain, launch=choose_quantized(scheme.numbers, (512, 1024), False, rows, gpu), gpu=gpu)
        quantized_gated(x, gated, launch=choose_quantized(scheme.numbers, (512, 1024), True, 256, gpu), gpu=gpu)
        decode_tiles(plain, 64, 512, torch.bfloat16, gpu)
        experts(x[:2], routes, made, gpu)

    aot_compile(launch)
    kernels = ["_quantized_kernel"] * 3 + ["_decode_tiles_kernel"] + ["_grouped_kernel"] * 2
    assert sorted(absent_gpu) == [(kernel, False) for kernel in sorted(kernels)]


@compiled_here
def test_products_without_a_cut_compile_for_a_gpu(absent_gpu):
    """Of few rows in narrow blocks, of more and of many, whose programs divide them; with a bias and with a gate."""
    gpu, weight = GpuTraits(132, True, 227 << 10), torch.zeros((4096, 96), dtype=torch.bfloat16)

    def launch():
        for rows in (1, 40, 200, 1000):
            x = torch.zeros(rows, 96, dtype=torch.bfloat16)
            launch, bias = choose_no_split_k(rows, 4096, 96, False, gpu), torch.zeros(4096, dtype=torch.bfloat16)
            skinny_gemm(x, weight, launch, gpu, bias, rounds=True)
        gated_rows(x, weight, choose_no_split_k(rows, 4096, 96, True, gpu), gpu, rounds=True)

    aot_compile(launch)
    assert absent_gpu == [("_skinny_gemm_kernel", False)] * 5


@compiled_here
@pytest.mark.parametrize(("rows", "n", "t", "bound"), [(8, 16, 16, 131072), (1, 300, 0, 4000)])
def test_sparse_attention_compiles_for_a_gpu(absent_gpu, rows, n, t, bound):
    """A tree in a captured round, whose choice takes two launches, and a prefill, with GLM-5's sizes."""
    gpu, half, none = GpuTraits(132, True, 227 << 10), torch.bfloat16, torch.zeros(rows).long()
    pages, tail = (torch.zeros(*shape, 1, 1, 704, dtype=half) for shape in ((64,), (rows, t)))
    table = PageTable(FULL, torch.zeros((rows + 1, bound // 16 + 1), dtype=torch.int32))
    positions, mask = torch.zeros((rows, n), dtype=torch.int64), torch.ones(rows, n, t, dtype=torch.bool)
    tree = (positions, mask) if t else ()
    metadata = AttentionMetadata(Phase.VERIFY, table, none, none, bound, 16, positions, None, *tree)
    query = IndexQuery(torch.zeros(rows, n, 32, 128, dtype=half), torch.zeros(rows, n, 32), 2048)
    q = torch.zeros(rows, n, 64, 576, dtype=half)

    def launch():
        keys = choose_paged_keys(query, pages[:, 0, 0, 576:], metadata, tail[:, :, 0, 0, 576:] if t else None, gpu)
        narrowed = replace(metadata, chosen=keys, mask=keys.columns)
        latent_attention(q, pages[..., :576], narrowed, tail[..., :576] if t else None, 512, 1.0, gpu)

    aot_compile(launch)
    assert {name for name, _ in absent_gpu} >= {"_scores_kernel", "_select_kernel", "_latent_attention_kernel"}
    assert sum(name == "_select_kernel" for name, _ in absent_gpu) == (2 if bound > 16384 else 1)


def launch_a_round(ops):
    """Every operation that a fault may be inside of, on memory that nobody reads: only kernels are asked for."""
    shape, long = SpecShape(2, 3, 6), torch.int64
    tree = DraftTree(*torch.zeros((3, 1, 6), dtype=long), torch.zeros(1, 6, 6, dtype=torch.bool), torch.zeros(1, 6))
    places = PathPositions(torch.zeros(1, dtype=long), torch.zeros(1, 6, dtype=long), torch.zeros(1, 4, dtype=long))
    rows, wide = torch.zeros(1, dtype=long), torch.zeros(1, 4, dtype=long)
    draft = DraftState(torch.zeros(1, 2, dtype=long), torch.zeros(1, 2), torch.zeros(1, 8))
    identity = torch.eye(2, dtype=torch.bool)
    growth = sown_growth(shape, 1)
    frontier = ops.start(RowTables(rows, rows, rows, draft), rows, growth, tree, places, identity)
    ops.grow(
        growth, 0, frontier, Children(torch.zeros(1, 2, 2, dtype=long), torch.zeros(1, 2, 2), torch.zeros(1, 2, 8))
    )
    ops.select(growth, tree, places)
    ops.trim(
        tree, places, growth.chosen, rows, 1, FlatNodes(rows, rows, torch.zeros(4, dtype=long), growth.chosen.clone())
    )
    ops.top_logprobs(torch.zeros(1, 2, 40), 2, None, growth.row_inv_temp(0))
    accepted = Accepted(
        wide, rows, wide.clone(), rows.clone(), torch.zeros(1, dtype=torch.bool), torch.zeros(1, 6, dtype=long)
    )
    ops.accept(ops.greedy(torch.zeros(1, 6, 40)), tree, accepted, None)
    calibration = make_calibration(3, 2, lambda size, dtype: torch.zeros(size, dtype=dtype))
    ops.learn(calibration, growth, accepted, Observed(rows, 1, None, True))
    paths = Paths(rows, rows, rows, 4, accepted.path, 1)
    ops.commit(
        torch.zeros(1, 8, 2, 1, 4), torch.zeros(1, 1, 6, 2, 1, 4), torch.zeros(2, 2, dtype=torch.int32), 4, paths
    )
    ops.path_aux_hidden(torch.zeros(1, 4, 8), (torch.zeros(1, 6, 8),), accepted.path)


@compiled_here
def test_twin_kernels_compile_for_a_gpu_too(absent_gpu):
    """A fault inside a kernel is that kernel with other text, which the interpreter may accept and a compiler not."""
    ops = kernel_ops(torch.device("cpu"))
    aot_compile(lambda: launch_a_round(ops))
    shipped = Counter(kernel for kernel, _ in absent_gpu)
    for name, found in {**FAULTS, **POLICY_FAULTS}.items():
        inside = [each.target.rpartition(":")[2] for each in found.patches if each.target.endswith("_kernel")]
        if inside:
            with found.active():
                aot_compile(lambda: launch_a_round(ops))
            more = Counter(kernel for kernel, _ in absent_gpu) - shipped
            assert set(more) == set(inside), name
            shipped += more


@jit
def _wrong_kernel(x):  # tl has no such name
    tl.store(x, tl.there_is_no_such_thing)


@compiled_here
def test_after_a_kernel_that_does_not_compile_all_goes_on(absent_gpu):
    """Triton's own mode may stay on after an error; the next kernel is compiled and launches are launches."""
    x = torch.zeros(4)
    with pytest.raises(triton.CompilationError):
        aot_compile(lambda: _wrong_kernel[(1,)](x))
    aot_compile(lambda: _probe[(1,)](x))
    assert absent_gpu == [("_probe", False)]
    with pytest.raises(AttributeError):  # a launch: the GPU that is not here cannot be asked to load a kernel
        _probe[(1,)](x)


@compiled_here
@pytest.mark.usefixtures("absent_gpu")
def test_an_error_inside_does_not_wait_for_what_was_asked_for(monkeypatch):
    """With one compiler, which takes until the others are given up, the second kernel is never begun."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    begun, go_on = [], threading.Event()
    shutdown = triton_guard._Compilers.shutdown

    def compile_slowly(*_, **__):
        begun.append(None)
        assert go_on.wait(WAIT_S)

    def go_on_then(self, **asked):
        shutdown(self, wait=False, **asked)
        go_on.set()
        shutdown(self)

    monkeypatch.setattr(triton.compiler, "compile", compile_slowly)
    monkeypatch.setattr(triton_guard._Compilers, "shutdown", go_on_then)

    def inside():
        for warps in (1, 2, 4):
            _probe[(1,)](torch.zeros(4), num_warps=warps)
        until(lambda: begun)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        aot_compile(inside)
    assert len(begun) == 1


@pytest.fixture
def found(absent_gpu, monkeypatch, tmp_path):
    """An empty cache of kernels and one thread, with a process at once; whether each kernel was there when made."""
    seen = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(triton_guard, "_PAYS", 0)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **made: seen.append(made["cache_hit"]))
    return seen


def launch_probes():
    for warps in (1, 2, 4):
        _probe[(1,)](torch.zeros(4), num_warps=warps)


@compiled_here
def test_kernels_are_made_by_a_process_from_the_first_that_is_not_in_the_cache(found, monkeypatch):
    started = []
    monkeypatch.setattr(triton_guard, "CompileWorker", lambda: started.append(CompileWorker()) or started[-1])
    for hits in ([False, True, True], [True] * 3):
        aot_compile(launch_probes)
        assert found == hits
        assert len(started) == 1
        assert started[0]._process.poll() is not None
        found.clear()
        _probe.device_caches.clear()


@compiled_here
@pytest.mark.parametrize("fails", ["at its start", "by its death", "for a name that nobody imports"])
def test_what_no_process_makes_is_made_here(found, monkeypatch, fails):
    def worker():
        if fails == "at its start":
            raise OSError
        made = CompileWorker()
        if fails == "by its death":
            made._process.kill()
        return made

    monkeypatch.setattr(triton_guard, "CompileWorker", worker)
    if fails == "for a name that nobody imports":
        monkeypatch.setattr(triton_guard, "_probe", None)
    aot_compile(launch_probes)
    assert found == [False] * 3
    assert triton.knobs.compilation.listener(cache_hit=None) is None  # the one that was there


@compiled_here
def test_a_worker_compiles_for_a_card_that_is_not_here_with_helpers_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    worker, target = CompileWorker(), GPUTarget("cuda", 90, 32)
    with closing(worker):
        for kernel, made in ((_probe, True), (_wrong_kernel, False), (store_one, True), (_probe, True)):
            source = triton.compiler.ASTSource(kernel, {kernel.arg_names[0]: "*i32"})
            assert worker.compile(kernel, source, target, {"num_warps": 1}) == made
    assert list(tmp_path.glob("*/_probe.cubin"))
    assert list(tmp_path.glob("*/store_one.cubin")), "a kernel in Gluon is made as one"


@compiled_here
def test_kernels_in_gluon_are_asked_for_too(launches):
    """By what their descriptors copy, of which there may be several."""
    blocks = [swizzled_tiles(torch.zeros(8, 64), 4, width) for width in (8, 16)]

    def inside():
        for argument in (*blocks, *blocks):
            store_one[(1,)](argument)

    aot_compile(inside)
    assert [only_compiled for _, only_compiled in launches] == [True, True]


@pytest.mark.parametrize("gpu", [GpuTraits(132, True, 227 << 10), GpuTraits(40, False)])
def test_every_step_that_is_compiled_ahead_has_queries(gpu):
    """Any number of rows with any chunk, smaller ones too, down to one token: no launch is asked for an empty batch."""
    group = KVGroup(FULL, 1, KVFormat(2, 8, 128))
    for maximum, chunk in itertools.product((1, 2, 3, 7, 8, 64, 255, 256), (1, 2, 3, 7, 8, 63, 64, 255, 8192)):
        layout = Layout((SpecShape(4, 5, 16),), 16, maximum, 300, chunk, (group,), 4096)
        runner = SimpleNamespace(layout=layout, backend=SimpleNamespace(name="triton", capabilities=None))
        rows, width = worst_prefill(layout)
        assert 0 < rows * width <= chunk
        extents = EveryExtent(runner).extents
        assert {rows for rows, _, _ in extents} == {rows for rows in layout.buckets if rows <= chunk}
        for rows, width, bound in extents:
            assert 0 < width <= bound <= layout.max_committed
            assert 0 < rows * width <= chunk
            launch = choose_launch(CallShape(rows, width, 8, 4, 128, 2, bound, causal=True), gpu)
            assert launch.splits > 0


def test_inputs_of_a_step_begin_at_16_bytes_whatever_their_lengths():
    """Kernels tell aligned addresses from others: no step needs a kernel for an address that no step before had."""
    layout = Layout((PLAIN,), 4, 5, 40, 16, (KVGroup(FULL, 1, KVFormat(2, 1, 4)),), 400)
    staging = StagingBuffers(layout, torch.device("cpu"), partial(zeros_on, torch.device("cpu")), 1, ())
    rng = random.Random(0)
    for _ in range(50):
        parts = {name: [[rng.randrange(99)] * rng.randrange(6) for _ in range(3)] for name in ("edits", "chunks")}
        sent = staging.send(staging.take(), **parts)
        assert {name: [each.tolist() for each in columns] for name, columns in sent.items()} == parts
        assert all(each.data_ptr() % 16 == 0 for columns in sent.values() for each in columns if len(each))


def test_the_largest_inputs_of_a_step_fit():
    """A prefill of all rows, of odd lengths, each with text that a drafter reads."""
    layout = Layout((PLAIN,), 4, 5, 41, 15, (KVGroup(FULL, 1, KVFormat(2, 1, 4)),), 400)
    zeros, odd = partial(zeros_on, torch.device("cpu")), layout.max_requests
    setups = [RowSetup(Row(0), 0, SamplingParams(), 0)] * odd
    numbers = RowNumbers.make(layout.num_rows, zeros).columns(setups)
    widths = [odd, odd, *map(len, numbers), *[layout.max_context] * odd]
    staging = StagingBuffers(layout, torch.device("cpu"), zeros, 1, widths)
    ones, cells = [1] * layout.max_requests, [1] * layout.max_edits
    staging.send(
        staging.take(),
        rows=[ones],
        edits=[cells] * 3,
        setups=[[1] * width for width in widths],
        chunks=[ones, ones, [1] * layout.chunk, [1] * layout.chunk],
    )


def on_a_gpu_of(place):
    return OpContext(torch.device("cuda"), place.dtype, place.shapes)


class NoProduct:
    """Zeros in place of a library's product, which is most of what a rehearsal on a CPU would compute."""

    def __init__(self, weight, bias, calls):
        self._width = weight.shape[0]

    def __call__(self, x):
        return x.new_zeros(*x.shape[:-1], self._width)


@pytest.fixture
def as_if_on_a_gpu(absent_gpu, monkeypatch):
    """An engine on a CPU takes an H200's kernels, which are only compiled; what would be recorded runs on zeros.

    Small weights are compressed too.
    """
    monkeypatch.setattr(linear, "CpuProduct", NoProduct)
    traits = GpuTraits(num_sms=132, can_overlap=True, shared_bytes=227 << 10)
    monkeypatch.setattr(triton_guard, "interpreted", lambda: True)  # so tensors of a CPU are no obstacle
    for name, module in list(sys.modules.items()):
        if name.startswith("treetop.") and hasattr(module, "gpu_traits"):
            monkeypatch.setattr(module, "gpu_traits", lambda _: traits)
    monkeypatch.setattr(LoadContext, "ops", property(lambda place: Ops(on_a_gpu_of(place))))
    for name, real in (("empty", torch.empty), ("empty_like", torch.empty_like)):
        monkeypatch.setattr(torch, name, lambda *args, real=real, **options: real(*args, **options).zero_())
    monkeypatch.setattr(build, "captures", lambda *_: True)
    monkeypatch.setattr(build, "peak_bytes", lambda _: 0)
    monkeypatch.setattr(build, "self_test_acceptance", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("graph", "CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(lossless, "_WORTH_PARAMETERS", 0)
    lossless.offers.cache_clear()
    yield absent_gpu
    lossless.offers.cache_clear()


@compiled_here
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16", "compress_weights": True}, marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_compiles_all_that_an_engine_launches_on_a_gpu(as_if_on_a_gpu, monkeypatch, options):
    """For a GPU that is not here; what only large weights and libraries need is in other tests.

    Afterwards no prompt and no round of any kind waits for a compiler, however long the prompt is.
    """
    rehearsed = []
    monkeypatch.setattr(build, "compile_all", lambda runner: (rehearsed.append(runner), compile_all(runner)))
    config = EngineConfig.of(
        BUILTIN_MODEL,
        draft=BUILTIN_DRAFT,
        device="cpu",
        attention_backend="triton",
        graphs="sim",
        max_running_requests=2,
        context_length=512,
        speculative_calibration="learn",
        speculative_node_budget=20,
        **options,
    )
    made = []
    engine_plan = plan_engine(config)
    # The head norms its embedding, so a kernel runs while weights are loaded.
    aot_compile(lambda: made.append(build._without_pools(engine_plan, Products({}, {}))[0]))
    build._gpu_allowance(engine_plan, made[0], {})
    assert not any(by_itself for _, by_itself in as_if_on_a_gpu)
    names = {name for name, _ in as_if_on_a_gpu}
    of_ranks, of_latents = {"add_shares_rms_norm", "gather"}, {"write_latent", "latent_attention"}
    of_latents |= {"rotate_index_heads", "write_index_keys", "paged_index_scores", "choose_by_scores"}
    of_latents |= {"segment_latents", "prefill_latents", "heads_rows"}
    of_others = {"plan_segments", "segment_attention", "segment_prefill"}
    of_others |= {"gather_table", "tail_and_merge", "route", "experts", "pack", "unpack", *of_ranks, *of_latents}
    of_others |= {
        "quantized_gemm",
        "quantized_gated",
        "decode_tiles",
        "quantize_rows",
        "fp8_rows",
        "add_rms_norm_codes",
    }
    if options["dtype"] == "float32":
        of_others |= {"join"}  # of products cut over k
    of_others |= {"tile_rows", "shrink", "expand", "expand_gated"}  # of --lora-modules
    of_others |= {name for name, op in operations().items() if "kernels.recurrent" in op.reference.__module__}
    of_others |= {"say_roots", "say_level", "choose_drawn"}  # of --simulate-acceptance
    context = on_a_gpu_of(engine_plan.place)
    used = [op for name, op in operations().items() if op.applies(context) and name not in of_others]
    assert names == {kernel.fn.__name__ for op in used for kernel in op.launches}
    asked = len(as_if_on_a_gpu)
    build._gpu_allowance(engine_plan, made[0], {})
    assert len(as_if_on_a_gpu) == asked
    aot_compile(lambda: any_steps(rehearsed[0], random.Random(0)))
    assert as_if_on_a_gpu[asked:] == []


@torch.inference_mode()
def any_steps(runner, rng):
    layout = runner.layout
    for _ in range(60 if EVERYTHING else 20):
        rows, choice = rng.choice(layout.buckets), rng.choice([*SamplingMode])
        width = min(int(2 ** rng.uniform(0, 10)), layout.chunk // rows)
        maximum = min(width + int(2 ** rng.uniform(0, 11)), layout.max_committed)
        dummies = runner.buffers.rows.new_full((rows,), layout.dummy_row)
        none = dummies.new_zeros(rows)
        prefill(
            runner,
            PrefillBatch(
                dummies, dummies, none, dummies.new_zeros((rows, width)), none, none - 1, dummies, maximum, choice
            ),
        )
        block = rng.choice(layout.prefill_blocks)
        blocks = rng.randint(1, layout.chunk // block)
        numbers = block_numbers([], blocks * block, block, layout.dummy_row)
        lines = block_lines(dummies.new_tensor(numbers), blocks * block, block)
        ends = {"num_ends": min(rows, blocks), "ends_prompts": rng.random() < 0.7}
        if choice is not SamplingMode.LOGPROBS:
            prefill(runner, PrefillBatch(*lines, maximum, choice, **ends))
        run_phases(runner, RoundKey(rows, rng.choice(layout.shapes), choice), layout.max_committed)
        if choice not in (SamplingMode.PROCESS, SamplingMode.LOGPROBS):  # which are not captured
            run_phases(runner, RoundKey.of_prompts(*rng.choice(layout.prefill_sizes), choice), layout.max_committed)


@pytest.mark.parametrize(("able", "captured", "rehearsed"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_who_rehearses(monkeypatch, able, captured, rehearsed):
    """Engines that capture, on a backend whose first call may be recorded."""
    first = [name for name, each in BACKENDS.items() if each.capabilities.captures_first_call]
    assert first == ["triton", "segments", "fa3", "gluon"]
    engine, asked = LLM(device="cpu", max_running_requests=2).engine, []
    backend = SimpleNamespace(capabilities=replace(BACKENDS["triton"].capabilities, captures_first_call=able))
    monkeypatch.setattr(build, "captures", lambda *_: captured)
    monkeypatch.setattr(build, "peak_bytes", lambda _: 0)
    monkeypatch.setattr(build, "self_test_acceptance", lambda _: None)
    monkeypatch.setattr(build, "compile_all", asked.append)
    build._gpu_allowance(plan_engine(engine.config), replace(engine.runner, backend=backend), {})
    assert len(asked) == rehearsed


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_engine_compiles_everything_ahead(compilations, dtype):
    """Neither the worst steps nor the captures of a start compile anything themselves; then the engine works."""
    llm = LLM(dtype=dtype, max_running_requests=4, speculative_policy="fixed")
    assert isinstance(llm.engine.launcher, CudaGraphs)
    here = [by_itself for _, by_itself in compilations]
    ahead = here.index(False)  # loading weights runs a kernel before
    assert here[ahead:].count(False) > 10
    assert [name for name, by_itself in compilations[ahead:] if by_itself] == []
    outputs = llm.generate(["def area(radius):"] * 3, greedy(20))
    assert len(set(map(tuple, tokens(outputs)))) == 1
    llm.scheduler.check_integrity()


@on_a_gpu
def test_steps_are_recorded_and_do_not_run():
    """No value changes, and no memory is left taken."""
    x, capturing = torch.zeros(4, device="cuda"), []

    def step():
        capturing.append(torch.cuda.is_current_stream_capturing())
        x.copy_(torch.ones(1 << 20, device="cuda")[:4])

    compile_steps([step])
    gc.collect()
    before = torch.cuda.memory_allocated()
    compile_steps([step, step])
    assert capturing == [True] * 3
    assert x.tolist() == [0, 0, 0, 0]
    assert torch.cuda.memory_allocated() == before
