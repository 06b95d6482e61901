"""Where kernels are tested: Triton decides at import whether it interprets, so that is a session of its own.

`make interpreted` starts it, and `make test` does beside everything else. In any other session on a machine without a
GPU the tests marked here are skipped.
"""

import importlib.util
import inspect
import os
from functools import cache, wraps

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this session interprets kernels."""
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
"""Where kernels of tests `on_gpu_or_interpreted` run."""
COMMAND = "TRITON_INTERPRET=1 python -m pytest -m interpreted tests/kernels"

interpreted = pytest.mark.interpreted
"""A test that needs kernels on a CPU."""
on_gpu_or_interpreted = pytest.mark.skipif(False, reason="") if ON_GPU else interpreted
"""A test, or a case of one, that needs kernels: it runs on a GPU where there is one, and in the interpreter."""
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
"""What the interpreter cannot show."""


@cache
def why_not_interpreted() -> str | None:
    """Why this session cannot run tests that are marked `interpreted`; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; its interpreter runs on any CPU"
    return None if INTERPRETED else f"in Triton's interpreter: `make interpreted`, or {COMMAND}"


def patched_places() -> list[object]:
    """Modules and classes whose functions the interpreter puts its own in the place of while a kernel runs."""
    from triton import language as tl

    return [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base]


def patch_without_search() -> None:
    """Make Triton's interpreter look once for what it replaces.

    It does so at each launch and at each call of a device function, among all members of these places, which is half
    of the time of small kernels. What is replaced, by what and for how long stays as it is.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    def builtins_of(place):
        return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]

    known, search = {place: builtins_of(place) for place in patched_places()}, interpreter._patch_builtin

    @wraps(search)
    def patch(place, *more):
        if place not in known:
            return search(place, *more)
        for name in known[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):  # not replaced already, by the kernel that calls this function
                interpreter._patch_attr(place, name, member, *more)
        return None

    interpreter._patch_builtin = patch
