"""Triton if it is there: kernel modules import, and their references run, on builds of PyTorch without it.

Kernels take `jit` or `jit_for_any`, `tl`, `constexpr` (a compile-time argument) and `Arg` (any other argument) from
here. Without Triton a kernel is a plain function that nothing can launch, and `why_not` says so before anything tries.
A kernel is compiled when it is first launched, or ahead of that, with others, inside `aot_compile`.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treetop.kernels.compile_worker import CompileWorker
from treetop.kernels.garbage import no_collection

_asked: ContextVar[set[object] | None] = ContextVar("asked", default=None)
"""Inside `aot_compile`: the kernels and kinds of arguments asked for so far."""
_compilers: ContextVar["_Compilers | None"] = ContextVar("compilers", default=None)
"""Of a thread that makes kernels for `aot_compile`."""
_MAX_COMPILERS, _MAX_WORKERS = 32, 16
"""Threads, each of which may run an assembler, and processes, each of which has PyTorch in its memory: the ranks of a
host have as many of their own."""
_PAYS = 4
"""Kernels that wait for each process that is there, from which on another one pays: it takes seconds to start."""

if TYPE_CHECKING:
    TRITON_VERSION: str | None
    Arg = Any
    constexpr = Any
    tl: Any
    triton: Any

    def jit(kernel: Callable[..., object]) -> Any:
        """Compile `kernel` at its first launch."""

    def jit_for_any(*sizes: str) -> Callable[[Callable[..., object]], Any]:
        """As `jit`, with no kernel of its own for a size of 1 or of a multiple of 16. sizes: names of arguments."""

    def tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> Any:
        """A descriptor by which a kernel loads blocks of a contiguous matrix; a block past its edge reads 0 there."""
else:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        Arg, constexpr = tl.tensor, tl.constexpr
        TRITON_VERSION = triton.__version__

        class AheadKernel:
            """What of a kernel knows `aot_compile`, whichever of Triton's languages it is written in."""

            def run(self, *args, grid, warmup, **options):
                """Compile if that has not been done, and launch; inside `aot_compile` ask for a kernel once."""
                options.setdefault("enable_fp_fusion", True)  # the default up to 3.9, which warns that it will change
                asked = _asked.get()
                if asked is None:
                    return super().run(*args, grid=grid, warmup=warmup, **options)
                call = (self, *map(_kind, args), *options.items())
                if call not in asked:
                    asked.add(call)
                    super().run(*args, grid=grid, warmup=True, **options)
                return None

            def create_binder(self):
                """As Triton does, whose `compile` it sets here; what is made ahead is made elsewhere first."""
                made, compiled_here = super().create_binder(), self.compile

                def compiled(source, target=None, options=None, **rest):
                    if (compilers := _compilers.get()) is not None:
                        compilers.prepare(self, source, target, options)
                    return compiled_here(source, target=target, options=options, **rest)

                self.compile = compiled
                return made

        class _Kernel(AheadKernel, triton.JITFunction):
            pass

        def _kind(argument):
            """Equal only for arguments that share a kernel; integers go by value, so some are asked for twice."""
            if isinstance(argument, torch.Tensor):
                return argument.dtype, argument.data_ptr() % 16
            if hasattr(argument, "block_shape"):  # a descriptor, Gluon's or Triton's
                return type(argument), argument.base.dtype, *argument.block_shape
            return argument

        def jit(kernel):
            """Compile `kernel` at its first launch; in the interpreter never."""
            return jit_for_any()(kernel)

        def jit_for_any(*sizes):
            """As `jit`, with no kernel of its own for a size of 1 or of a multiple of 16. sizes: names of arguments."""
            make = triton.jit if triton.knobs.runtime.interpret else _Kernel
            return lambda kernel: make(kernel, do_not_specialize=sizes)

        def tiles_of(matrix, rows, columns):
            """A descriptor by which a kernel loads blocks of a contiguous matrix."""
            return TensorDescriptor.from_tensor(matrix, [rows, columns])
    except ImportError:

        class _Missing:
            """Stands for `triton.language` where only names are needed."""

            tensor = constexpr = object

        def jit(kernel):
            """Leave the function as it is."""
            return kernel

        def jit_for_any(*sizes):
            """Leave the function as it is."""
            return jit

        def constexpr(value):
            """A constant that kernels read, as it is."""
            return value

        tl, Arg, tiles_of = _Missing(), object, None
        TRITON_VERSION = None


@jit
def _probe(out: Arg) -> None:
    tl.store(out, 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before import), on tensors of any device."""
    return type(_probe).__name__ == "InterpretedFunction"


def why_not(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of `device`; None if they can."""
    if TRITON_VERSION is None:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton kernels need a CUDA device, this engine runs on {device.type}"
    return None


def is_compiling_ahead() -> bool:
    """Whether this thread is inside `aot_compile`, where nothing is launched."""
    return _asked.get() is not None


