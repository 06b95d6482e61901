"""The vectorised functions of a CPU's library, called once by one thread before several call them at a time.

MKL's get ready at their first call in a process, without a lock: a thread that comes while another's is under way may
have its numbers from code of 12 bits, once. On an Intel Xeon (family 6, model 207, PyTorch 2.13) a first `exp` of
70,001 numbers by two threads had one of its halves so, wrong by up to 1.5e-4, in 24 of 2,100 new processes; behind an
`exp` of three numbers it had in none of 2,100. `log`, and `exp` in float64 (3e-9), were seen to do the same. PyTorch
divides among threads what has more than 32,768 numbers.
"""

import threading
from functools import cache

import torch

_FUNCTIONS = ("exp", "expm1", "log", "log1p", "log2", "tanh", "sin", "cos", "erf", "sqrt", "rsqrt")
_LOCK = threading.Lock()
"""For engines that several threads start."""


def call_once_alone() -> None:
    """Call each function on a few numbers, in float32 and float64, which one thread does.

    MKL takes its mode at a process's first call of any kind, so that is chosen before (`exact.mkl_mode`).
    """
    with _LOCK:
        _call_all()


@cache
def _call_all() -> None:
    for few in (torch.ones(8), torch.ones(8, dtype=torch.float64)):
        for name in _FUNCTIONS:
            getattr(torch, name)(few)
