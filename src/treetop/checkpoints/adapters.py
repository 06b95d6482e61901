"""Adapters in memory: tables of the device with a slot for each, and on the host what may be put into one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from treetop.checkpoints.checkpoint import all_finite
from treetop.checkpoints.lora_folder import LoraFolder, adaptable_modules, is_adaptable
from treetop.checkpoints.params import Param
from treetop.kernels.gemm.adapter_rows import AdapterFactors
from treetop.types.errors import CheckpointError, ConfigError
from treetop.weights.adapted import Adapters
from treetop.weights.format import CheckpointTensor

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
HostFactors = Mapping[str, tuple[Tensor, Tensor]]
"""Of one adapter, as they lie in a slot: a and b by the product's parameter, of those that it changes."""


def make_adapters(
    modules: Iterable[str], rank: int, slots: int, params: Iterable[Param], rows: int, dtype: torch.dtype, zeros: Zeros
) -> Adapters:
    """Tables of zeros for so many adapters of these modules, of this rank at most, and for none in slot 0.

    params: a rank's own. rows: of the largest batch.
    """
    factors, changed = dict[str, AdapterFactors](), set(modules)
    for param in _changed(params, changed):
        (out, width), ends = param.shape, tuple(accumulate(_rows(param, source) for source in param.sources))
        a, b = zeros((slots + 1, rank * len(ends), width), dtype), zeros((slots + 1, out, rank), dtype)
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=a.device)
        factors[param.name] = AdapterFactors(a, b, ends, bounds)
    return Adapters(factors, slots + 1, zeros((rows,), torch.int64), zeros((5, rows), torch.int32))


def modules_for(folders: Sequence[LoraFolder], params: Sequence[Param], any_later: bool) -> set[str]:
    """Modules that there must be tables for: those of folders, or all that adapters may be beside."""
    return adaptable_modules(params) if any_later else {module for folder in folders for module in folder.modules}


def read_factors(adapters: Adapters, folder: LoraFolder, params: Iterable[Param], pinned: bool) -> HostFactors:
    """What a folder puts into a slot. params: a rank's own. pinned: a GPU copies it.

    Raises CheckpointError for a factor that is not finite, or is not in the dtype of products, ConfigError for more
    ranks than there is room for.
    """
    found = dict[str, tuple[Tensor, Tensor]]()
    for param in _changed(params, set(folder.modules)):
        factors = adapters.factors[param.name]
        if folder.rank > factors.rank:
            raise ConfigError(
                f"{folder.path}: it has rank {folder.rank}, have {factors.rank}; start with --max-lora-rank"
                f" {folder.rank}"
            )
        a, b = (torch.zeros(each.shape[1:], dtype=each.dtype, pin_memory=pinned) for each in (factors.a, factors.b))
        _fill(a, b, factors.ends, folder, param)
        found[param.name] = a, b
    return found


def put(adapters: Adapters, slot: int, host: HostFactors) -> None:
    """These factors are the slot's, behind what the device does already."""
    for name, factors in adapters.factors.items():
        if name in host:
            a, b = host[name]
            factors.a[slot].copy_(a, non_blocking=True)
            factors.b[slot].copy_(b, non_blocking=True)
        else:
            factors.a[slot].zero_()
            factors.b[slot].zero_()


def _changed(params: Iterable[Param], modules: set[str]) -> list[Param]:
    """Those that are made of one of these modules."""
    return [p for p in params if is_adaptable(p) and any(source.module in modules for source in p.sources)]


def _fill(a: Tensor, b: Tensor, ends: Sequence[int], folder: LoraFolder, param: Param) -> None:
    """Each source has a part of the ranks, and its own rows. a: [joined * rank, in]. b: [out, rank]."""
    row, rank = 0, b.shape[1]
    for index, (source, end) in enumerate(zip(param.sources, ends, strict=True)):
        module = folder.modules.get(source.module)
        if module is not None:
            own_a, own_b = _own(source, *folder.read(module.name))
            of_a, of_b = a[index * rank : index * rank + module.rank], b[row:end, : module.rank]
            of_a.copy_(own_a)
            of_b.copy_(own_b.to(torch.float64) * module.scale)
            if not (all_finite(of_a) and all_finite(of_b)):
                raise CheckpointError(
                    f"{folder.path}: A of {module.name}, or B times its scale {module.scale}, has numbers beyond those"
                    f" of {str(a.dtype).removeprefix('torch.')}; start with another --dtype"
                )
        row = end


def _rows(param: Param, source: CheckpointTensor) -> int:
    """How many rows of a rank's parameter are made of a source."""
    span = source.span
    return span.stop - span.start if span is not None and span.axis == 0 else param.rows_of(source)


def _own(source: CheckpointTensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank has of a module's factors: rows of B as of the weight, columns of A as of its input."""
    span = source.span
    rows = b if source.transform is None else source.transform(b)
    if span is None:
        return a, rows
    if span.axis == 1:
        return a[:, span.start : span.stop], rows
    return a, rows[span.start : span.stop]