def aot_compile(run: Callable[[], None]) -> None:
    """Call `run`, whose launches only ask for their kernels, and compile these on all cores of the process at once.

    Raises what `run` raises, without waiting for what it asked for, and the error of a kernel that does not compile.
    Nothing is collected meanwhile: a graph that is freed while another is recorded spoils that, and Python before
    3.11.8 cannot parse in two threads if a collection comes between (gh-106905).
    """
    with no_collection():
        copy_context().run(_aot_compile, run)  # Triton's mode and ours end with the context, however this ends


def _aot_compile(run: Callable[[], None]) -> None:
    _asked.set(set())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = _Compilers(min(cores, _MAX_COMPILERS))
    mode = triton.AsyncCompileMode(pool)
    try:
        mode.__enter__()
        run()
        mode.__exit__(None, None, None)  # waits for the compilers; not after an error
    finally:
        pool.close()


class _Compilers(ThreadPoolExecutor):
    """Threads that make kernels, each with a process that compiles them once that pays.

    Threads alone load what is in Triton's cache. A process puts kernels there; whatever it did, the thread then makes
    the kernel as if there were none.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._of_thread, self._lock = threading.local(), threading.Lock()
        self._workers = list[CompileWorker]()
        self._waiting = 0
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self._listen
        self._missed = False
        """Whether a kernel was not in the cache."""

    def submit(self, make: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]  # nothing else is asked
        """Begin to make a kernel. What is built for its launches goes into Triton's cache on disk."""
        with self._lock:
            self._waiting += 1
        return super().submit(self._make, make)

    def _make(self, make: Callable[[], Any]) -> Any:
        """Triton 3.6 has C code compiled that passes arguments."""
        with self._lock:
            self._waiting -= 1
        _compilers.set(self)
        kernel = make()
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def prepare(self, kernel: Any, source: Any, target: object, options: Mapping[str, Any]) -> None:
        """Put a kernel that is about to be made into the cache, if this thread has a process or one pays."""
        worker = self._worker()
        if worker is not None:
            worker.compile(kernel, source, target, options)

    def _worker(self) -> CompileWorker | None:
        """Of this thread, which has one at most, ever."""
        if not hasattr(self._of_thread, "worker"):
            with self._lock, suppress(OSError):
                count = len(self._workers)
                if not self._missed or count == _MAX_WORKERS or self._waiting < _PAYS * (count + 1):
                    return None
                self._of_thread.worker = None
                self._workers.append(CompileWorker())
                self._of_thread.worker = self._workers[-1]
        worker: CompileWorker | None = getattr(self._of_thread, "worker", None)
        return worker

    def _listen(self, **compiled: Any) -> None:
        self._missed |= not compiled["cache_hit"]
        if self._before is not None:
            self._before(**compiled)

    def close(self) -> None:
        """What has not begun is not made."""
        self.shutdown(cancel_futures=True)
        triton.knobs.compilation.listener = self._before
        for worker in self._workers:
            worker.close()


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """What launches depend on.

    can_overlap: programmatic dependent launch and tile descriptors, compute capability 9.0 and later.
    shared_bytes: shared memory that one program may use.
    has_bfloat16: arithmetic of two bfloat16s at once, compute capability 8.0 and later.
    has_tensor_memory: products keep their sums in a memory of their own (tcgen05), compute capabilities 10.x and 11.0.
    """

    num_sms: int
    can_overlap: bool
    shared_bytes: int = 48 << 10
    has_bfloat16: bool = False
    has_tensor_memory: bool = False

    @property
    def by_warp_groups(self) -> bool:
        """Whether tensor cores multiply for four warps at once and read operands from shared memory (wgmma, tcgen05).

        Those GPUs, compute capabilities 9.0, 10.x and 11.0, are the ones with 227 KiB. Elsewhere each warp multiplies
        for itself, with operands in registers.
        """
        return self.shared_bytes >= 227 << 10


def gpu_traits(device: torch.device) -> GpuTraits:
    """Traits of `device`; a small stand-in for the interpreter on a CPU."""
    if device.type != "cuda":
        return GpuTraits(num_sms=8, can_overlap=False)
    properties = torch.cuda.get_device_properties(device)
    can_overlap = torch.version.hip is None and properties.major >= 9 and not interpreted()
    shared_bytes = getattr(
        properties, "shared_memory_per_block_optin", 99 << 10
    )  # what the smallest of today's GPUs has
    has_bfloat16 = torch.version.hip is None and properties.major >= 8 and not interpreted()
    has_tensor_memory = has_bfloat16 and properties.major in (10, 11)
    return GpuTraits(properties.multi_processor_count, can_overlap, shared_bytes, has_bfloat16, has_tensor_memory)


def power_of_two(x: int) -> int:
    """The smallest power of two that is not below x; 1 for 0."""
    return 1 << max(x - 1, 0).bit_length()


def lanes(x: int) -> int:
    """Lanes of a block that holds x elements: a power of two, and no block of a single lane."""
    return power_of_two(max(x, 2))
