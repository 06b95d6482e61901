"""On a GPU with `--exactness bits`: which products with a target's weights the library may take, probed at a start.

Kept for later starts, for nothing but machine, libraries and kernels decides (`weights.gpu_products`).
"""

import hashlib
import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import treetop.kernels
from treetop.kernels.gemm.skinny_gemm import choose_no_split_k
from treetop.kernels.triton_guard import TRITON_VERSION, gpu_traits
from treetop.types.cache_files import cache_file, keep, kept
from treetop.types.errors import ConfigError
from treetop.weights.cpu_products import Shape
from treetop.weights.format import ProductWeight
from treetop.weights.gpu_products import Probed, forbid_split_k, probe
from treetop.weights.plain import UNQUANTIZED


def probed_products(weights: list[ProductWeight], dtype: torch.dtype, device: torch.device) -> dict[Shape, Probed]:
    """What is found of each shape of plain weights. Raises ConfigError where our own kernel's bits are not a row's."""
    forbid_split_k()
    gated = dict[Shape, bool]()
    for each in weights:
        if each.format == UNQUANTIZED:
            gated[each.shape] = gated.get(each.shape, False) or each.gated
    found = {shape: _probed(shape, with_gate, dtype, device) for shape, with_gate in sorted(gated.items())}
    torch.cuda.empty_cache()
    return found


@cache
def _probed(shape: Shape, gated: bool, dtype: torch.dtype, device: torch.device) -> Probed:
    file = cache_file("exact-products", identity(device, shape, gated, str(dtype)))
    known = _read(file)
    if known is not None and known.shape == shape:
        return known
    if choose_no_split_k(1, *shape, gated, gpu_traits(device)) is None:
        raise ConfigError(
            f"--exactness bits: on a GPU no product with a weight [{shape[0]}, {shape[1]}] is exact, whose rows are no"
            " multiple of 16; use --exactness ties"
        )
    found, problem = probe(shape, gated, dtype, device)
    if problem is not None:
        raise ConfigError(
            f"--exactness bits: on this machine the bits of {problem} depend on the batch; use --exactness ties"
        )
    keep(file, json.dumps({"shape": found.shape, "counts": found.counts, "ordered": found.ordered}))
    return found


def _read(file: Path) -> Probed | None:
    """None for a file that is not there or is none of ours."""
    try:
        held = kept(file)
        n, k = (int(each) for each in held["shape"])
        return Probed((n, k), tuple(int(each) for each in held["counts"]), bool(held["ordered"]))
    except (ValueError, LookupError, TypeError, OverflowError):
        return None


def identity(device: torch.device, *what: object) -> str:
    """Of all that bits of an operation may depend on: GPU, driver, libraries, our kernels, and what is probed."""
    driver = Path("/proc/driver/nvidia/version")
    words = (
        *(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)),
        *(driver.read_text() if driver.is_file() else "", torch.__version__, torch.version.cuda, TRITON_VERSION),
        *(_cublas(), _kernels(), *what),
    )
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]


def _cublas() -> list[str]:
    """Versions of the packages that may hold it."""
    found = []
    for name in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


@cache
def _kernels() -> str:
    """Of the text of all kernels, of what calls them, and of what probes them."""
    text = hashlib.sha256()
    kernels = Path(treetop.kernels.__path__[0])
    for folder in (kernels, kernels.parent / "weights", kernels.parent / "exact"):
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            text.update(file.read_bytes())
    return text.hexdigest()
