"""Launches that overlap: a kernel starts while the one before it still runs, and waits for it by itself.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch"; PTX ISA, `griddepcontrol`.
"""

from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl


def launch_options(gpu: GpuTraits) -> dict[str, bool]:
    """Options of a launch whose kernel waits for the one before it by itself."""
    return {"launch_pdl": True} if gpu.can_overlap else {}


@jit
def pdl_wait(overlap: constexpr, early: constexpr = False) -> None:
    """A kernel's turn in a chain of launches that overlap: wait for the one before, and let the next one start.

    Every such kernel calls it before it reads anything but constants. The next kernel starts, and waits in its turn,
    once all programs of this one have let it: `early`, before this one's own wait, or after it. Early hides all of a
    launch; but programs that come while a product still fills most multiprocessors crowd on the few that have room.
    """
    if overlap:
        if early:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not early:
            tl.extra.cuda.gdc_launch_dependents()


@jit
def ask_for(at: Arg) -> None:
    """Bring the cache lines at `at` into the L2 cache, without waiting; before a kernel's turn such as it will likely
    read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
