"""Adapters in memory: tables with a slot for each folder, filled as the weights beside them are."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from treetop.checkpoints.lora_folder import LoraFolder, is_adaptable
from treetop.checkpoints.params import Param
from treetop.kernels.gemm.adapter_rows import AdapterFactors
from treetop.weights.adapted import Adapters
from treetop.weights.format import Source

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


def make_adapters(
    folders: Sequence[LoraFolder], params: Iterable[Param], rows: int, dtype: torch.dtype, zeros: Zeros
) -> Adapters:
    """Tables for these, in slots from 1 on, of zeros. params: a rank's own. rows: of the largest batch."""
    changed = {module for folder in folders for module in folder.modules}
    rank, slots, factors = max(folder.rank for folder in folders), len(folders) + 1, dict[str, AdapterFactors]()
    for param in _changed(params, changed):
        (out, width), ends = param.shape, tuple(accumulate(_rows(param, source) for source in param.sources))
        a, b = zeros((slots, rank * len(ends), width), dtype), zeros((slots, out, rank), dtype)
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=a.device)
        factors[param.name] = AdapterFactors(a, b, ends, bounds)
    return Adapters(factors, slots, zeros((rows,), torch.int64), zeros((4, rows), torch.int32))


def load_adapters(adapters: Adapters, folders: Sequence[LoraFolder], params: Iterable[Param]) -> None:
    """Read each folder into its slot. Raises CheckpointError for a factor that is not finite."""
    listed = list(params)
    for slot, folder in enumerate(folders, 1):
        for param in _changed(listed, set(folder.modules)):
            _fill(adapters.factors[param.name], slot, folder, param)


def _changed(params: Iterable[Param], modules: set[str]) -> list[Param]:
    """Those that are made of one of these modules."""
    return [p for p in params if is_adaptable(p) and any(source.module in modules for source in p.sources)]


def _fill(factors: AdapterFactors, slot: int, folder: LoraFolder, param: Param) -> None:
    """Each source has a part of the ranks, and its own rows."""
    row = 0
    for index, (source, end) in enumerate(zip(param.sources, factors.ends, strict=True)):
        module = folder.modules.get(source.module)
        if module is not None:
            a, b = _own(source, *folder.read(module.name))
            first = index * factors.rank
            factors.a[slot, first : first + module.rank].copy_(a)
            factors.b[slot, row:end, : module.rank].copy_(b.to(torch.float64) * module.scale)
        row = end


def _rows(param: Param, source: Source) -> int:
    """How many rows of a rank's parameter are made of a source."""
    span = source.span
    return span.stop - span.start if span is not None and span.axis == 0 else param.rows_of(source)


def _own(source: Source, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank has of a module's factors: rows of B as of the weight, columns of A as of its input."""
    span = source.span
    rows = b if source.transform is None else source.transform(b)
    if span is None:
        return a, rows
    if span.axis == 1:
        return a[:, span.start : span.stop], rows
    return a, rows[span.start : span.stop]
