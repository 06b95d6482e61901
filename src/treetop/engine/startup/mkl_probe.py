"""Whether bits on a CPU depend on the batch in one of MKL's modes, found once a machine.

A process has one mode, from its first product on. So another one is asked; as a module this is that process. Heads and
weights are of usual sizes: an engine probes those that it has itself.
"""

import json
import logging
import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from treetop.attention.exact_backend import problem
from treetop.exact.machine import found_once
from treetop.exact.mkl_mode import VARIABLE
from treetop.kernels.exact import elementwise_problem
from treetop.weights.cpu_products import without_exact_call

_HEADS = ((16, None), (64, None), (128, None), (192, 128))
"""Numbers of a key, and of a value where these are fewer."""
_WEIGHTS = ((768, 512), (512, 1216))
_PATIENCE_S = 300.0


def suffices(mode: str | None) -> bool | None:
    """Whether nothing depends on the batch with `MKL_CBWR` so, None for MKL's own mode. None: no process could be had,
    or it did not end well; that is not kept."""
    threads = torch.get_num_threads()
    found = found_once("mkl-modes", (mode, threads, _HEADS, _WEIGHTS), partial(_asked, mode, threads))
    return None if found is None else not found


def _asked(mode: str | None, threads: int) -> Any:
    """What depends on the batch, "" for nothing; None as above."""
    log, setting = logging.getLogger("treetop"), f"{VARIABLE}={mode or ''}"
    if not sys.executable or getattr(sys, "frozen", False):  # an application's own executable would start it again
        log.warning("whether bits depend on the batch with %s was not found: there is no interpreter to ask", setting)
        return None
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
    environment |= {} if mode is None else {VARIABLE: mode}
    command = [sys.executable, "-P", "-m", __name__, str(threads)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", None) or "").strip().splitlines()
        log.warning(
            "whether bits depend on the batch with %s was not found: %s", setting, "; ".join([str(error), *told[-1:]])
        )
        return None
    log.debug("%s: what depends on the batch: %s", setting, found or "nothing")
    return found


def _problem(threads: int) -> str:
    """What depends on the batch in this process, "" for nothing."""
    found = elementwise_problem(threads) or next((each for h in _HEADS if (each := problem(h[0], threads, h[1]))), None)
    if found is not None:
        return found
    shape = without_exact_call(_WEIGHTS, "auto")
    return "" if shape is None else f"a product with a weight {list(shape)}"


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(json.dumps(_problem(torch.get_num_threads())))
