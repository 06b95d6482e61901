"""Gluon if it is there: Triton's language of explicit layouts, barriers and bulk copies, by names for 3.6 and 3.9.

Kernels take `gluon_jit`, `gl` and what Hopper adds from here. Without Gluon they are plain functions that nothing can
launch, and `why_no_gluon` says so before anything tries. No interpreter runs it: each such kernel stands beside one in
plain Triton, and is shown to be right on a GPU alone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from treetop.kernels.triton_guard import TRITON_VERSION, interpreted

if TYPE_CHECKING:
    gl: Any
    mbarrier: Any
    async_load: Any
    async_gather: Any
    block_barrier: Any
    fence_async_shared: Any
    gather_commit: Any
    gather_wait: Any
    mma_v2: Any
    warpgroup_mma: Any
    warpgroup_mma_init: Any
    warpgroup_mma_wait: Any
    GLUON_PROBLEM: str | None

    def gluon_jit(kernel: Callable[..., object]) -> Any:
        """Compile a kernel or a piece of one at its first launch."""

    def gluon_jit_for_any(*sizes: str) -> Callable[[Callable[..., object]], Any]:
        """As `gluon_jit`, with no kernel of its own for a size of 1 or a multiple of 16. sizes: names of arguments."""

    def swizzled_tiles(matrix: torch.Tensor, rows: int, columns: int) -> Any:
        """A descriptor by which a kernel loads blocks of a matrix that is dense in its last dimension.

        In shared memory their rows of 128 bytes, or fewer, are swizzled, as wgmma reads them."""
else:
    try:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon._runtime import GluonJITFunction
        from triton.experimental.gluon.language.nvidia.ampere import mma_v2
        from triton.experimental.gluon.language.nvidia.hopper import (
            async_copy,
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_init,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from treetop.kernels.triton_guard import AheadKernel

        # Of each pair the first is 3.9's name, and the second 3.6's.
        async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
        block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
        gathers = hasattr(async_copy, "async_load")
        async_gather = async_copy.async_load if gathers else async_copy.async_copy_global_to_shared
        gather_commit, gather_wait = async_copy.commit_group, async_copy.wait_group
        GLUON_PROBLEM = None

        class _GluonKernel(AheadKernel, GluonJITFunction):
            pass

        def gluon_jit(kernel):
            """Compile a kernel or a piece of one at its first launch."""
            return _GluonKernel(kernel)

        def gluon_jit_for_any(*sizes):
            """As `gluon_jit`, with no kernel of its own for a size of 1 or of a multiple of 16."""
            return lambda kernel: _GluonKernel(kernel, do_not_specialize=sizes)

        def swizzled_tiles(matrix, rows, columns):
            """A descriptor by which a kernel loads blocks into rows of 128 bytes that are swizzled, as wgmma reads."""
            size = matrix.element_size()
            layout = gl.NVMMASharedLayout(min(128, size * columns), 8 * size, rank=2)
            return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
    except (ImportError, AttributeError) as error:
        GLUON_PROBLEM = f"this Triton ({TRITON_VERSION}) has no Gluon that its kernels know: {error}"

        class _NoGluon:
            """Stands for Gluon's names, where annotations alone need them."""

            constexpr = object

        def gluon_jit(kernel):
            """Leave the function as it is."""
            return kernel

        def gluon_jit_for_any(*sizes):
            """Leave the function as it is."""
            return gluon_jit

        gl, mbarrier, swizzled_tiles = _NoGluon(), None, None
        async_load = async_gather = gather_commit = gather_wait = block_barrier = fence_async_shared = None
        mma_v2 = None
        warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None


def why_no_gluon(device: torch.device) -> str | None:
    """Why kernels in Gluon cannot run where Triton's can; None if they can."""
    return "Triton's interpreter runs no Gluon" if interpreted() else GLUON_PROBLEM
