"""The mode of MKL in which its float32 products do not depend on the batch, for `--exactness bits`.

Its own mode is the fastest. Only where bits depend on the batch in that, and do not in its strict mode, is the latter
chosen. MKL takes it from a variable at its first call of any kind, or from a call before that.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

VARIABLE, MODE = "MKL_CBWR", "AUTO,STRICT"
_AUTO_STRICT = 2 | 0x10000
"""That mode as a number (MKL_CBWR_AUTO, MKL_CBWR_STRICT of mkl_types.h)."""
_ALL = -1
"""Of a mode, its branch and its strictness (MKL_CBWR_ALL)."""

Suffices = Callable[[str | None], bool | None]
"""Whether no bit depends on the batch in a new process with this mode, None for MKL's own. None: none could be had."""


@cache
def choose_mode(suffices: Suffices) -> str | None:
    """Choose the mode for this process and, by the environment, its children, unless the user has chosen one.

    Whether it came in time shows in the probes. Returns what is said at start, None where nothing is chosen.
    """
    if not torch.backends.mkl.is_available():
        return None
    if _given() is None:
        if not needs_another(suffices) or not suffices(MODE):
            return None
        os.environ[VARIABLE] = MODE
        # of another build it is None: there MKL's first call reads the variable
        answer = _asked("mkl_serv_cbwr_set", _AUTO_STRICT)
        logging.getLogger("treetop").debug("%s=%s: MKL answers %s", VARIABLE, MODE, answer)
    return f"sums of MKL by {VARIABLE}={os.environ[VARIABLE]}"


@cache
def needs_another(suffices: Suffices) -> bool:
    """Whether bits depend on the batch in MKL's own mode, whatever mode this process has."""
    return torch.backends.mkl.is_available() and suffices(None) is False


def mode_in_force() -> int | None:
    """MKL's number of the mode that this process has, None where that cannot be asked."""
    return _asked("mkl_serv_cbwr_get", _ALL)


def _asked(function: str, number: int) -> int | None:
    if not torch.backends.mkl.is_available():
        return None
    try:
        answer: int = getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), function)(
            number
        )
    except (OSError, AttributeError):
        return None
    return answer


def remedy(suffices: Suffices) -> str | None:
    """What helps where a probe fails in spite of it: MKL was called before, or runs in another mode of the user's.

    None where the process has the strict mode, or that is no help: then nothing is left to try.
    """
    given = _given()
    if not torch.backends.mkl.is_available() or given == MODE or (given is None and mode_in_force() == _AUTO_STRICT):
        return None
    if given is not None and suffices(None):
        return f"start the process without {VARIABLE} in its environment, for MKL's own mode is enough"
    if suffices(MODE) is False:
        return None
    return f"start the process with {VARIABLE}={MODE} in its environment, for MKL's mode is fixed by its first call"


@cache
def _given() -> str | None:
    """The user's own mode, from before `choose_mode` looked."""
    return os.environ.get(VARIABLE)
