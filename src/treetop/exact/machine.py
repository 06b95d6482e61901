"""What is found once on a machine of what bits on its CPU depend on, and then holds for every start there.

Two starts, and two processes of one, must not come to other bits because one had another time to look.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from treetop.exact.mkl_mode import mode_in_force
from treetop.types.cache_files import cache_file, keep_first, kept

_LIBRARIES = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_")
"""Variables whose names begin so choose a library's instructions."""
_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
"""Of /proc/cpuinfo, on x86 and on ARM."""
_SOURCES = (
    *("exact", "kernels/exact.py", "weights/cpu_products.py", "weights/float16_products.py"),
    *("attention/exact_backend.py", "attention/exact_layout.py", "engine/startup/mkl_probe.py"),
)


def found_once(kind: str, made_for: object, find: Callable[[], Any]) -> Any:
    """What `find` gives, JSON, or what it gave the first time for this CPU, these libraries and `made_for`.

    kind: of the cache's folders. None is not kept: then the next start finds it out again.
    """
    words = repr((*_machine(), mode_in_force(), _settings(), made_for))
    file = cache_file(kind, hashlib.sha256(words.encode()).hexdigest()[:32])
    known = kept(file)
    if known is not None:
        return known
    found = find()
    return None if found is None else keep_first(file, json.dumps(found))


def cpu_model() -> str:
    """As the system names it."""
    found = dict(_cpu())
    named = found.get("model name") or " ".join(found[each] for each in _LINES[3:] if each in found)
    return named or platform.processor() or platform.machine()


@cache
def _machine() -> tuple[object, ...]:
    """CPU, libraries, and the text of what probes and of what is probed."""
    text, root = hashlib.sha256(), Path(__file__).parents[1]
    for place in (root / name for name in _SOURCES):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text.update(file.read_bytes())
    return platform.machine(), _cpu(), torch.__version__, torch.__config__.show(), text.hexdigest()


@cache
def _cpu() -> tuple[tuple[str, str], ...]:
    """The lines on the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ()
    pairs = (line.partition(":") for line in lines)
    return tuple((name.strip(), value.strip()) for name, _, value in pairs if name.strip() in _LINES)


def _settings() -> list[tuple[str, str]]:
    return sorted(each for each in os.environ.items() if each[0].startswith(_LIBRARIES))
