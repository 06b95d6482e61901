"""Where kernels are tested: Triton decides at import whether it interprets, so that is a session of its own.

`make interpreted` starts it, and `make test` does after everything else. In any other session on a machine without a
GPU the tests marked here are skipped.
"""

import importlib.util
import os
from functools import cache

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
